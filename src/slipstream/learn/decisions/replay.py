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
    num_anchors: int = 400
    """Records of all that came before, for learning; as many older ones at most for judging. 0 works without an
    anchor."""

    def __post_init__(self) -> None:
        check_types(self, "replay")
        check_at_least("replay", 1, every=self.every, window=self.window, judge_window=self.judge_window)
        check_at_least("replay", 0, num_anchors=self.num_anchors)


@dataclass(frozen=True)
class ReplayedRound:
    """What happened after some requests, and how the requests up to the next round went."""

    after: int
    """Requests before the candidate was made; 0 before the first one."""
    serving: int
    """The version that served from here on: 0 is the floor, others count the candidates."""
    promoted: bool
    why: str
    floor: dict[str, float]
    """Tokens a pass of the floor on the requests that followed, by task, and `all`."""
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
    floor: dict[str, float]
    served: dict[str, float]

    @property
    def gain(self) -> float:
        """Tokens a pass over the floor's, less 1, over the whole trace."""
        return self.served["all"] / self.floor["all"] - 1

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "gain": self.gain}


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
    floor = learner.scorer(None)
    scorer: Scorer = floor
    tensors: Tensors | None = None
    beginning: Tensors | None = None
    serving, learn_s = 0, 0.0
    rounds: list[ReplayedRound] = []
    old_all: list[RedraftedAnswer] = []
    new_all: list[RedraftedAnswer] = []
    for number, after in enumerate(range(0, len(records), options.every)):
        promoted, why, figures = False, "the floor serves", {}
        if after:
            window, older = records[max(0, after - options.window) : after], records[:after]
            num_recent = len(split(window, Purpose.TRAIN))
            recent, anchor = training_parts(older, num_recent, options.num_anchors, number)
            if recent:
                learned = learner.learn(recent, anchor, start=beginning)
                learn_s += learned.figures["elapsed_s"]
                candidate = learner.scorer(learned.tensors)
                judged = records[max(0, after - options.judge_window) : after]
                num_latest = len(split(judged, Purpose.JUDGE))
                latest, held_out = judging_parts(
                    older, num_latest, options.num_anchors, number, least=judging.min_requests
                )
                verdict = judge(candidate, scorer, latest, held_out, judging)
                promoted, why = verdict.better, verdict.why
                figures = {"learner": learned.figures, "judge": verdict.figures}
                if promoted:
                    scorer, tensors, serving = candidate, learned.tensors, number
                    keep(learned)
                beginning = learned.tensors if promoted or verdict.undecided else tensors
            else:
                why = "no record to learn from"
        coming = records[after : after + options.every]
        old = [replayed(hits, judging.depth) for hits in floor.hits(coming)]
        new = old if scorer is floor else [replayed(hits, judging.depth) for hits in scorer.hits(coming)]
        one = ReplayedRound(
            after, serving, promoted, why, by_task(coming, old), by_task(coming, new), figures
        )
        rounds.append(one)
        on_round(one)
        old_all += old
        new_all += new
    return ReplayReport(rounds, len(records), learn_s, by_task(records, old_all), by_task(records, new_all))


def by_task(records: Seq[ServedRecord], answers: Seq[RedraftedAnswer]) -> dict[str, float]:
    """Tokens a pass by task, and of all requests."""
    sums: dict[str, list[int]] = {"all": [0, 0]}
    for record, one in zip(records, answers, strict=True):
        for name in ("all", record.task or "traffic"):
            total = sums.setdefault(name, [0, 0])
            total[0] += one.num_tokens
            total[1] += one.num_steps
    return {name: tokens / steps for name, (tokens, steps) in sums.items() if steps}
