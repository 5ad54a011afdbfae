"""Step-level speculation: accuracy, tokens and time over the threshold, beside every honest alternative.

    python -m recipes.reasoning_pair --out PAIR
    python -m benchmarks.reasoning --pair PAIR                 # 500 problems; goes on where it was stopped
    python -m benchmarks.reasoning --pair PAIR --problems 60 --timed 2 --parameters 60M

Two parts. Accuracy, tokens and target passes are of all problems, greedy, with the pair as it was trained. Time is of
the first `--timed` problems, one at a time, with a target of `--parameters` in int8 (cost-expanded: the same function
at the cost of a larger model), every way in turn; ratios are of sums over problems, with bootstrap intervals. Ways: the
target alone, the draft alone, lossless speculation with the same draft, drafted steps, and both together, for each
judge and threshold. Writes docs/benchmarks/reasoning.json, .md and .svg.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import binomtest

from benchmarks.harness.command import DOCS, command
from benchmarks.harness.kept import Kept, say
from benchmarks.harness.models import expanded
from benchmarks.harness.rounds import turns
from benchmarks.reasoning_page import draw, page
from recipes.reasoning_pair.problems import QUESTION, SEPARATOR, THINK_END, Problem, held_out_problems
from slipstream import LLM, SamplingParams
from slipstream.engine.outputs import RequestOutput
from slipstream.stats.paired import PairedAccuracy

RESULT = DOCS / "reasoning.json"
THRESHOLDS = {
    "score": (0.0, 5.0, 7.0, 8.0, 8.5),
    "logprob": (-9.0, -1.1, -0.9, -0.75, -0.6),
}
"""The lowest keeps every step that the judge may keep."""
DEPTHS = (2, 4, 8)
"""Draft tokens of lossless speculation; the fastest is what the others are compared with."""
TREE = {"tree_top_k": 2, "num_draft_nodes": 12}
"""Lossless speculation that follows both wordings of a fork."""
DEPTH_BESIDE = 4
"""Beside drafted steps."""
PARAMS = SamplingParams(temperature=0, max_tokens=240)
BAR = 1.3
CHECKED_AT_ONCE = 16
SIZES: dict[str, Any] = {"max_model_len": 384, "max_num_seqs": CHECKED_AT_ONCE, "kv_memory_fraction": 0.05}


@dataclass(frozen=True)
class Way:
    """One way to answer."""

    name: str
    kind: str
    """target, draft, lossless, steps or both."""
    depth: int = 0
    has_tree: bool = False
    judge: str = ""
    threshold: float = 0.0

    @property
    def reasoning(self) -> dict[str, Any] | None:
        """What its requests ask for."""
        if not self.judge:
            return None
        return {"judge": self.judge, "threshold": self.threshold, "protect_first_steps": 1}


def ways() -> list[Way]:
    """All of them, the reference first."""
    found = [Way("target alone", "target"), Way("draft alone", "draft")]
    found += [Way(f"lossless, {depth} tokens", "lossless", depth) for depth in DEPTHS]
    found.append(
        Way(f"lossless, a tree of {TREE['num_draft_nodes']}", "lossless", max(DEPTHS), has_tree=True)
    )
    for judge, thresholds in THRESHOLDS.items():
        for threshold in thresholds:
            for kind, depth in (("steps", 0), ("both", DEPTH_BESIDE)):
                found.append(Way(f"{kind}, {judge} {threshold:g}", kind, depth, False, judge, threshold))
    return found


class Engines:
    """The target with the draft beside it, which answers every way but one, and the draft alone. Each is loaded once: a
    request says how many tokens may be drafted for it, and whether steps are."""

    def __init__(self, target: Path, draft: Path, quantization: str | None) -> None:
        self._target, self._draft, self._quantization = target, draft, quantization
        self._made: dict[tuple[bool, bool], LLM] = {}

    def of(self, way: Way) -> LLM:
        """The engine that answers this way."""
        key = is_draft, has_tree = way.kind == "draft", way.has_tree
        if key not in self._made:
            self._made[key] = self._draft_alone() if is_draft else self._both(TREE if has_tree else {})
        return self._made[key]

    def _draft_alone(self) -> LLM:
        return LLM(str(self._draft), **SIZES)

    def _both(self, shape: dict[str, Any]) -> LLM:
        steps = {
            "model": str(self._draft),
            "separator": SEPARATOR,
            "think_end": THINK_END,
            "question": QUESTION,
            "chunk_tokens": 16,  # a whole step in one call
        }
        return LLM(
            str(self._target),
            speculative_config={
                "method": "draft_model",
                "model": str(self._draft),
                "num_speculative_tokens": max(DEPTHS),
                **shape,
                "reasoning": steps,
            },
            allow_lossy=True,
            quantization=self._quantization,
            **SIZES,
        )

    def answer(self, way: Way, problems: Seq[Problem]) -> list[RequestOutput]:
        """All problems at once, with nothing left of earlier ones."""
        llm = self.of(way)
        llm.reset_caches()
        prompts = [problem.prompt for problem in problems]
        return llm.generate(
            prompts,
            PARAMS,
            use_tqdm=False,
            reasoning=way.reasoning,
            max_draft_tokens=TREE["num_draft_nodes"] if way.has_tree else way.depth,
        )


def answered(engines: Engines, way: Way, problems: Seq[Problem]) -> dict[str, Any]:
    """All problems in batches: which are right, and what it took."""
    outputs = engines.answer(way, problems)
    metrics = [output.metrics for output in outputs]
    return {
        "right": [problem.is_right(o.outputs[0].text) for problem, o in zip(problems, outputs, strict=True)],
        "num_tokens": sum(each.num_output_tokens for each in metrics),
        "num_passes": sum(each.num_steps for each in metrics),
        "num_steps": sum(len(each.reasoning_log) for each in metrics),
        "num_drafted_steps": sum(each.num_drafted_steps for each in metrics),
        "num_kept_steps": sum(each.num_kept_steps for each in metrics),
        "num_lossy_tokens": sum(each.num_lossy_tokens for each in metrics),
    }


def timed(engines: Engines, all_ways: Seq[Way], problem: Problem, turn: int) -> dict[str, float]:
    """Seconds of one problem by way, each alone, beginning with another way at each turn."""
    times: dict[str, float] = {}
    for way in turns(all_ways, turn):
        [output] = engines.answer(way, [problem])
        times[way.name] = output.metrics.total_s
    return times


def ratio_of(reference: Seq[float], other: Seq[float]) -> dict[str, float]:
    """How many times as fast `other` is, with a 95 % interval by bootstrap over problems."""
    before, after = np.array(reference), np.array(other)
    rng = np.random.default_rng(0)
    drawn = rng.integers(0, len(before), size=(2000, len(before)))
    ratios = before[drawn].sum(1) / after[drawn].sum(1)
    low, high = np.quantile(ratios, [0.025, 0.975])
    return {"ratio": float(before.sum() / after.sum()), "low": float(low), "high": float(high)}


def row_of(
    way: Way, cells: dict[str, Any], times: Seq[dict[str, float]], fastest: str, num: int
) -> dict[str, Any]:
    """What the page says of one way."""
    cell = cells[way.name]
    pair = PairedAccuracy.of(cells["target alone"]["right"], cell["right"])
    low, high = binomtest(pair.num_right, num).proportion_ci(method="wilson")
    row: dict[str, Any] = {
        "name": way.name, "kind": way.kind, "judge": way.judge, "threshold": way.threshold,
        "accuracy": pair.accuracy, "accuracy_low": low, "accuracy_high": high,
        "lost": pair.num_lost, "won": pair.num_won, "p_lower": pair.p_lower,
        "least_difference": pair.least_difference,
        "tokens": cell["num_tokens"] / num, "passes": cell["num_passes"] / num,
        "kept_share": cell["num_kept_steps"] / max(cell["num_steps"], 1),
        "drafted_share": cell["num_drafted_steps"] / max(cell["num_steps"], 1),
        "lossy_share": cell["num_lossy_tokens"] / max(cell["num_tokens"], 1),
    }  # fmt: skip
    if times:
        mine = [each[way.name] for each in times]
        row["seconds"] = sum(mine) / len(mine)
        row["over_lossless"] = ratio_of([each[fastest] for each in times], mine)
        row["over_target"] = ratio_of([each["target alone"] for each in times], mine)
    return row


def main() -> None:
    parser = command(__doc__, RESULT)
    parser.add_argument("--pair", type=Path, required=True, help="what recipes.reasoning_pair has written")
    parser.add_argument("--problems", type=int, default=500)
    parser.add_argument("--timed", type=int, default=20, help="problems that are timed, by every way in turn")
    parser.add_argument("--parameters", default="300M", help="of the target that is timed")
    options = parser.parse_args()
    problems = held_out_problems(options.problems)
    all_ways = ways()
    settings = {"problems": options.problems, "parameters": options.parameters, "timed": options.timed}
    kept = Kept(options.output, settings)
    small = Engines(options.pair / "target", options.pair / "draft", None)
    cells = {
        way.name: kept.cell(f"accuracy: {way.name}", partial(answered, small, way, problems))
        for way in all_ways
    }
    for way in all_ways:  # the lossless ones are the target's, problem by problem
        if way.kind == "lossless" and cells[way.name]["right"] != cells["target alone"]["right"]:
            say(f"{way.name}: other answers than the target's; that is a fault")
    times: list[dict[str, float]] = []
    if options.timed:
        copy = expanded(
            options.pair / f"target-{options.parameters}", options.parameters, source=options.pair / "target"
        )
        large = Engines(Path(copy), options.pair / "draft", "int8")
        if not kept.has(f"time: problem {options.timed}"):
            timed(large, all_ways, problems[0], 0)  # warms up
        times = [
            kept.cell(f"time: problem {turn + 1}", partial(timed, large, all_ways, problem, turn))
            for turn, problem in enumerate(problems[: options.timed])
        ]
    lossless = [way.name for way in all_ways if way.kind == "lossless"]
    fastest = min(lossless, key=lambda name: sum(each[name] for each in times)) if times else lossless[0]
    rows = [row_of(way, cells, times, fastest, options.problems) for way in all_ways]
    result = {"settings": settings, "fastest_lossless": fastest, "bar": BAR, "rows": rows}
    kept.finish(result | {"cells": cells, "times": times}, partial(page, raw=options.output), draw)
    for row in rows:
        speed = f", {row['over_lossless']['ratio']:.2f} times lossless" if times else ""
        print(f"{row['name']}: {row['accuracy']:.1%} right, {row['passes']:.0f} passes{speed}")


if __name__ == "__main__":
    main()
