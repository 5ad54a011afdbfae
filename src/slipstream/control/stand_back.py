"""Where drafts measurably lose, whatever they are estimated to gain, nothing is drafted until they measurably gain.

The estimate is a model of costs and acceptance; paired probes measure. What they say of late decides, load by load,
because what drafts cost depends on the batch. While nothing is drafted, a few steps with drafts are paired now and then
with the steps before them, out of the same share of the time that probes have otherwise.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from dataclasses import dataclass, field

from slipstream.control.realised import Pair, ratio_of

logger = logging.getLogger(__name__)

RECENT = 24
"""Pairs of one load that decide."""


@dataclass(slots=True)
class _Load:
    """What is known of batches of about one size, since the last change of mind."""

    pairs: deque[Pair] = field(default_factory=lambda: deque(maxlen=RECENT))
    active: bool = False
    needed_gain: float = math.inf
    """While active: an estimate that makes up for what the last one promised too much."""
    lost: float = 0.0
    """While active: what a step with drafts costs beyond what it yields, in steps without."""


class StandBack:
    """Says at which loads nothing is drafted. It changes its mind on an interval only, and then begins with no pairs:
    either way takes new evidence, so that it does not flap."""

    def __init__(self) -> None:
        self._loads: dict[int, _Load] = {}

    def is_active(self, num_requests: int) -> bool:
        """True where nothing is drafted for as many."""
        load = self._loads.get(_level(num_requests))
        return load is not None and load.active

    def lost(self, num_requests: int) -> float:
        """While active, what a step with drafts costs beyond its yield, in steps without; never below 0."""
        return self._loads[_level(num_requests)].lost

    def gain(self, num_requests: int) -> float | None:
        """What drafts made of late there; None before there are pairs. A single pair is no conclusion."""
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
            "stands back" if load.active else "drafts again",
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
            "auto drafts again: with about %d requests drafts are estimated to make %.2f of the speed without them, "
            "more than the %.2f that makes up for the estimate before",
            num_requests,
            estimated,
            load.needed_gain,
        )
        return True


def _lost(load: _Load) -> float:
    number = len(load.pairs)
    return max(0.0, sum(pair.on_s / pair.off_s - pair.on_tokens for pair in load.pairs) / number)


def _level(num_requests: int) -> int:
    """Batches of one level differ by less than a factor of two, as 6 and 11 do."""
    return round(math.log2(max(num_requests, 1)))
