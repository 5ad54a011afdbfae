"""After how many answers `slipstream audit` finds each named fault, and how many honest audits it accuses.

    python -m benchmarks.audit                    # all faults, three audits each, and 200 honest audits
    python -m benchmarks.audit --audits 2 --honest 10 --pool 1000    # a quick look

On the embedded pair. Nothing is timed, so the machine may be busy. Finished cells are kept: the same command goes on
from where it was stopped. Writes docs/benchmarks/audit_power.json and the page beside it.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.audit.detection import Found, by_reference, by_samples, by_seeds, by_usage
from benchmarks.audit.faults import FAULTS, HONEST, HONEST_CLASSICAL, HONEST_SEEDED, Answered, Fault
from benchmarks.audit.honest import reference_audits, samples_audits
from benchmarks.audit.page import write_page
from benchmarks.audit.reference import Reference
from benchmarks.audit.service import CHUNK, GREEDY, NUCLEUS, PLAIN, Service, prompts
from benchmarks.kept import Kept
from slipstream.provenance import provenance

RESULT = Path(__file__).parents[2] / "docs/benchmarks/audit_power.json"
NUM_PROMPTS = 25
NUM_ANSWERS, NUM_CUT_ANSWERS, NUM_PAIRS = 300, 3000, 1000
SEEDED_PARAMS = [GREEDY, PLAIN, NUCLEUS]
SAMPLED_PARAMS = [PLAIN, NUCLEUS]
OTHER_SEEDS = 500
"""Added to the seed of the side without speculation where both are to be independent."""
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
        self.off = Service(None)
        self.reference = Reference(self.off.llm.engine, self.prompts)
        self._seeded: dict[int, list[Answered]] = {}

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
            if params := FROM_SAMPLES.get(fault.name):
                answers = service.stream(self.prompts, [params], seed, NUM_PAIRS)
                without = self.off.stream(self.prompts, [params], seed + OTHER_SEEDS, NUM_PAIRS)
                kinds.setdefault("samples alone", []).append(by_samples(answers, without))
        return {kind: [dataclasses.asdict(one) for one in found] for kind, found in kinds.items()}

    def _without(self, seed: int, num: int) -> Iterator[Answered]:
        """The honest answers under shared seeds, which every fault is compared with."""
        kept = self._seeded.setdefault(seed, [])
        for start in range(0, num, CHUNK):
            if start >= len(kept):
                kept += self.off.answers(self.prompts, SEEDED_PARAMS, seed, range(start, start + CHUNK))
            yield from kept[start : start + CHUNK]

    def honest(self, num_audits: int, pool: int) -> dict[str, Any]:
        """Honest audits by kind; those under shared seeds have answers of their own each."""
        coupled, classical = Service(HONEST_SEEDED), Service(HONEST_CLASSICAL)
        seeded = [
            by_seeds(
                coupled.stream(self.prompts, SEEDED_PARAMS, seed, NUM_ANSWERS),
                self._without(seed, NUM_ANSWERS),
            )
            for seed in range(1, num_audits // 50 + 1)  # each has answers of its own
        ]
        scores = [
            self.reference.score(one) for one in classical.stream(self.prompts, SAMPLED_PARAMS, 1, pool)
        ]
        on = list(classical.stream(self.prompts, [PLAIN], 2, pool))
        off = list(self.off.stream(self.prompts, [PLAIN], 2 + OTHER_SEEDS, pool))
        found = {
            "shared seeds": seeded,
            "reference": reference_audits(scores, num_audits, min(NUM_ANSWERS, pool)),
            "samples alone": samples_audits(on, off, num_audits, min(NUM_PAIRS, pool // 2)),
        }
        return {
            kind: {"num_audits": len(each), "num_false_alarms": sum(one.after is not None for one in each)}
            for kind, each in found.items()
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--audits", type=int, default=3, help="of each fault and kind")
    parser.add_argument("--honest", type=int, default=200, help="honest audits of each kind")
    parser.add_argument("--pool", type=int, default=2_500, help="honest answers of either side to draw from")
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    output = options.output
    kept = Kept(output, {name: value for name, value in vars(options).items() if name != "output"})
    bench = Bench()
    faults = {
        fault.name: kept.cell(fault.name, partial(bench.faulted, fault, options.audits)) for fault in FAULTS
    }
    honest = kept.cell("honest", partial(bench.honest, options.honest, options.pool))
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
        "faults": faults,
        "honest": honest,
    }
    kept.finish(result)
    write_page(result, output.with_suffix(".md"))


if __name__ == "__main__":
    main()
