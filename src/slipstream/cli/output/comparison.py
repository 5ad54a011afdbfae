"""Times the same prompts with and without speculation, in pairs, on one engine.

A pair is one prompt answered both ways, one after the other, from empty caches. The order alternates from pair to pair,
so that a machine that becomes slower or faster favours neither side. The ratio of a pair is a ratio of wall-clock times
for equal work; the median over the pairs is reported with its quartiles, because they are robust against outliers.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from rich.console import Console

from slipstream.cli.output.console import print_rows
from slipstream.sampling.params import SamplingParams

if TYPE_CHECKING:
    from slipstream.core.proposal import VerifierTraits
    from slipstream.engine.llm import LLM
    from slipstream.engine.outputs import RequestOutput
    from slipstream.engine.requests import UpdateCallback
    from slipstream.text.prompts import Prompt

CONFIDENCE = 0.95
MIN_PAIRS = 6
"""With fewer pairs all ratios lie on one side of the true median by chance with a probability above 5 %."""
WARM_UP_TOKENS = 8
"""Tokens of the warm-up answers: the first passes of a process set up threads and kernels."""


@dataclass(frozen=True, slots=True)
class TimedRun:
    """One timed answer."""

    output: RequestOutput
    wall_s: float

    @property
    def token_ids(self) -> list[list[int]]:
        return [answer.token_ids for answer in self.output.outputs]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.token_ids))

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.wall_s


@dataclass(frozen=True, slots=True)
class TimedPair:
    """One prompt, both ways."""

    prompt_index: int
    off: TimedRun
    on: TimedRun

    @property
    def ratio(self) -> float:
        """Speed with speculation over speed without."""
        return self.on.tokens_per_s / self.off.tokens_per_s

    @property
    def identical(self) -> bool:
        return self.on.token_ids == self.off.token_ids


@dataclass(slots=True)
class TimedComparison:
    """All pairs of a comparison, and statistics of them."""

    pairs: list[TimedPair] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """Median over the pairs."""
        return statistics.median(pair.ratio for pair in self.pairs)

    @property
    def quartiles(self) -> tuple[float, float]:
        """A quarter of the pairs lies below the first, a quarter above the second."""
        ratios = [pair.ratio for pair in self.pairs]
        if len(ratios) == 1:
            return ratios[0], ratios[0]
        low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
        return low, high

    @property
    def interval(self) -> tuple[float, float] | None:
        """A confidence interval of at least 95 % for the median, from the sign test, which needs six pairs.

        Of n pairs, the k-th smallest and the k-th largest ratio, k as large as Binomial(n, 1/2) allows.
        """
        from scipy.stats import binom

        ratios = sorted(pair.ratio for pair in self.pairs)
        outside = int(
            binom.ppf((1 - CONFIDENCE) / 2, len(ratios), 0.5)
        )  # the first k with P(X <= k) >= 2.5 %
        return None if outside == 0 else (ratios[outside - 1], ratios[-outside])

    @property
    def conclusion(self) -> str:
        """Which side is faster, as far as the interval decides."""
        interval = self.interval
        if interval is None:
            pairs = "1 pair is" if len(self.pairs) == 1 else f"{len(self.pairs)} pairs are"
            return f"none: {pairs} too few, raise --repeats to {MIN_PAIRS} or more"
        low, high = interval
        bounds = f"95 % interval of the median {low:.2f} to {high:.2f}"
        if low <= 1 <= high:
            return f"no measurable difference ({bounds})"
        return f"{'faster' if low > 1 else 'slower'} with speculation ({bounds})"

    @property
    def differing(self) -> list[int]:
        """Prompts with a pair of answers that differ in a token."""
        return sorted({pair.prompt_index for pair in self.pairs if not pair.identical})

    def speed(self, side: str) -> float:
        """Tokens a second of one side, `off` or `on`: the median of its runs."""
        runs: list[TimedRun] = [getattr(pair, side) for pair in self.pairs]
        return statistics.median(run.tokens_per_s for run in runs)

    def as_json(self) -> dict[str, Any]:
        ratios = [pair.ratio for pair in self.pairs]
        return {
            "ratio_median": self.ratio,
            "ratio_quartiles": list(self.quartiles),
            "ratio_interval": self.interval,
            "conclusion": self.conclusion,
            "ratio_min": min(ratios),
            "ratio_max": max(ratios),
            "tokens_per_s_off": self.speed("off"),
            "tokens_per_s_on": self.speed("on"),
            "identical": not self.differing,
            "differing_prompts": self.differing,
            "pairs": [
                {
                    "prompt_index": pair.prompt_index,
                    "ratio": pair.ratio,
                    "identical": pair.identical,
                    "off_s": pair.off.wall_s,
                    "on_s": pair.on.wall_s,
                }
                for pair in self.pairs
            ],
        }

    def print(self, console: Console, speculation: str, verifier: VerifierTraits) -> None:
        """Print the two speeds, their ratio, and whether the texts are identical."""
        num_pairs, (low, high) = len(self.pairs), self.quartiles
        spread, median = "one pair", ""
        if num_pairs > 1:
            spread = f"median of {num_pairs} pairs, quartiles {low:.2f} and {high:.2f}"
            median = f", median of {num_pairs} runs"
        rows = [
            ("without speculation", f"{self.speed('off'):.1f} tokens/s{median}"),
            ("with speculation", f"{self.speed('on'):.1f} tokens/s{median} ({speculation})"),
            ("ratio", f"{self.ratio:.2f} ({spread})"),
            ("conclusion", self.conclusion),
            ("texts identical", self._verdict(verifier)),
        ]
        print_rows(console, rows)

    def _verdict(self, verifier: VerifierTraits) -> str:
        if not self.differing:
            return "yes"
        num_prompts = len({pair.prompt_index for pair in self.pairs})
        answer = f"no: {len(self.differing)} of {num_prompts} prompts differ"
        if not verifier.reproducible:
            return f"{answer} (verifier {verifier.name} preserves the distribution of texts, not each text)"
        pair = next(pair for pair in self.pairs if not pair.identical)
        return f"{answer}; prompt {pair.prompt_index} first at token {_first_difference(pair)}"


def time_pairs(
    llm: LLM,
    prompts: Seq[Prompt],
    params: Seq[SamplingParams],
    tasks: Seq[str],
    repeats: int,
    on_update: UpdateCallback,
    on_pair: Callable[[int], None],
) -> TimedComparison:
    """Time every prompt `repeats` times each way. `params` must have seeds, so that sampled texts can be compared.

    `on_update` gets the updates of every run, `on_pair` the number of finished pairs.
    """
    brief = replace(params[0], max_tokens=WARM_UP_TOKENS, min_tokens=0)
    for bound in (0, None):
        llm.generate([prompts[0]], brief, max_draft_tokens=bound)
    comparison = TimedComparison()
    for repeat in range(repeats):
        for index, prompt in enumerate(prompts):
            runs: dict[int | None, TimedRun] = {}
            for bound in (0, None) if (repeat + index) % 2 == 0 else (None, 0):
                llm.reset_caches()
                started_s = time.perf_counter()
                [output] = llm.generate(
                    [prompt], params[index], task=tasks[index], max_draft_tokens=bound, on_update=on_update
                )
                runs[bound] = TimedRun(output, time.perf_counter() - started_s)
            comparison.pairs.append(TimedPair(index, off=runs[0], on=runs[None]))
            on_pair(len(comparison.pairs))
    return comparison


def _first_difference(pair: TimedPair) -> int:
    """Position, from 0, of the first differing token."""
    for off, on in zip(pair.off.token_ids, pair.on.token_ids, strict=True):
        if off != on:
            pairs = zip(off, on, strict=False)
            return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(off), len(on)))
    raise AssertionError("the texts are the same")
