"""After how many answers `slipstream audit` finds each named fault, and how many honest audits it accuses.

    python -m benchmarks.audit                    # all faults, three audits each, and 200 honest audits
    python -m benchmarks.audit --audits 2 --honest 10 --pool 1000    # a quick look
    python -m benchmarks.audit --part verb        # one part alone, so that parts can run side by side

On the embedded pair. Nothing is timed, so the machine may be busy. Finished cells are kept: the same command goes on
from where it was stopped. Writes docs/benchmarks/audit_power.json and the page beside it, once all parts are there.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from benchmarks.audit.detection import Found, by_reference, by_samples, by_seeds, by_usage
from benchmarks.audit.faults import FAULTS, HONEST, HONEST_CLASSICAL, HONEST_SEEDED, Answered, Fault
from benchmarks.audit.honest import reference_audits, samples_audits
from benchmarks.audit.page import page
from benchmarks.audit.reference import Reference
from benchmarks.audit.service import GREEDY, NUCLEUS, PLAIN, Service, chunks, prompts
from benchmarks.audit.verb import Auditor, trials
from benchmarks.harness.command import DOCS, command
from benchmarks.harness.kept import Kept, say, write_result
from slipstream.profiling.provenance import provenance
from slipstream.sampling.params import SamplingParams

RESULT = DOCS / "audit_power.json"
NUM_PROMPTS = 25
NUM_ANSWERS, NUM_CUT_ANSWERS, NUM_PAIRS = 300, 3000, 1000
USAGE, SEEDS, REFERENCE = "usage", "shared seeds", "reference"
"""Kinds of audits."""
SEEDED_PARAMS = [GREEDY, PLAIN, NUCLEUS]
SAMPLED_PARAMS = [PLAIN, NUCLEUS]
OTHER_SEEDS = 500
"""Added to the seed of the side without speculation where both are to be independent."""
FEW_PAIRS = 250
"""Pairs of most honest audits from samples alone, which are shorter so that fewer of them share answers."""
POOL_PART = 500
HONEST_POOLS = {
    "plain": (HONEST_CLASSICAL, PLAIN, 2),
    "top_p": (HONEST_CLASSICAL, NUCLEUS, 3),
    "off": (None, PLAIN, 502),
}
"""By name: the server, how it is asked, and with which seed."""
SLOW = {("3 in 1,000 answers cut", REFERENCE), ("a tie broken otherwise", REFERENCE)}
"""Audited once only: they take answers by the hundred or thousand, and the bars ask for shared seeds."""
FROM_SAMPLES = {
    "temperature 0.8 served as 0.95": PLAIN,
    "top_p ignored": NUCLEUS,
    "greedy drafts verified as if sampled": PLAIN,
}
"""Faults that samples alone must show, and the parameters under which they are looked for."""


class Bench:
    """The honest engine without speculation, which is also the reference, and a faulty one at a time."""

    def __init__(self) -> None:
        self.prompts = prompts(NUM_PROMPTS)
        self._without: dict[tuple[str, int, int], list[Answered]] = {}
        self._last: tuple[str, Service] | None = None

    @cached_property
    def off(self) -> Service:
        return Service(None)

    @cached_property
    def reference(self) -> Reference:
        return Reference(self.off.llm.engine, self.prompts)

    def service(self, fault: Fault) -> Service:
        """The engine with this fault; the last one is kept."""
        if self._last is None or self._last[0] != fault.name:
            self._last = None  # first, so that there are never two
            self._last = fault.name, Service(fault)
        return self._last[1]

    def faulted(self, fault: Fault, kind: str, seed: int) -> dict[str, Any]:
        """One audit of one fault, of a kind that needs no second sample."""
        service = self.service(fault)
        num = NUM_CUT_ANSWERS if "cut" in fault.name else NUM_ANSWERS
        params = SAMPLED_PARAMS if kind == REFERENCE else SEEDED_PARAMS
        answers = service.stream(self.prompts, params, seed, num)
        if kind == USAGE:
            found = by_usage(answers)
        elif kind == SEEDS:
            found = by_seeds(answers, self.without(SEEDED_PARAMS, seed, num))
        else:
            found = by_reference(answers, self.reference)
        return dataclasses.asdict(found)

    def from_samples(self, name: str, seed: int) -> dict[str, Any]:
        """One audit of the fault of this name from samples alone."""
        params = FROM_SAMPLES[name]
        fault = next(each for each in FAULTS if each.name == name)
        answers = self.service(fault).stream(self.prompts, [params], seed, NUM_PAIRS)
        without = self.without([params], seed + OTHER_SEEDS, NUM_PAIRS)
        return dataclasses.asdict(by_samples(answers, without))

    def without(self, params: Seq[SamplingParams], seed: int, num: int, first: int = 0) -> Iterator[Answered]:
        """Answers `first` to `num` without speculation. They are made once for all that is compared with them."""
        for numbers in chunks(first, num):
            place = (repr(params), seed, numbers.start)
            if place not in self._without:
                self._without[place] = self.off.answers(self.prompts, params, seed, numbers)
            yield from self._without[place]

    def honest_seeded(self, num_audits: int) -> dict[str, Any]:
        """Honest audits under shared seeds, each of answers of its own."""
        coupled = self.service(HONEST_SEEDED)
        return _alarms(
            [
                by_seeds(
                    coupled.stream(self.prompts, SEEDED_PARAMS, seed, NUM_ANSWERS),
                    self.without(SEEDED_PARAMS, seed, NUM_ANSWERS),
                )
                for seed in range(1, num_audits + 1)
            ]
        )

    def honest_answers(self, side: str, numbers: range) -> list[Any]:
        """A part of the pool of honest answers: plain and with top_p from the server that keeps no seed, and plain ones
        from the engine without speculation."""
        fault, params, seed = HONEST_POOLS[side]
        if fault is None:
            found = list(self.without([params], seed, numbers.stop, numbers.start))
        else:
            stream = self.service(fault).stream(self.prompts, [params], seed, numbers.stop, numbers.start)
            found = list(stream)
        return [[one.prompt, one.token_ids, one.finish_reason] for one in found]

    def honest_sampled(self, pools: dict[str, list[Any]], num_audits: int) -> dict[str, Any]:
        """Honest audits of a server that keeps no seed, drawn from pools of answers."""
        answers = {side: _answered(pool, HONEST_POOLS[side][1]) for side, pool in pools.items()}
        scores = [self.reference.score(one) for one in (*answers["plain"], *answers["top_p"])]
        say(f"{len(scores):,} honest answers scored")
        on, off = answers["plain"], answers["off"]
        most = len(on) // 2
        num_answers, few, many = (min(num, most) for num in (NUM_ANSWERS, FEW_PAIRS, NUM_PAIRS))
        return {
            f"reference, {num_answers} answers": _alarms(reference_audits(scores, num_audits, num_answers)),
            f"samples alone, {few} pairs": _alarms(samples_audits(on, off, num_audits, few)),
            f"samples alone, {many} pairs": _alarms(samples_audits(on, off, max(1, num_audits // 5), many)),
        }


def _answered(pool: list[Any], params: SamplingParams) -> list[Answered]:
    return [Answered(prompt, params, ids, reason, len(ids)) for prompt, ids, reason in pool]


def _alarms(audits: list[Found]) -> dict[str, Any]:
    alarms = [one.how for one in audits if one.after is not None]
    return {"num_audits": len(audits), "num_false_alarms": len(alarms), "signs": alarms}


def kinds_of(fault: Fault) -> list[str]:
    """The audits of a fault that need no second sample."""
    if fault.usage:
        return [USAGE]
    return [SEEDS, REFERENCE] if fault.seeds else [REFERENCE]


def measure_faults(options: argparse.Namespace, kept: Kept, bench: Bench) -> dict[str, Any]:
    """Through the statistics, answers from the engine."""
    kinds = [(fault, kind) for fault in FAULTS for kind in kinds_of(fault) if (fault.name, kind) not in SLOW]
    return _audits(kinds, options.audits, kept, bench)


def measure_slow(_options: argparse.Namespace, kept: Kept, bench: Bench) -> dict[str, Any]:
    """The same for what takes long, once."""
    return _audits(
        [(fault, kind) for fault in FAULTS for kind in kinds_of(fault) if (fault.name, kind) in SLOW],
        1,
        kept,
        bench,
    )


def _audits(kinds: Seq[tuple[Fault, str]], num_audits: int, kept: Kept, bench: Bench) -> dict[str, Any]:
    """By fault and kind, those audits that there are."""
    found: dict[str, dict[str, list[Any]]] = {}
    for fault, kind in kinds:
        audits = [
            kept.cell(f"{fault.name}, {kind}, seed {seed}", partial(bench.faulted, fault, kind, seed))
            for seed in range(1, num_audits + 1)
        ]
        if there := [audit for audit in audits if audit is not None]:
            found.setdefault(fault.name, {})[kind] = there
    return found


def measure_samples(options: argparse.Namespace, kept: Kept, bench: Bench) -> dict[str, Any]:
    """The same from samples alone."""
    return {
        name: [
            found
            for seed in range(1, options.audits + 1)
            if (found := kept.cell(f"{name}, seed {seed}", partial(bench.from_samples, name, seed)))
        ]
        for name in FROM_SAMPLES
    }


def measure_honest(options: argparse.Namespace, kept: Kept, bench: Bench) -> dict[str, Any]:
    """The same, without a fault."""
    pools: dict[str, list[Any]] = {}
    for side in HONEST_POOLS:
        size = options.pool // 2 if side == "top_p" else options.pool
        for start in range(0, size, POOL_PART):
            numbers = range(start, min(start + POOL_PART, size))
            name = f"{side} {numbers.start} to {numbers.stop}"
            part = kept.cell(name, partial(bench.honest_answers, side, numbers))
            pools.setdefault(side, []).extend(part or ())
    seeded = max(1, options.honest // 100)
    coupled = kept.cell("shared seeds", partial(bench.honest_seeded, seeded))
    drawn = kept.cell(f"drawn from {options.pool}", partial(bench.honest_sampled, pools, options.honest))
    return {name: each for name, each in {SEEDS: coupled, **(drawn or {})}.items() if each is not None}


def measure_verb(_options: argparse.Namespace, kept: Kept, _bench: Bench) -> list[Any]:
    """Through the command's own code, over HTTP."""
    auditor = Auditor()
    found = {trial.name: kept.cell(trial.name, partial(auditor.run, trial)) for trial in trials(FAULTS)}
    return [each for each in found.values() if each is not None]


