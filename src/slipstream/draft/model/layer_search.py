"""Finds the layers to draft with, on live traffic.

After Xia, Li, Zhang, Du and Li, "SWIFT: on-the-fly self-speculative decoding for LLM inference acceleration" (2024,
arXiv 2410.06916): sets of skipped layers are tried one after the other on real drafts and the best is kept. The score
of a set is its committed tokens divided by their cost, not its acceptance alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable

Layers = tuple[int, ...]
"""Layers that run, ascending."""

MAX_MUTATIONS = 50
"""Random neighbours drawn at most in search of an untried one."""


class LayerSearch:
    """Hill climbing over sets of layers, with `drafts_per_trial` drafts for each set.

    The search begins with evenly spread sets that skip more and more layers, up to a share of `skip_ratio`: it has to
    start from a set with some acceptance, because sets without any differ in cost only. It then moves from the best set
    to its neighbours and ends after `patience` trials in a row without gain. The first and the last layer always run.
    `cost(layers)` is the cost of a draft pass as a share of a target pass. The search is deterministic: the same drafts
    with the same verdicts give the same sets.
    """

    def __init__(
        self,
        num_layers: int,
        cost: Callable[[Layers], float],
        skip_ratio: float,
        drafts_per_trial: int,
        patience: int,
    ) -> None:
        self._num_layers = num_layers
        self._cost = cost
        self._drafts_per_trial = drafts_per_trial
        self._patience = patience
        self._rng = random.Random(0)
        everything = evenly_spread(num_layers, 0)
        most = min(round(skip_ratio * num_layers), max(num_layers - 2, 0))
        steps = [2**power for power in range(most.bit_length())]
        # All layers are a candidate where a draft pass over them is cheaper than a target pass (quantised copies).
        nothing_left_out = [0] if cost(everything) < 1 or not steps else []
        self._ladder = [evenly_spread(num_layers, number) for number in [*nothing_left_out, *steps]]
        self.layers = self._ladder.pop(0)
        """The layers to draft with now."""
        self.best = self.layers
        self.best_score = 0.0
        """Committed tokens for the cost of one target pass, in the best set's trial."""
        self.num_trials = 0
        self.done = False
        """True once the search has ended; `layers` is then final."""
        self._tried = {self.layers, *self._ladder}
        self._idle_trials = 0
        self._begin_trial()

    @property
    def pays(self) -> bool:
        """False when even the best set costs more than it saves."""
        return not self.done or self.best_score > 1

    def record(self, layers: Layers, num_passes: int, num_accepted: int) -> None:
        """Count the verdict of a draft made with `layers` in `num_passes` passes, of which `num_accepted` tokens were
        accepted."""
        if self.done or layers != self.layers:
            return  # a late verdict of an earlier set
        self._num_drafts += 1
        self._tokens += 1 + num_accepted
        self._price += 1 + num_passes * self._cost(layers)
        if self._num_drafts == self._drafts_per_trial:
            self._end_trial()

    def _begin_trial(self) -> None:
        self._num_drafts = 0
        self._tokens = 0
        self._price = 0.0

    def _end_trial(self) -> None:
        self.num_trials += 1
        score = self._tokens / self._price
        if score > self.best_score:
            self.best, self.best_score = self.layers, score
            self._idle_trials = 0
        else:
            self._idle_trials += 1
        following: Layers | None = None
        if self._ladder:
            following = self._ladder.pop(0)
        elif self._idle_trials < self._patience:
            following = self._untried_neighbour()
        self.done = following is None
        self.layers = following or self.best
        self._begin_trial()

    def _untried_neighbour(self) -> Layers | None:
        """The best set with one layer added, removed or exchanged; None where no untried one was found."""
        for _ in range(MAX_MUTATIONS):
            run = set(self.best)
            inner = range(1, self._num_layers - 1)
            runs = [layer for layer in inner if layer in run]
            skipped = [layer for layer in inner if layer not in run]
            change = self._rng.choice(("more", "less", "other"))
            if change != "less" and skipped:
                run.add(self._rng.choice(skipped))
            if change != "more" and runs:
                run.remove(self._rng.choice(runs))
            layers = tuple(sorted(run))
            if layers not in self._tried:
                self._tried.add(layers)
                return layers
        return None


def evenly_spread(num_layers: int, num_skipped: int) -> Layers:
    """All layers but `num_skipped`, which are spread evenly between the first and the last."""
    num_inner = num_layers - 2
    skipped = {1 + int((i + 0.5) * num_inner / num_skipped) for i in range(num_skipped)}
    return tuple(layer for layer in range(num_layers) if layer not in skipped)
