"""The whole loop offline on a trace: learn, judge, promote, round by round, and what it would have gained.

A trace is the served answers in their order. Under the coupled verifier the answers are the same with any draft, so
how each version would have drafted on each of them is known: nothing is estimated but the time of a step.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, field
from typing import Any

from slipstream.config import check_at_least, check_types
from slipstream.errors import LearnError
from slipstream.learn.decisions.judge import JudgeOptions, judge
from slipstream.learn.learners.base import LearnedWeights, Learner, Tensors
from slipstream.learn.learners.scoring import RedraftedAnswer, Scorer, replayed
from slipstream.learn.records.selection import judging_parts, split, training_parts
from slipstream.learn.records.served import Purpose, ServedRecord


@dataclass(frozen=True)
class ReplayOptions:
    """When a candidate is made, and from what."""

    every: int = 100
    """Requests between two candidates."""
    window: int = 400
    """The latest requests, from which a candidate learns."""
    judge_window: int = 2000
    """The latest requests, on whose held-out fifth it is judged: nothing ever learned from them, however old."""
    num_older: int = 400
    """Records of all that came before, for learning; as many older ones at most for judging. 0 works without
    older answers."""

    def __post_init__(self) -> None:
        check_types(self, "replay")
        check_at_least("replay", 1, every=self.every, window=self.window, judge_window=self.judge_window)
        check_at_least("replay", 0, num_older=self.num_older)


@dataclass(frozen=True)
class ReplayedRound:
    """What happened after some requests, and how the requests up to the next round went."""

    after: int
    """Requests before the candidate was made; 0 before the first one."""
    serving: int
    """The version that served from here on: 0 is the base drafter, others count the candidates."""
    promoted: bool
    why: str
    base: dict[str, float]
    """Tokens a pass of the base drafter on the requests that followed, by task, and `all`."""
    served: dict[str, float]
    """The same of the version that served them."""
    figures: dict[str, Any] = field(default_factory=dict)
    """The learner's and the judge's."""


@dataclass(frozen=True)
class ReplayReport:
    """A replay as a whole."""

    rounds: list[ReplayedRound]
    num_requests: int
    learn_s: float
    base: dict[str, float]
    served: dict[str, float]

    @property
    def gain(self) -> float:
        """Tokens a pass over the base drafter's, less 1, over the whole trace."""
        return self.served["all"] / self.base["all"] - 1

    def as_json(self) -> dict[str, Any]:
        rounds = [{**asdict(one), "floor": one.base} for one in self.rounds]
        return {**asdict(self), "rounds": rounds, "floor": self.base, "gain": self.gain}


def replay(
    records: Seq[ServedRecord],
    learner: Learner,
    options: ReplayOptions | None = None,
    judging: JudgeOptions | None = None,
    *,
    on_round: Callable[[ReplayedRound], None] = lambda one: None,
    keep: Callable[[LearnedWeights], None] = lambda learned: None,
) -> ReplayReport:
    """Serve `records` in order, as if the draft had learned meanwhile.

    `keep` gets each promoted candidate. Raises `LearnError` for a trace without rows of the target.
    """
    options = ReplayOptions() if options is None else options
    judging = JudgeOptions() if judging is None else judging
    if not records:
        raise LearnError("the trace holds no answer")
    base = learner.scorer(None)
    served = _ReplayedVersion(learner, base)
    rounds: list[ReplayedRound] = []
    old_all: list[RedraftedAnswer] = []
    new_all: list[RedraftedAnswer] = []
    for number, after in enumerate(range(0, len(records), options.every)):
        candidate: LearnedWeights | None = None
        why, figures = "the base drafter serves", dict[str, Any]()
        if after:
            candidate, why, figures = served.learn(records[:after], number, options, judging)
        if candidate is not None:
            keep(candidate)
        coming = records[after : after + options.every]
        old = [replayed(hits, judging.depth) for hits in base.hits(coming)]
        new = old
        if served.number:
            new = [replayed(hits, judging.depth) for hits in served.scorer.hits(coming)]
        bases, own = by_task(coming, old), by_task(coming, new)
        one = ReplayedRound(after, served.number, candidate is not None, why, bases, own, figures)
        rounds.append(one)
        on_round(one)
        old_all += old
        new_all += new
    return ReplayReport(
        rounds, len(records), served.learn_s, by_task(records, old_all), by_task(records, new_all)
    )


class _ReplayedVersion:
    """The version that serves in a replay: the base drafter at first."""

    def __init__(self, learner: Learner, base: Scorer) -> None:
        self._learner = learner
        self.scorer = base
        self.number = 0
        """The round in which it was promoted; 0 for the base drafter."""
        self.learn_s = 0.0
        self._tensors: Tensors | None = None
        self._beginning: Tensors | None = None
        """What the next candidate begins with: the last one where nothing spoke against it."""

    def learn(
        self, records: Seq[ServedRecord], number: int, options: ReplayOptions, judging: JudgeOptions
    ) -> tuple[LearnedWeights | None, str, dict[str, Any]]:
        """Make a candidate from `records` and promote it where it is faster: it, why, and the figures."""
        num_recent = len(split(records[-options.window :], Purpose.TRAIN))
        recent, older = training_parts(records, num_recent, options.num_older, number)
        if not recent:
            return None, "no record to learn from", {}
        learned = self._learner.learn(recent, older, start=self._beginning)
        self.learn_s += learned.figures["elapsed_s"]
        candidate = self._learner.scorer(learned.tensors)
        num_latest = len(split(records[-options.judge_window :], Purpose.JUDGE))
        latest, held_out = judging_parts(
            records, num_latest, options.num_older, number, least=judging.min_requests
        )
        verdict = judge(candidate, self.scorer, latest, held_out, judging)
        if verdict.better:
            self.scorer, self._tensors, self.number = candidate, learned.tensors, number
        self._beginning = learned.tensors if verdict.better or verdict.undecided else self._tensors
        figures = {"learner": learned.figures, "judge": verdict.figures}
        return learned if verdict.better else None, verdict.why, figures


def by_task(records: Seq[ServedRecord], answers: Seq[RedraftedAnswer]) -> dict[str, float]:
    """Tokens a pass by task, and of all requests."""
    sums: dict[str, list[int]] = {"all": [0, 0]}
    for record, one in zip(records, answers, strict=True):
        for name in ("all", record.task or "traffic"):
            total = sums.setdefault(name, [0, 0])
            total[0] += one.num_tokens
            total[1] += one.num_steps
    return {name: tokens / steps for name, (tokens, steps) in sums.items() if steps}
