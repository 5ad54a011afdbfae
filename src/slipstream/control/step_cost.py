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
from numpy.typing import NDArray
from scipy.optimize import nnls

MEMORY = 40.0
"""Values after which an old one weighs 1/e in a mean."""
LINEAR_MEMORY = 200
"""Steps after which an old one weighs 1/e in a sum of parts."""
NOISE = 0.05
"""By how much, as a share, a step's time may well differ from the next one's."""
FEW = 8
"""Before so many steps nothing is final: the first may be slow, because something is set up in it."""
MIN_CALLS = 3
"""Of a drafter, before its cost is known: the first one says too little, and includes the text so far."""
MANY_MISSED = 32
"""Tokens: so many are a prompt, or a long time without drafts, and not what alternating between drafters leaves."""
SOLVED_EVERY = 12
"""Steps that may pass before what they tell is worked in, once something is known."""
OUTLIER = 3.0
"""A call that took more than what is usual by such a factor may be an accident; one that took less has done something
else, and weighs no more for that."""
MANY_ODD = 3
"""Accidents in a row are none."""


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
    """Seconds as a sum of non-negative parts, each in proportion to one quantity: decayed least squares of errors
    relative to what was measured, so that a call that hung hardly counts.

    Quantities that always come together cannot be told apart by it. There what was believed before stays, so that what
    was learned from steps that drafted is not lost in many that do not.

    What is learned is only kept at first, and worked in when somebody asks: steps are many and short.
    """

    def __init__(self, believed: Seq[float], spread: Seq[float]) -> None:
        """`believed` are the parts before anything is known, and `spread` by how much each may well be wrong."""
        self._products = np.zeros((len(believed), len(believed)))
        self._targets = np.zeros(len(believed))
        self._ridge = (NOISE / np.array(spread)) ** 2
        self._believed: NDArray[np.float64] = np.array(believed, dtype=np.float64)
        self._parts = list(believed)
        self._new: list[tuple[Seq[float], float]] = []
        self._num_new = 0
        self._is_settled = False
        self._num_odd = 0

    def learn(self, features: Seq[float], seconds: float) -> None:
        """One call or step."""
        usual = sum(part * feature for part, feature in zip(self._parts, features, strict=True))
        self._num_odd = self._num_odd + 1 if seconds > OUTLIER * usual > 0 else 0
        self._new.append((features, seconds))
        self._num_new += 1
        if self._num_odd >= MANY_ODD:  # no accident: all is slower now
            self._products[:], self._targets[:], self._is_settled = 0.0, 0.0, False
            self._new, self._num_odd = self._new[-MANY_ODD:], 0
        if len(self._new) >= LINEAR_MEMORY:
            self._work_in()

    def __call__(self, features: Seq[float]) -> float:
        """Seconds; as believed at first before anything is known."""
        seconds = 0.0
        for part, feature in zip(self.parts(), features, strict=True):
            seconds += part * feature
        return seconds

    def parts(self) -> list[float]:
        """Seconds of one of each quantity."""
        if self._num_new >= (SOLVED_EVERY if self._is_settled else 1):
            self._work_in()
        return self._parts

    def _work_in(self) -> None:
        rows = np.array([features for features, _ in self._new], dtype=float)
        seconds = np.array([each for _, each in self._new])
        usual = rows @ self._believed
        usual = np.where(usual > 0, usual, np.median(seconds))
        scale = np.maximum(np.maximum(seconds, usual / OUTLIER), 1e-6)
        rows /= scale[:, None]
        weights = (1 - 1 / LINEAR_MEMORY) ** np.arange(len(rows) - 1, -1, -1)
        keep = (1 - 1 / LINEAR_MEMORY) ** len(rows)
        products = self._products * keep + (rows * weights[:, None]).T @ rows
        targets = self._targets * keep + rows.T @ (weights * seconds / scale)
        parts = self._solve(products, targets)
        self._parts, self._num_new = parts.tolist(), 0
        if self._products.any() or len(self._new) >= FEW:
            self._products, self._targets, self._believed, self._new = products, targets, parts, []
            self._is_settled = True

    def _solve(self, products: NDArray[np.float64], targets: NDArray[np.float64]) -> NDArray[np.float64]:
        products = products + np.diag(self._ridge)
        targets = targets + self._ridge * self._believed
        scale = np.sqrt(np.diag(products))
        root = np.linalg.cholesky(products / np.outer(scale, scale) + 1e-9 * np.eye(len(scale)))
        parts, _ = nnls(root.T, np.linalg.solve(root, targets / scale))
        return np.asarray(parts / scale)