PARTS: dict[str, tuple[Callable[[argparse.Namespace, Kept, Bench], Any], Seq[str]]] = {
    "faults": (measure_faults, ()),
    "samples": (measure_samples, ()),
    "honest": (measure_honest, ("honest",)),
    "verb": (measure_verb, ()),
    "slow": (measure_slow, ()),
}
"""Each with the options that its cells depend on."""


def part_file(options: argparse.Namespace, part: str) -> Path:
    """Beside which a part keeps its cells."""
    output: Path = options.output
    return output.with_name(f"{output.stem}_{part}.json")


def _kept(options: argparse.Namespace, part: str) -> Path:
    return part_file(options, part).with_suffix(".partial.json")


def measure(options: argparse.Namespace, part: str, bench: Bench) -> dict[str, Any]:
    """A part's cells, and where they were measured."""
    run, needed = PARTS[part]
    settings = {name: getattr(options, name) for name in needed}
    kept = Kept(part_file(options, part), settings, merge=options.merge)
    return {"commit": kept.origin["commit"], "cells": run(options, kept, bench)}


def _missing(found: dict[str, Any], num_audits: int) -> list[str]:
    """What is not measured yet."""
    cells = {part: found[part]["cells"] if part in found else {} for part in PARTS}
    missing = [
        f"{fault.name} by {kind}"
        for fault in FAULTS
        for kind in kinds_of(fault)
        if not any(kind in cells[part].get(fault.name, {}) for part in ("faults", "slow"))
    ]
    missing += [
        f"{name} from samples alone ({num} of {num_audits} audits)"
        for name in FROM_SAMPLES
        if (num := num_audits - len(cells["samples"].get(name, ())))
    ]
    missing += ["honest engines but for shared seeds"] if len(cells["honest"]) < 2 else []
    num_trials = len(trials(FAULTS)) - len(cells["verb"])
    return missing + ([f"{num_trials} audits through the command"] if num_trials else [])


