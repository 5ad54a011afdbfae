"""What becomes of a candidate that held-out answers found better: tried on a share, given to everyone, rolled back.

A state machine of one scope, without clock, files or tensors. It gets which candidates the learner has made and what
finished requests gained, and says what to do. Versions are compared on live traffic by requests that hash at random to
one or the other at the same time, so that a change of topic moves both: their differences are bet on
(`stats.betting.Stakes`). Such a test may be looked at after every request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from slipstream.errors import LearnError
from slipstream.stats.betting import Stakes

BASE = ""
"""The id of what is never replaced."""
_STAKES = (0.1, 0.25, 0.5, 0.9)
_FIRST = 10
"""Requests whose mean is the first level that a fall is measured from."""
_MEMORY = 200
"""Requests over which the level is averaged."""
_TOLERANCE = 0.05
"""A fall by less raises no doubt."""
MAX_PROMISE = 2.0
"""A larger promised gain is taken for this one: the bets need a bound."""


class Act(StrEnum):
    """What the loop decides."""

    TRY = "try"
    PROMOTE = "promote"
    REFUSE = "refuse"
    ROLL_BACK = "roll_back"


@dataclass(frozen=True, slots=True)
class Decision:
    """One step of a version's life, and why."""

    act: Act
    version: str
    """What it is about: the candidate, or the version that is rolled back."""
    reason: str
    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """How many requests are compared, and how sure a comparison must be."""

    canary_share: float = 0.2
    """Share of the requests for a candidate that the offline evaluation found better."""
    control_share: float = 0.05
    """Share of the requests that the base drafter drafts for while a version serves, for comparison."""
    doubt_share: float = 0.5
    """The same while there is doubt about the version."""
    doubt: float = 20.0
    """Evidence that the serving version's own figures fell from which there is doubt. A fall of the topic's does the
    same, so doubt decides nothing: controls come often for a while, and the comparison with them soon ends."""
    doubt_requests: int = 200
    """How long a doubt lasts; each version begins with one."""
    slack: float = 0.02
    """By how much, in tokens a pass over the most possible, a candidate may be worse and still go on."""
    kept_share: float = 0.25
    """The part of the promised gain over the base drafter that live traffic must show."""
    canary_error: float = 0.05
    """Probability with which a candidate that is worse than allowed goes on to everyone."""
    rollback_error: float = 1e-3
    """Long-run rate, a compared pair, at which a version that keeps its promise is rolled back."""
    max_canary_pairs: int = 400
    """A candidate that was not shown to be as good within so many comparisons is refused."""

    def __post_init__(self) -> None:
        for name in ("canary_share", "control_share", "doubt_share", "canary_error", "rollback_error"):
            value = getattr(self, name)
            if not 0 < value < 1:
                raise LearnError(f"{name} must be above 0 and below 1, got {value!r}")
        if self.canary_share + self.doubt_share >= 1:
            raise LearnError("canary_share and doubt_share together must be below 1")
        for name in ("slack", "kept_share"):
            if not 0 <= getattr(self, name) < 1:
                raise LearnError(f"{name} must be at least 0 and below 1, got {getattr(self, name)!r}")
        for name in ("max_canary_pairs", "doubt_requests"):
            if getattr(self, name) < 1:
                raise LearnError(f"{name} must be at least 1, got {getattr(self, name)}")


class PairedBets(Stakes):
    """A bet that one group's requests have the larger figure, on pairs of requests that came at about the same time.

    The requests of either group since the last pair are averaged: a pair is complete as soon as both groups have one.
    The evidence is for the first group, with its slack.
    """

    def __init__(self, *, restarts: bool, slack: float = 0.0, scale: float = 1.0) -> None:
        """`restarts` as in `Stakes`. `slack` is what the first group is given on top; `scale` multiplies the second
        group's figures."""
        super().__init__(_STAKES, restarts=restarts)
        self._slack, self._scale = slack, scale
        self._sums = [[0.0, 0], [0.0, 0]]
        self._bound = max(1.0, scale) + slack
        self.num_pairs = 0
        self.total = 0.0
        """Sum of the differences, first group less second."""

    def add(self, group: int, figure: float) -> None:
        """Count a request of group 0 or 1 with a figure from 0 to 1."""
        sums = self._sums[group]
        sums[0] += figure
        sums[1] += 1
        if not all(num for _, num in self._sums):
            return
        first, second = (total / num for total, num in self._sums)
        self._sums = [[0.0, 0], [0.0, 0]]
        self.num_pairs += 1
        self.total += first - second
        self.bet(max((first + self._slack - second * self._scale) / self._bound, -1.0))

    @property
    def mean_difference(self) -> float:
        """Return the mean difference of the groups' figures, by pairs; 0 without one."""
        return self.total / self.num_pairs if self.num_pairs else 0.0