class Drafted(NamedTuple):
    """How much a drafter was asked for in a step."""

    num_sequences: float
    num_levels: int
    """Of the deepest; 1 for trees and lookups."""
    num_tokens: float
    """Asked for in all."""

    @property
    def features(self) -> tuple[float, ...]:
        return 1.0, self.num_levels, self.num_sequences, self.num_tokens


class DraftCost:
    """Seconds of a drafter's calls: so much a call, a level, a sequence, a token, and a token that it had missed."""

    def __init__(self, pass_s: float) -> None:
        """`pass_s` is what a pass of the target takes, for a sense of proportion."""
        # Requests are tried one at a time, which does not tell what more of them take: a call's share is believed in.
        self._parts = Linear([0.0] * 5, [pass_s * share for share in (1.0, 1.0, 0.02, 0.02, 0.02)])
        self._missed = Mean()
        """Tokens that a sequence had usually gained while the drafter was not asked for it."""
        self._num_calls = 0

    @property
    def is_known(self) -> bool:
        """True after a few calls that drafted."""
        return self._num_calls >= MIN_CALLS

    def learn(self, drafted: Drafted, num_missed: int, seconds: float) -> None:
        """One call, which first had to compute `num_missed` tokens of text beyond what a step yields."""
        self._parts.learn((*drafted.features, num_missed), seconds)
        self._num_calls += drafted.num_sequences > 0
        if drafted.num_sequences and num_missed < MANY_MISSED * drafted.num_sequences:
            self._missed.learn(num_missed / drafted.num_sequences)

    def __call__(self, drafted: Drafted) -> float:
        """A call for sequences whose prompts are computed; 0 before that is known."""
        if not drafted.num_sequences or not self.is_known:
            return 0.0
        return self._parts((*drafted.features, self._missed.value * drafted.num_sequences))

    def by_level(self, num_sequences: float, max_levels: int) -> NDArray[np.float64]:
        """Seconds of one sequence's share of a call for so many, by level from 0 on."""
        if not self.is_known:
            return np.zeros(max_levels + 1)
        call_s, level_s, sequence_s, token_s, missed_s = self._parts.parts()
        levels = np.arange(max_levels + 1)
        shared_s = (call_s + level_s * levels) / num_sequences
        seconds = shared_s + sequence_s + token_s * levels + missed_s * self._missed.value
        seconds[0] = 0.0
        return seconds

    @property
    def missed_token_s(self) -> float:
        """Of a token that the drafter has not seen, as a prompt's; 0 before it is known."""
        return self._parts((0.0, 0.0, 0.0, 0.0, 1.0))


class StepCost:
    """Seconds of a step, drafting apart."""

    def __init__(self, pass_s: Callable[[float], float]) -> None:
        """`pass_s` is the expected time of a target pass by rows."""
        self._pass_s = pass_s
        # With one request, a step that has a draft and a request that has one are the same; most of it is the step's.
        spread = [pass_s(1.0) * share for share in (0.3, 0.02, 0.05, 0.01, 0.01)]
        self._parts = Linear([0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0], [*spread, 0.3, 0.3])

    def learn(self, *, num_sequences: int, num_rows: int, drafted: int, checked: int, seconds: float) -> None:
        """One step of `num_rows` rows in all, of which `checked` were drafts for `drafted` sequences."""
        self._parts.learn(self._features(num_sequences, num_rows, drafted, checked), seconds)

    def step_s(self, num_sequences: int, num_rows: float, drafted: float, checked: float) -> float:
        """Expected seconds."""
        return self._parts(self._features(num_sequences, num_rows, drafted, checked))

    def _features(
        self, num_sequences: int, num_rows: float, drafted: float, checked: float
    ) -> tuple[float, ...]:
        """The pass is in two parts: rows of prompts need no logits, so they take less than the others."""
        decoding_s = self._pass_s(num_sequences + checked)
        prompts_s = self._pass_s(num_rows) - decoding_s if num_rows > num_sequences + checked else 0.0
        return 1.0, num_sequences, min(drafted, 1.0), drafted, checked, decoding_s, prompts_s