def main() -> None:
    parser = command(__doc__, RESULT)
    parser.add_argument("--audits", type=int, default=3, help="of each fault and kind")
    parser.add_argument("--honest", type=int, default=200, help="honest audits of each kind")
    parser.add_argument("--pool", type=int, default=10_000, help="honest answers of either side to draw from")
    parser.add_argument("--part", choices=PARTS, help="measure this part alone; its cells are kept")
    parser.add_argument(
        "--merge", action="store_true", help="take the kept cells, of any commit; measure nothing"
    )
    options = parser.parse_args()
    bench = Bench()
    if options.part is not None:
        measure(options, options.part, bench)
        return
    parts = [part for part in PARTS if not options.merge or _kept(options, part).exists()]
    for audits in range(1, options.audits):  # first one audit of everything, so that a short run has seen all
        for part in [part for part in parts if part != "slow"]:
            measure(argparse.Namespace(**{**vars(options), "audits": audits}), part, bench)
    found = {part: measure(options, part, bench) for part in parts}
    result = {
        "provenance": provenance(),
        "confidence": 0.99,
        "num_prompts": NUM_PROMPTS,
        "max_tokens": PLAIN.max_tokens,
        "num_answers": NUM_ANSWERS,
        "num_cut_answers": NUM_CUT_ANSWERS,
        "num_pairs": NUM_PAIRS,
        "num_pool": options.pool,
        "honest_engines": [each.name for each in HONEST],
        "missing": _missing(found, options.audits),
        "commits": {part: each["commit"] for part, each in found.items()},
        **{part: each["cells"] for part, each in found.items()},
    }
    write_result(options.output, result, page)
    for part in [] if options.merge else PARTS:
        _kept(options, part).unlink(missing_ok=True)


if __name__ == "__main__":
    main()