class _Fall:
    """Notices within few requests that a figure is below what it was; see `LoopSettings.doubt`."""

    def __init__(self, threshold: float, num_requests: int) -> None:
        self._threshold, self._num_requests = threshold, num_requests
        self._level, self._num = 0.0, 0
        self._bets = Stakes(_STAKES[-1:], restarts=True)
        self.num_left = 0
        """Requests for which the doubt goes on."""

    def add(self, figure: float) -> None:
        """Count a request of the watched version."""
        self._num += 1
        if self.num_left:
            self.num_left -= 1
            if not self.num_left:
                self._num, self._bets = 1, Stakes(_STAKES[-1:], restarts=True)
        elif self._num > _FIRST:
            self._bets.bet(max(self._level - _TOLERANCE - figure, -1.0))
            if self._bets.evidence >= self._threshold:
                self.num_left = self._num_requests
        self._level += (figure - self._level) / min(self._num, _MEMORY)


class VersionLoop:
    """The life of the versions of one scope. Not thread-safe; its owner writes its decisions down."""

    def __init__(
        self,
        settings: LoopSettings | None = None,
        *,
        serving: str = BASE,
        previous: tuple[str, ...] = (),
        promise: float = 1.0,
    ) -> None:
        """`serving` and `previous` go on with what an earlier process left; `promise` is the serving version's."""
        self.settings = settings or LoopSettings()
        self.serving = serving
        self.previous = previous
        self.candidate: str | None = None
        self.frozen = False
        self._promises = {serving: promise}
        self._canary: PairedBets | None = None
        self._watch: PairedBets | None = None
        self._fall = _Fall(self.settings.doubt, self.settings.doubt_requests)
        self._begin_watch()

    # --- who drafts -------------------------------------------------------------------------------------------

    @property
    def in_doubt(self) -> bool:
        """Whether the serving version looks worse than it should, without a decision yet."""
        return self._watch is not None and self._fall.num_left > 0

    @property
    def control_share(self) -> float:
        """The share of requests that the base drafter drafts for comparison; 0 where it drafts for all."""
        if self._watch is None or self.frozen:
            return 0.0
        return self.settings.doubt_share if self.in_doubt else self.settings.control_share

    @property
    def canary_share(self) -> float:
        """The share of requests that the candidate drafts for."""
        return self.settings.canary_share if self.candidate is not None and not self.frozen else 0.0

    def version_for(self, share: float) -> str:
        """Who drafts for a request whose hash is `share`, from 0 to below 1: the base drafter, the candidate or who
        serves."""
        if share < self.control_share:
            return BASE
        if self.candidate is not None and share >= 1 - self.canary_share:
            return self.candidate
        return self.serving

    # --- what is reported -------------------------------------------------------------------------------------

    def offer(self, version: str, promise: float, reason: str = "") -> Decision:
        """Try a candidate that held-out answers found better; `promise` is its predicted speed over the base drafter's.

        Raises `LearnError` while there is another one, or while the scope is frozen.
        """
        if self.frozen:
            raise LearnError(f"version {version} is not tried: learning is frozen")
        if self.candidate is not None:
            raise LearnError(f"version {version} is not tried: {self.candidate} still is")
        if version in (BASE, self.serving):
            raise LearnError(f"version {version or 'base'} serves already")
        self.candidate, self._promises[version] = version, promise
        self._canary = PairedBets(restarts=False, slack=self.settings.slack)
        return Decision(Act.TRY, version, reason or "held-out answers show that it is faster")

    def served(self, version: str, figure: float) -> Decision | None:
        """A request ended well that `version` drafted for; `figure` is its tokens a pass over the most possible."""
        if self.frozen:
            return None
        figure = min(max(figure, 0.0), 1.0)
        if self._canary is not None and version in (self.candidate, self.serving):
            self._canary.add(0 if version == self.candidate else 1, figure)
            if (decision := self._after_canary()) is not None:
                return decision
        if self._watch is not None and version in (BASE, self.serving):
            self._watch.add(0 if version == BASE else 1, figure)
            if version != BASE:
                self._fall.add(figure)
            if self._watch.evidence >= 1 / self.settings.rollback_error:
                return self._roll_back()
        return None

    # --- by hand ----------------------------------------------------------------------------------------------

    def promote(self, version: str, promise: float = 1.0) -> None:
        """Somebody chose `version` for everyone."""
        if version != self.serving:
            self._serve(version, (*self.previous, self.serving), promise)
        self._drop_candidate()

    def roll_back(self) -> str:
        """Somebody wants what served before; returns that."""
        self._serve(self.previous[-1] if self.previous else BASE, self.previous[:-1])
        self._drop_candidate()
        return self.serving

    def retire(self, versions: set[str]) -> None:
        """These must serve no request any more: forgotten, or damaged on disk."""
        self.previous = tuple(one for one in self.previous if one not in versions)
        if self.candidate in versions:
            self._drop_candidate()
        if self.serving in versions:
            self._serve(self.previous[-1] if self.previous else BASE, self.previous[:-1])

    # --- decisions --------------------------------------------------------------------------------------------

    def _after_canary(self) -> Decision | None:
        bets, settings = self._canary, self.settings
        assert bets is not None
        assert self.candidate is not None
        if bets.evidence >= 1 / settings.canary_error:
            version, status = self.candidate, _info(bets)
            promise = self._promises.get(version, 1.0)
            self._serve(version, (*self.previous, self.serving), promise)
            return Decision(Act.PROMOTE, version, "as fast as promised on a share of the requests", status)
        if bets.num_pairs >= settings.max_canary_pairs:
            return self._refuse("not shown to be as fast on a share of the requests", _info(bets))
        return None

    def _refuse(self, reason: str, status: Mapping[str, float] | None = None) -> Decision:
        version = self.candidate
        assert version is not None
        self._drop_candidate()
        return Decision(Act.REFUSE, version, reason, status or {})

    def _roll_back(self) -> Decision:
        bets, version = self._watch, self.serving
        assert bets is not None
        self._drop_candidate()  # it was compared with what is rolled back
        self._serve(self.previous[-1] if self.previous else BASE, self.previous[:-1])
        return Decision(Act.ROLL_BACK, version, "slower than promised on live requests", _info(bets))

    def _serve(self, version: str, previous: tuple[str, ...], promise: float | None = None) -> None:
        self.serving, self.previous = version, previous
        if version == self.candidate:
            self._drop_candidate()
        if promise is not None:
            self._promises[version] = promise
        self._begin_watch()

    def _begin_watch(self) -> None:
        self._watch = None
        self._fall = _Fall(self.settings.doubt, self.settings.doubt_requests)
        known = {self.serving, *self.previous}
        self._promises = {
            one: promise for one, promise in self._promises.items() if one in known or one == self.candidate
        }
        if self.serving != BASE:
            promise = min(max(self._promises.get(self.serving, 1.0), 1.0), MAX_PROMISE)
            kept = 1 + self.settings.kept_share * (promise - 1)
            # The base drafter, made as much faster as the version has to be, against the version.
            self._watch = PairedBets(restarts=True, scale=1 / kept)
            self._fall.num_left = (
                self.settings.doubt_requests
            )  # nothing is known of it on everyone's requests

    def _drop_candidate(self) -> None:
        if self.candidate is not None and self.candidate != self.serving:
            self._promises.pop(self.candidate, None)
        self.candidate = self._canary = None


def _info(bets: PairedBets) -> dict[str, float]:
    return {
        "pairs": bets.num_pairs,
        "mean_difference": round(bets.mean_difference, 4),
        "evidence": round(bets.evidence, 1),
    }
