"""What drafting takes of a step's time, by version: acceptance alone does not say what is faster."""

from __future__ import annotations

from slipstream.draft.combine.versions import BASE, VersionsDrafter

MIN_CALLS = 8
"""Calls of two versions for as many requests, before their times are compared."""
MAX_RATIO = 16.0
_MEMORY = 500
"""Requests over which the share of drafting is averaged."""


class DraftCosts:
    """Used from one thread but for `VersionsDrafter.propose`, which times its versions in the engine's."""

    def __init__(self, drafter: VersionsDrafter) -> None:
        self._drafter = drafter
        self._draft_s = self._verify_s = 0.0
        self._known: dict[str, float] = {}
        """Learner to the last ratio of one of its versions' times to the base drafter's."""

    def add(self, draft_s: float, verify_s: float) -> None:
        """Count a request that ended: what its steps spent on drafting and on the target."""
        keep = 1 - 1 / _MEMORY
        self._draft_s = keep * self._draft_s + draft_s
        self._verify_s = keep * self._verify_s + verify_s

    @property
    def base(self) -> float:
        """What drafting costs a step, in passes of the target; 0 while nothing is known."""
        return self._draft_s / self._verify_s if self._verify_s > 0 else 0.0

    def of(self, version: str, learner: str) -> float:
        """The same of a version that `learner` made; as the last one of that learner, or the base drafter, while it is
        not known."""
        ratio = None if version == BASE else self._ratio(version)
        if ratio is not None:
            self._known[learner] = ratio
        return self.base * (1.0 if version == BASE else self._known.get(learner, 1.0))

    def _ratio(self, version: str) -> float | None:
        """A version's time for a call over the base drafter's, where both drafted for as many requests at once."""
        own, base = self._drafter.times_of(version), self._drafter.times_of(BASE)
        mine = other = 0.0
        for number in own.keys() & base.keys():
            num_calls = min(own[number][0], base[number][0])
            if num_calls >= MIN_CALLS:
                mine += num_calls * own[number][1]
                other += num_calls * base[number][1]
        return min(max(mine / other, 1 / MAX_RATIO), MAX_RATIO) if other > 0 else None
