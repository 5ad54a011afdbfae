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
import json
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol

from benchmarks.audit.detection import Found, by_reference, by_samples, by_seeds, by_usage
from benchmarks.audit.faults import FAULTS, HONEST, HONEST_CLASSICAL, HONEST_SEEDED, Answered, Fault
from benchmarks.audit.honest import reference_audits, samples_audits
from benchmarks.audit.page import write_page
from benchmarks.audit.reference import Reference
from benchmarks.audit.service import CHUNK, GREEDY, NUCLEUS, PLAIN, Service, prompts
from benchmarks.audit.verb import Auditor, trials
from benchmarks.kept import Kept, say, write_result
from slipstream.provenance import commit, provenance
from slipstream.sampling.params import SamplingParams

RESULT = Path(__file__).parents[2] / "docs/benchmarks/audit_power.json"
NUM_PROMPTS = 25
NUM_ANSWERS, NUM_CUT_ANSWERS, NUM_PAIRS = 300, 3000, 1000
SEEDED_PARAMS = [GREEDY, PLAIN, NUCLEUS]
SAMPLED_PARAMS = [PLAIN, NUCLEUS]
OTHER_SEEDS = 500
"""Added to the seed of the side without speculation where both are to be independent."""
FEW_PAIRS = 250
"""Of the honest audits from samples alone most are shorter: so fewer of them share answers."""
POOL_PART = 500
HONEST_POOLS = {
    "plain": (HONEST_CLASSICAL, PLAIN, 2),
    "top_p": (HONEST_CLASSICAL, NUCLEUS, 3),
    "off": (None, PLAIN, 502),
}
"""By name: the server, how it is asked, and with which seed."""
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
        self._seeded: dict[int, list[Answered]] = {}

    @cached_property
    def off(self) -> Service:
        return Service(None)

    @cached_property
    def reference(self) -> Reference:
        return Reference(self.off.llm.engine, self.prompts)

    def faulted(self, fault: Fault, num_audits: int) -> dict[str, Any]:
        """All audits of one fault, by kind."""
        service = Service(fault)
        num = NUM_CUT_ANSWERS if "cut" in fault.name else NUM_ANSWERS
        kinds: dict[str, list[Found]] = {}
        for seed in range(1, num_audits + 1):
            if fault.usage:
                answers = service.stream(self.prompts, SEEDED_PARAMS, seed, num)
                kinds.setdefault("usage", []).append(by_usage(answers))
                continue
            if fault.seeds:
                answers = service.stream(self.prompts, SEEDED_PARAMS, seed, num)
                found = by_seeds(answers, self._without(seed, num))
                kinds.setdefault("shared seeds", []).append(found)
            answers = service.stream(self.prompts, SAMPLED_PARAMS, seed, num)
            kinds.setdefault("reference", []).append(by_reference(answers, self.reference))
        return {kind: [dataclasses.asdict(one) for one in found] for kind, found in kinds.items()}

    def from_samples(self, name: str, seed: int) -> dict[str, Any]:
        """One audit of the fault of this name from samples alone."""
        params = FROM_SAMPLES[name]
        fault = next(each for each in FAULTS if each.name == name)
        answers = Service(fault).stream(self.prompts, [params], seed, NUM_PAIRS)
        without = self.off.stream(self.prompts, [params], seed + OTHER_SEEDS, NUM_PAIRS)
        return dataclasses.asdict(by_samples(answers, without))

    def _without(self, seed: int, num: int) -> Iterator[Answered]:
        """The honest answers under shared seeds, which every fault is compared with."""
        kept = self._seeded.setdefault(seed, [])
        for start in range(0, num, CHUNK):
            if start >= len(kept):
                kept += self.off.answers(self.prompts, SEEDED_PARAMS, seed, range(start, start + CHUNK))
            yield from kept[start : start + CHUNK]

    def honest_seeded(self, num_audits: int) -> dict[str, Any]:
        """Honest audits under shared seeds, each of answers of its own."""
        coupled = Service(HONEST_SEEDED)
        return _alarms(
            [
                by_seeds(
                    coupled.stream(self.prompts, SEEDED_PARAMS, seed, NUM_ANSWERS),
                    self._without(seed, NUM_ANSWERS),
                )
                for seed in range(1, num_audits + 1)
            ]
        )

    def honest_answers(self, side: str, numbers: range) -> list[Any]:
        """A part of the pool of honest answers: plain and with top_p from the server that keeps no seed, and plain ones
        from the engine without speculation."""
        fault, params, seed = HONEST_POOLS[side]
        service = self.off if fault is None else Service(fault)
        found: list[Answered] = []
        for start in range(numbers.start, numbers.stop, CHUNK):
            part = range(start, min(start + CHUNK, numbers.stop))
            found += service.answers(self.prompts, [params], seed, part)
        return [[one.prompt, one.token_ids, one.finish_reason] for one in found]

    def honest_sampled(self, pools: dict[str, list[Any]], num_audits: int) -> dict[str, Any]:
        """Honest audits of a server that keeps no seed, drawn from pools of answers."""
        answers = {side: _answered(pool, HONEST_POOLS[side][1]) for side, pool in pools.items()}
        scores = [self.reference.score(one) for one in (*answers["plain"], *answers["top_p"])]
        say(f"{len(scores):,} honest answers scored")
        on, off = answers["plain"], answers["off"]
        most = len(on) // 2
        return {
            "reference": _alarms(reference_audits(scores, num_audits, min(NUM_ANSWERS, most))),
            f"samples alone, {FEW_PAIRS} pairs": _alarms(
                samples_audits(on, off, num_audits, min(FEW_PAIRS, most))
            ),
            f"samples alone, {NUM_PAIRS} pairs": _alarms(
                samples_audits(on, off, max(1, num_audits // 5), min(NUM_PAIRS, most))
            ),
        }


def _answered(pool: list[Any], params: SamplingParams) -> list[Answered]:
    return [Answered(prompt, params, ids, reason, len(ids)) for prompt, ids, reason in pool]


def _alarms(audits: list[Found]) -> dict[str, Any]:
    alarms = [one.how for one in audits if one.after is not None]
    return {"num_audits": len(audits), "num_false_alarms": len(alarms), "signs": alarms}


class Cells(Protocol):
    """Where finished cells are looked up, and missing ones measured."""

    def cell(self, name: str, measure: Callable[[], Any]) -> Any: ...


class Measured:
    """The cells of a part as they were measured, at whatever commit; None for those that were not."""

    def __init__(self, file: Path) -> None:
        """`file` is the partial one that `Kept` wrote."""
        kept = json.loads(file.read_text())
        self.settings = kept["settings"]
        self._cells = kept["cells"]

    def cell(self, name: str, _measure: Callable[[], Any]) -> Any:
        return self._cells.get(name)


def measure_faults(options: argparse.Namespace, kept: Cells) -> dict[str, Any]:
    """Through the statistics, answers from the engine."""
    bench = Bench()
    found = {
        fault.name: kept.cell(fault.name, partial(bench.faulted, fault, options.audits)) for fault in FAULTS
    }
    return _there(found)


def measure_samples(options: argparse.Namespace, kept: Cells) -> dict[str, Any]:
    """The same from samples alone."""
    bench = Bench()
    return {
        name: [
            found
            for seed in range(1, options.audits + 1)
            if (found := kept.cell(f"{name}, seed {seed}", partial(bench.from_samples, name, seed)))
        ]
        for name in FROM_SAMPLES
    }


def measure_honest(options: argparse.Namespace, kept: Cells) -> dict[str, Any]:
    """The same, without a fault."""
    bench = Bench()
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
    return _there({"shared seeds": coupled, **(drawn or {})})


def measure_verb(_options: argparse.Namespace, kept: Cells) -> list[Any]:
    """Through the command's own code, over HTTP."""
    auditor = Auditor()
    found = {trial.name: kept.cell(trial.name, partial(auditor.run, trial)) for trial in trials(FAULTS)}
    return list(_there(found).values())


def _there(found: dict[str, Any]) -> dict[str, Any]:
    return {name: each for name, each in found.items() if each is not None}


PARTS: dict[str, tuple[Callable[[argparse.Namespace, Cells], Any], Seq[str]]] = {
    "faults": (measure_faults, ("audits",)),
    "samples": (measure_samples, ()),
    "honest": (measure_honest, ("honest",)),
    "verb": (measure_verb, ()),
}
"""Each with the options that its cells depend on."""


def part_file(options: argparse.Namespace, part: str) -> Path:
    """Beside which a part keeps its cells."""
    output: Path = options.output
    return output.with_name(f"{output.stem}_{part}.json")


def _kept(options: argparse.Namespace, part: str) -> Path:
    return part_file(options, part).with_suffix(".partial.json")


def measure(options: argparse.Namespace, part: str) -> dict[str, Any]:
    """A part's cells, and where they were measured."""
    run, needed = PARTS[part]
    file = part_file(options, part)
    if options.merge:
        found = Measured(_kept(options, part))
        return {"commit": found.settings["commit"], "cells": run(options, found)}
    kept = Kept(file, {name: getattr(options, name) for name in needed})
    return {"commit": commit(), "cells": run(options, kept)}


def _missing(found: dict[str, Any], num_audits: int) -> list[str]:
    """What is not measured yet."""
    cells = {part: found[part]["cells"] if part in found else {} for part in PARTS}
    missing = [fault.name for fault in FAULTS if fault.name not in cells["faults"]]
    missing += [
        f"{name} from samples alone ({num} of {num_audits} audits)"
        for name in FROM_SAMPLES
        if (num := num_audits - len(cells["samples"].get(name, ())))
    ]
    missing += ["honest engines but for shared seeds"] if "reference" not in cells["honest"] else []
    num_trials = len(trials(FAULTS)) - len(cells["verb"])
    return missing + ([f"{num_trials} audits through the command"] if num_trials else [])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--audits", type=int, default=3, help="of each fault and kind")
    parser.add_argument("--honest", type=int, default=200, help="honest audits of each kind")
    parser.add_argument("--pool", type=int, default=10_000, help="honest answers of either side to draw from")
    parser.add_argument("--part", choices=PARTS, help="measure this part alone; its cells are kept")
    parser.add_argument(
        "--merge", action="store_true", help="take the kept cells, of any commit; measure nothing"
    )
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    if options.part is not None:
        measure(options, options.part)
        return
    parts = [part for part in PARTS if not options.merge or _kept(options, part).exists()]
    found = {part: measure(options, part) for part in parts}
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
    write_result(options.output, result)
    write_page(result, options.output.with_suffix(".md"))
    for part in [] if options.merge else PARTS:
        _kept(options, part).unlink(missing_ok=True)


if __name__ == "__main__":
    main()
