"""Whether a candidate drafts better than what serves: on held-out answers, paired, at any time, and nowhere worse.

Three things are required of a candidate, all of them without a pass of the target:

- faster: over requests, one after another, predicted time with it is shorter, by a test that bets (anytime valid);
- nowhere worse: no task, and not the older answers, shows by the same kind of test that it loses more than `max_loss`;
- the figure of the older answers itself does not fall by more than `max_loss`: that is what must not be forgotten.

A request's value is (old time - new time) / (old time + new time): bounded, the same either way round, and half of
the relative gain where that is small.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from slipstream.config import check_at_least, check_types
from slipstream.errors import ConfigError, LearnError
from slipstream.learn.learners.scoring import RedraftedAnswer, Scorer, replayed
from slipstream.learn.records.served import Purpose, ServedRecord
from slipstream.stats.betting import PairedTest

OLDER = "older answers"
_MARGIN = 1e-3
"""For what rounding and an answer's last step may add to a bound."""


@dataclass(frozen=True)
class JudgeOptions:
    """How much evidence a promotion needs."""

    confidence: float = 0.95
    """A candidate that is not faster passes with at most one minus this as probability, however often one looks. What
    passes is tried on a share of the requests first, and watched."""
    max_loss: float = 0.01
    """The largest share of tokens a pass that a task may lose."""
    depth: int = 4
    """Draft tokens of the chains that are served."""
    min_requests: int = 20
    """Held-out requests that are looked at before any verdict."""

    def __post_init__(self) -> None:
        check_types(self, "judge")
        check_at_least("judge", 1, depth=self.depth, min_requests=self.min_requests)
        if not 0 < self.confidence < 1 or not 0 <= self.max_loss < 1:
            raise ConfigError("judge confidence must be between 0 and 1, max_loss from 0 to below 1")


@dataclass(frozen=True)
class VersionVerdict:
    """What the judge says of a candidate so far."""

    better: bool
    """True where it may be tried on live requests."""
    why: str
    """In one line."""
    undecided: bool = False
    """True where nothing speaks against it but that too little was seen: it may learn on, and be judged again."""
    figures: dict[str, Any] = field(default_factory=dict)
    """Plain values: predicted speed and tokens a pass of both, by task."""


@dataclass(slots=True)
class _PairedAnswers:
    """Sums over the requests of a task."""

    tokens: int = 0
    steps: list[int] = field(default_factory=lambda: [0, 0])
    """Steps of the incumbent and the candidate."""
    harm: PairedTest | None = None

    @property
    def loss(self) -> float:
        """The share of tokens a pass that the candidate loses; negative for a gain."""
        return 1 - self.steps[0] / self.steps[1] if self.steps[1] else 0.0


