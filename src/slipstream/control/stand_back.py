"""Standing back: where drafts measurably lose at some load, nothing is drafted there until they measurably gain,
whatever they are estimated to gain."""

from __future__ import annotations

import logging
import math
from collections import deque
from dataclasses import dataclass, field

from slipstream.control.realised import Pair, mean, ratio_of

logger = logging.getLogger(__name__)

RECENT_PAIRS = 24
"""Pairs of one load by which it is decided whether to stand back."""


@dataclass(slots=True)
class _Load:
    """What is known of batches of about one size, since it was last decided there."""

    pairs: deque[Pair] = field(default_factory=lambda: deque(maxlen=RECENT_PAIRS))
    active: bool = False
    needed_gain: float = math.inf
    """While active: an estimate that makes up for what the last one promised too much."""
    lost: float = 0.0
    """While active: what a step with drafts costs beyond what it yields, in steps without."""


class StandBack:
    """Says at which loads nothing is drafted. It decides on an interval only, and then begins with no pairs: either way
    takes new evidence, which prevents oscillation."""

    def __init__(self) -> None:
        self._loads: dict[int, _Load] = {}

    def is_active(self, num_requests: int) -> bool:
        """True where nothing is drafted for as many."""
        load = self._loads.get(_level(num_requests))
        return load is not None and load.active

    def lost(self, num_requests: int) -> float:
        """While active, what a step with drafts costs beyond its yield, in steps without; never below 0. 0 where
        nothing is known."""
        load = self._loads.get(_level(num_requests))
        return 0.0 if load is None else load.lost

    def gain(self, num_requests: int) -> float | None:
        """What drafts made there recently; None before there are pairs. A single pair is no conclusion."""
        load = self._loads.get(_level(num_requests))
        if load is None or not load.pairs:
            return None
        return sum(p.on_tokens for p in load.pairs) / sum(p.on_s / p.off_s for p in load.pairs)

    def learn(self, num_requests: int, pair: Pair, estimated: float) -> bool:
        """One pair, and what drafts were estimated to gain then; True where it changes what is done."""
        load = self._loads.setdefault(_level(num_requests), _Load())
        load.pairs.append(pair)
        found = ratio_of(list(load.pairs))
        if load.active:
            load.lost = _lost(load)
        if found is None or (found.low <= 1 if load.active else found.high >= 1):
            return False
        load.active = not load.active
        load.needed_gain = max(estimated, 1.0) / found.ratio
        load.lost = _lost(load)
        load.pairs.clear()
        logger.info(
            "auto %s: with about %d requests drafts make %.2f (%.2f to %.2f) of the speed without them, estimated %.2f",
            "suspends drafts" if load.active else "resumes drafts",
            num_requests,
            found.ratio,
            found.low,
            found.high,
            estimated,
        )
        return True

    def trusts(self, num_requests: int, estimated: float) -> bool:
        """End it where drafts are now estimated to gain more than the last estimate was wrong by: the traffic is
        another. True where it ended."""
        load = self._loads[_level(num_requests)]
        if estimated <= load.needed_gain:
            return False
        load.active = False
        load.pairs.clear()
        logger.info(
            "auto resumes drafts: with about %d requests drafts are estimated to make %.2f of the speed without them, "
            "more than the %.2f that makes up for the estimate before",
            num_requests,
            estimated,
            load.needed_gain,
        )
        return True


def _lost(load: _Load) -> float:
    return max(0.0, mean([pair.on_s / pair.off_s - pair.on_tokens for pair in load.pairs]))


def _level(num_requests: int) -> int:
    """Batches of one level differ by less than a factor of two, as 6 and 11 do."""
    return round(math.log2(max(num_requests, 1)))
