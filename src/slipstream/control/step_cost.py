"""What a step costs, learned from every step that is made.

Times are sums of so much a call, a pass, a sequence and a token: few numbers, which a few steps tell. What a pass of
the target takes by rows is no straight line, because memory and arithmetic take turns in being what it waits for; there
the measured profile gives the shape, and what is learned is by how much this machine, now, is slower or faster.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.optimize import nnls

MEMORY = 40.0
"""Values after which an old one weighs 1/e in a mean."""
LINEAR_MEMORY = 200
"""Steps after which an old one weighs 1/e in a sum of parts."""
RIDGE = 1e-3
"""How firmly what was believed is held where the steps of late do not tell, as a share of them."""
MANY_MISSED = 32
"""Tokens: so many are a prompt, or a long time without drafts, and not what alternating between drafters leaves."""
OUTLIER = 3.0
"""A step that took more than so many times what is usual counts as so many: a neighbour woke up, not a law."""


@dataclass(slots=True)
class Mean:
    """A decayed mean."""

    weight: float = 0.0
    value: float = 0.0

    def learn(self, value: float) -> None:
        """One more."""
        self.weight = self.weight * (1 - 1 / MEMORY) + 1
        self.value += (value - self.value) / self.weight


class Linear:
    """Seconds as a sum of non-negative parts, each in proportion to one quantity: decayed least squares, of relative
    errors.

    Quantities that always come together cannot be told apart by it. There what was believed before stays, so that what
    was learned from steps that drafted is not lost in many that do not.

    What is learned is only kept at first, and worked in when somebody asks: steps are many and short.
    """

    def __init__(self, believed: Seq[float], firmness: Seq[float]) -> None:
        """`believed` are the parts before anything is known; the greater a part's `firmness`, the more steps it takes to
        change it."""
        self._products = np.zeros((len(believed), len(believed)))
        self._targets = np.zeros(len(believed))
        self._parts = list(believed)
        self._ridge = RIDGE * np.array(firmness)
        self._known = False
        self._new: list[tuple[Seq[float], float]] = []

    def learn(self, features: Seq[float], seconds: float) -> None:
        """One call or step."""
        self._new.append((features, seconds))
        if len(self._new) >= LINEAR_MEMORY:
            self._work_in()

    @property
    def is_known(self) -> bool:
        return self._known or bool(self._new)

    def __call__(self, features: Seq[float]) -> float:
        """Seconds; 0 before anything is known."""
        if self._new:
            self._work_in()
        return sum(part * feature for part, feature in zip(self._parts, features, strict=True))

    def _work_in(self) -> None:
        rows = np.array([features for features, _ in self._new], dtype=float)
        seconds = np.array([each for _, each in self._new])
        self._new = []
        usual = rows @ np.array(self._parts) if self._known else np.full(len(seconds), np.median(seconds))
        usual = np.maximum(usual, 1e-6)
        rows /= usual[:, None]
        seconds = np.minimum(seconds / usual, OUTLIER)
        weights = (1 - 1 / LINEAR_MEMORY) ** np.arange(len(rows) - 1, -1, -1)
        keep = (1 - 1 / LINEAR_MEMORY) ** len(rows)
        self._products = self._products * keep + (rows * weights[:, None]).T @ rows
        self._targets = self._targets * keep + rows.T @ (weights * seconds)
        self._parts = self._solve()
        self._known = True

    def _solve(self) -> list[float]:
        scale = np.sqrt(np.diag(self._products))
        scale[scale == 0] = 1.0
        scaled = self._products / np.outer(scale, scale) + np.diag(self._ridge)
        targets = self._targets / scale + self._ridge * scale * np.array(self._parts)
        root = np.linalg.cholesky(scaled)
        parts, _ = nnls(root.T, np.linalg.solve(root, targets))
        return (parts / scale).tolist()  # type: ignore[no-any-return]


class Drafted(NamedTuple):
    """How much a drafter was asked for in a step."""

    num_sequences: int
    num_levels: int
    """Of the deepest; 1 for trees and lookups."""
    num_tokens: int
    """Asked for in all."""

    @property
    def features(self) -> tuple[float, ...]:
        return 1.0, self.num_levels, self.num_sequences, self.num_tokens


class DraftCost:
    """Seconds of a drafter's calls: so much a call, a level, a sequence, a token, and a token that it had missed."""

    def __init__(self) -> None:
        # Requests are first tried one at a time, which does not tell what more of them take: hope that they share.
        self._parts = Linear([0.0] * 5, [1.0, 1.0, 30.0, 30.0, 1.0])
        self._missed = Mean()
        """Tokens that a sequence had usually gained while the drafter was not asked for it."""

    @property
    def is_known(self) -> bool:
        return self._parts.is_known

    def learn(self, drafted: Drafted, num_missed: int, seconds: float) -> None:
        """One call, which first had to compute `num_missed` tokens of text beyond what a step yields."""
        self._parts.learn((*drafted.features, num_missed), seconds)
        if drafted.num_sequences and num_missed < MANY_MISSED * drafted.num_sequences:
            self._missed.learn(num_missed / drafted.num_sequences)

    def __call__(self, drafted: Drafted) -> float:
        """A call for sequences whose prompts are computed; 0 before any call was made."""
        if not drafted.num_sequences or not self._parts.is_known:
            return 0.0
        return self._parts((*drafted.features, self._missed.value * drafted.num_sequences))

    @property
    def missed_token_s(self) -> float:
        """Of a token that the drafter has not seen, as a prompt's; 0 before it is known."""
        return self._parts((0.0, 0.0, 0.0, 0.0, 1.0)) if self._parts.is_known else 0.0


class StepCost:
    """Seconds of a step, drafting apart."""

    def __init__(self, pass_s: Callable[[float], float]) -> None:
        """`pass_s` is the expected time of a target pass by rows."""
        self._pass_s = pass_s
        self._parts = Linear([0.0, 0.0, 0.0, 0.0, 1.0], [1.0] * 5)

    def learn(self, *, num_sequences: int, num_rows: int, drafted: int, checked: int, seconds: float) -> None:
        """One step of `num_rows` rows in all, of which `checked` were drafts for `drafted` sequences."""
        features = (1.0, num_sequences, drafted, checked, self._pass_s(num_rows))
        self._parts.learn(features, seconds)

    def step_s(self, num_sequences: int, num_rows: float, drafted: int, checked: float) -> float:
        """Expected seconds."""
        pass_s = self._pass_s(num_rows)
        if not self._parts.is_known:
            return pass_s
        return self._parts((1.0, num_sequences, drafted, checked, pass_s))