class VersionJudge:
    """Compares a candidate with an incumbent, request by request."""

    def __init__(
        self, options: JudgeOptions, candidate_cost: float = 0.0, incumbent_cost: float = 0.0
    ) -> None:
        """Costs are measured: what drafting takes a step, in passes of the target."""
        self.options = options
        self._costs = incumbent_cost, candidate_cost
        self._lowest = -_farthest(options.depth, incumbent_cost, candidate_cost)
        self._least_harm = -_farthest(options.depth, 0.0, 0.0)
        self._test = PairedTest(options.confidence, 0.0, self._lowest)
        self._all = _PairedAnswers()
        self._groups: dict[str, _PairedAnswers] = {}

    def add(self, group: str, candidate: RedraftedAnswer, incumbent: RedraftedAnswer) -> None:
        """A held-out answer, decoded again with both. Those of the old-data holdout are in the group `OLDER`."""
        if not candidate.num_steps or not incumbent.num_steps:
            return
        seconds = [one.seconds(cost) for one, cost in zip((incumbent, candidate), self._costs, strict=True)]
        value = (seconds[0] - seconds[1]) / (seconds[0] + seconds[1])
        one = self._groups.setdefault(group, _PairedAnswers())
        if one.harm is None:
            one.harm = PairedTest(self.options.confidence, self.options.max_loss / 2, self._least_harm)
        steps = [float(each.num_steps) for each in (incumbent, candidate)]  # tokens a pass, whatever it costs
        one.harm.add((steps[1] - steps[0]) / (steps[0] + steps[1]))
        counted = [one] if group == OLDER else [one, self._all]
        for sums in counted:
            sums.tokens += candidate.num_tokens
            sums.steps[0] += incumbent.num_steps
            sums.steps[1] += candidate.num_steps
        if group != OLDER:
            self._test.add(value)

    @property
    def num_requests(self) -> int:
        """Those of the traffic, without the old-data holdout."""
        return self._test.wealth.num_bets

    @property
    def gain(self) -> float:
        """Predicted speed of the candidate over the incumbent's, less 1."""
        steps = self._all.steps
        if not steps[1]:
            return 0.0
        return steps[0] * (1 + self._costs[0]) / (steps[1] * (1 + self._costs[1])) - 1

    def verdict(self) -> VersionVerdict:
        """What is known now; it may be called after every request."""
        options, figures = self.options, self._figures()
        harmed = [name for name, one in self._groups.items() if one.harm is not None and one.harm.rejects]
        older = self._groups.get(OLDER)
        undecided = False
        if self.num_requests < options.min_requests:
            undecided = True
            why = f"{self.num_requests} held-out requests so far, {options.min_requests} are needed"
        elif harmed:
            losses = ", ".join(f"{name} {self._groups[name].loss:.1%}" for name in sorted(harmed))
            why = f"it loses tokens a pass: {losses}"
        elif older is not None and older.loss > options.max_loss:
            why = f"it forgets: {older.loss:.1%} of older answers' tokens a pass, {options.max_loss:.1%} are allowed"
        elif self.gain <= 0:
            why = f"predicted speed {self.gain:+.1%}"
        elif not self._test.rejects:
            undecided = True
            why = f"predicted speed {self.gain:+.1%}, not yet certain: p {self._test.wealth.p_value:.3g}"
        else:
            return VersionVerdict(True, f"predicted speed {self.gain:+.1%}", figures=figures)
        return VersionVerdict(False, why, undecided, figures)

    def _figures(self) -> dict[str, Any]:
        groups = {**self._groups, "all": self._all}
        return {
            "num_requests": self.num_requests,
            "gain": self.gain,
            "p_value": self._test.wealth.p_value,
            "costs": list(self._costs),
            "tokens_a_pass": {
                name: [one.tokens / steps if steps else 0.0 for steps in one.steps]
                for name, one in groups.items()
            },
        }


def _farthest(depth: int, old_cost: float, new_cost: float) -> float:
    """How much slower one draft can be than another, as a request's value: every step makes from 1 to depth + 1 tokens.

    A test that knows this bound may stake more.
    """
    most = (depth + 1) * (1 + new_cost) / (1 + old_cost)
    return max(1e-3, (most - 1) / (most + 1)) + _MARGIN


def judge(
    candidate: Scorer,
    incumbent: Scorer,
    records: Seq[ServedRecord],
    older: Seq[ServedRecord] = (),
    options: JudgeOptions | None = None,
    *,
    candidate_cost: float = 0.0,
    incumbent_cost: float = 0.0,
) -> VersionVerdict:
    """Judge a candidate on held-out records of the traffic and of the old-data holdout; both must have the purpose
    judge.

    Raises `LearnError` for a record that learners may have seen.
    """
    options = JudgeOptions() if options is None else options
    if any(one.purpose is not Purpose.JUDGE for one in (*records, *older)):
        raise LearnError("a candidate is judged on held-out records only")
    made = VersionJudge(options, candidate_cost, incumbent_cost)
    for part, is_older in ((records, False), (older, True)):
        hits = candidate.hits(part), incumbent.hits(part)
        for record, new, old in zip(part, *hits, strict=True):
            group = OLDER if is_older else record.task or "traffic"
            made.add(group, replayed(new, options.depth), replayed(old, options.depth))
    return made.verdict()
