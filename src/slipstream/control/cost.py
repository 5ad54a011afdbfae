"""What steps and drafts cost, learned from every step.

Times are sums of so much a call, a pass, a sequence and a token: few numbers, which a few steps tell. What a pass of
the target takes by rows is no straight line, because memory and arithmetic limit it in turn; there a measured profile
gives the shape, and what is learned is how much slower or faster this machine is now.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slipstream.control.types import DraftCall, Number

MEMORY = 40.0
"""Values after which an old one weighs 1/e in a mean."""
LINEAR_MEMORY = 200
"""Steps after which an old one weighs 1/e in a sum of parts."""
NOISE = 0.05
"""By how much, as a share, a step's time may well differ from the next one's."""
FEW = 8
"""Before so many steps nothing is final: the first may be slow, because something is set up in it."""
MIN_CALLS = 3
"""Calls of a drafter before its cost is known: the first one says too little, and includes the text so far."""
MANY_MISSED = 32
"""Tokens: so many are a prompt, or a long time without drafts, and not what alternating between drafters leaves."""
SOLVED_EVERY = 12
"""Steps that may pass before what they tell is worked in, once something is known."""
OUTLIER = 3.0
"""A call that took longer than usual by this factor is an outlier; one that was faster did something else, and weighs
no more for that."""
OUTLIERS_IN_A_ROW = 3
"""So many are no outliers: everything is slower now, and what was learned is dropped."""
_ROUNDING = 1e-12
"""A gradient of no more than this share of the largest target is none."""


@dataclass(slots=True)
class Mean:
    """A decayed mean."""

    weight: float = 0.0
    value: float = 0.0

    def learn(self, value: float) -> None:
        """One more value."""
        self.weight = self.weight * (1 - 1 / MEMORY) + 1
        self.value += (value - self.value) / self.weight


class Linear:
    """Seconds as a sum of non-negative parts, each in proportion to one quantity: decayed least squares of errors
    relative to what was measured, so that a call that hung hardly counts.

    Quantities that always come together cannot be distinguished by it. There the prior stays, so that what was learned
    from steps that drafted is not lost in many that do not. What is learned is kept, and worked in when it is needed.
    """

    def __init__(self, prior: Seq[float], spread: Seq[float]) -> None:
        """`prior` are the parts before anything is known, and `spread` by how much each may well be wrong."""
        self._products = np.zeros((len(prior), len(prior)))
        self._targets = np.zeros(len(prior))
        self._ridge = (NOISE / np.array(spread)) ** 2
        self._prior: NDArray[np.float64] = np.array(prior, dtype=np.float64)
        self._parts = list(prior)
        self._new: list[tuple[Seq[float], float]] = []
        self._num_new = 0
        self._is_fitted = False
        self._num_outliers = 0

    def learn(self, features: Seq[float], seconds: float) -> None:
        """One call or step."""
        usual = sum(part * feature for part, feature in zip(self._parts, features, strict=True))
        self._num_outliers = self._num_outliers + 1 if seconds > OUTLIER * usual > 0 else 0
        self._new.append((features, seconds))
        self._num_new += 1
        if self._num_outliers >= OUTLIERS_IN_A_ROW:
            self._products[:], self._targets[:], self._is_fitted = 0.0, 0.0, False
            self._new, self._num_outliers = self._new[-OUTLIERS_IN_A_ROW:], 0
        if len(self._new) >= LINEAR_MEMORY:
            self._work_in()

    def __call__(self, features: Seq[Number]) -> Number:
        """Seconds, of numbers or of arrays; by the prior before anything is known."""
        return sum(part * feature for part, feature in zip(self.parts(), features, strict=True))

    def parts(self) -> list[float]:
        """Seconds of one of each quantity."""
        if self._num_new >= (SOLVED_EVERY if self._is_fitted else 1):
            self._work_in()
        return self._parts

    def _work_in(self) -> None:
        rows = np.array([features for features, _ in self._new], dtype=float)
        seconds = np.array([each for _, each in self._new])
        usual = rows @ self._prior
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
            self._products, self._targets, self._prior, self._new = products, targets, parts, []
            self._is_fitted = True

    def _solve(self, products: NDArray[np.float64], targets: NDArray[np.float64]) -> NDArray[np.float64]:
        products = products + np.diag(self._ridge)
        targets = targets + self._ridge * self._prior
        scale = np.sqrt(np.diag(products))
        scaled = products / np.outer(scale, scale) + 1e-9 * np.eye(len(scale))
        return non_negative(scaled, targets / scale) / scale


class DraftCost:
    """Seconds of a drafter's calls: so much a call, a level, a sequence, a token, and a token of missed text."""

    def __init__(self, pass_s: float) -> None:
        """`pass_s` is what a pass of the target takes, for a sense of proportion."""
        # Drafters are explored one request at a time, which does not tell what more of them take: the prior does.
        self._parts = Linear([0.0] * 5, [pass_s * share for share in (1.0, 1.0, 0.02, 0.02, 0.02)])
        self._missed = Mean()
        """Tokens that a sequence had usually gained while the drafter was not called for it."""
        self._num_calls = 0

    @property
    def is_known(self) -> bool:
        """True after a few calls that drafted."""
        return self._num_calls >= MIN_CALLS

    def learn(self, call: DraftCall, num_missed: int) -> None:
        """One call, which first had to compute `num_missed` tokens of text beyond what a step yields."""
        number, levels, tokens, _, seconds = call
        self._parts.learn((1.0, levels, number, tokens, num_missed), seconds)
        if number:
            self._num_calls += 1
            if num_missed < MANY_MISSED * number:
                self._missed.learn(num_missed / number)

    def __call__(self, call: DraftCall) -> Number:
        """A call for sequences whose prompts are computed; 0 before that is known. Takes numbers or arrays."""
        if not self.is_known:
            return 0.0
        number, levels, tokens, *_ = call
        seconds = self._parts((1.0, levels, number, tokens, self._missed.value * number))
        return (
            np.where(number > 0, seconds, 0.0) if isinstance(number, np.ndarray) else seconds * (number > 0)
        )

    @property
    def missed_token_s(self) -> float:
        """Seconds for a token that the drafter has not seen, as a prompt's; 0 before it is known."""
        return self._parts.parts()[4]


class StepCost:
    """Seconds of a step, drafting apart."""

    def __init__(self, pass_s: Callable[[float], float]) -> None:
        """`pass_s` is the expected time of a target pass by rows."""
        self._pass_s = pass_s
        self._known: dict[int, float] = {}
        """Rows to seconds of a pass: reading a profile takes longer."""
        # With one request, a step that has a draft and a request that has one are the same; most of it is the step's.
        spread = [pass_s(1.0) * share for share in (0.3, 0.02, 0.05, 0.01, 0.01)]
        self._parts = Linear([0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0], [*spread, 0.3, 0.3])

    def learn(self, *, num_sequences: int, num_rows: int, drafted: int, checked: int, seconds: float) -> None:
        """One step of `num_rows` rows in all, of which `checked` were drafts for `drafted` sequences."""
        self._parts.learn(self._features(num_sequences, num_rows, drafted, checked), seconds)

    def step_s(self, num_sequences: int, num_rows: Number, drafted: Number, checked: Number) -> Number:
        """Expected seconds, of numbers or of arrays."""
        return self._parts(self._features(num_sequences, num_rows, drafted, checked))

    def _features(
        self, num_sequences: int, num_rows: Number, drafted: Number, checked: Number
    ) -> tuple[Number, ...]:
        """The pass is in two parts: rows of prompts need no logits, so they take less than the others."""
        decoding_s, prompts_s = self._pass(num_sequences + checked), 0.0
        if isinstance(num_rows, np.ndarray) or num_rows > num_sequences + checked:
            prompts_s = self._pass(num_rows) - decoding_s
        any_drafted = np.minimum(drafted, 1.0) if isinstance(drafted, np.ndarray) else min(drafted, 1.0)
        return 1.0, num_sequences, any_drafted, drafted, checked, decoding_s, prompts_s

    def _pass(self, rows: Number) -> Number:
        if isinstance(rows, np.ndarray):
            return np.array([self._pass(each) for each in rows.tolist()])
        low = int(rows)
        if low == rows:
            return self._at(low)
        return self._at(low) + (rows - low) * (self._at(low + 1) - self._at(low))

    def _at(self, rows: int) -> float:
        if rows not in self._known:
            self._known[rows] = self._pass_s(float(rows))
        return self._known[rows]


class TextSeen:
    """How much of each text one drafter has computed."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, int]] = {}
        """Sequence to the step in which the drafter was called last, and the text's length then."""

    def note(self, step: int, sequence_id: int, length: int) -> int:
        """The drafter is called for a sequence; returns the tokens that it has to compute first, beyond a step's."""
        last, seen = self._seen.get(sequence_id, (-1, 0))
        self._seen[sequence_id] = step, length
        return 0 if last == step - 1 else max(length - seen - 1, 0)

    def note_prompt(self, step: int, sequence_id: int, num_rows: int, length: int) -> int:
        """The drafter computes `num_rows` of a prompt in this step, up to `length`."""
        self._seen[sequence_id] = step, length
        return num_rows

    def num_missing(self, sequence_id: int, length: int) -> int:
        """Tokens that the drafter would have to compute first, where they are many."""
        missing = length - self._seen.get(sequence_id, (0, 0))[1]
        return missing if missing >= MANY_MISSED else 0

    def release(self, sequence_id: int) -> None:
        """Forget a sequence."""
        self._seen.pop(sequence_id, None)

    def __len__(self) -> int:
        return len(self._seen)


def non_negative(products: NDArray[np.float64], targets: NDArray[np.float64]) -> NDArray[np.float64]:
    """The x of no negative entry at which xᵀ·`products`·x / 2 - `targets`·x is least.

    `products` [n, n] is symmetric and positive definite: of a least-squares problem, the normal equations' matrix.
    Lawson and Hanson's method: entries are freed one at a time, the steepest first, and those that the solution of the
    free ones would make negative are set to zero again. SciPy has it, but takes half a second of a start to import.
    """
    free = np.zeros(len(targets), dtype=bool)
    found = np.zeros(len(targets))
    tolerance = _ROUNDING * float(np.abs(targets).max(initial=0.0))
    for _ in range(10 * len(targets)):  # it ends before, but for rounding
        gradient = np.where(free, -np.inf, targets - products @ found)
        steepest = int(gradient.argmax())
        if gradient[steepest] <= tolerance:
            break
        free[steepest] = True
        while True:
            wanted = np.zeros(len(targets))
            wanted[free] = np.linalg.solve(products[np.ix_(free, free)], targets[free])
            below = free & (wanted <= 0)
            if not below.any():
                break
            step = float((found[below] / (found[below] - wanted[below])).min())
            found = np.where(free, found + step * (wanted - found), 0.0)
            free &= ~(below & (found <= _ROUNDING * float(found.max(initial=0.0))))
            found[~free] = 0.0
            if not free.any():
                break
        found = wanted if free.any() else found
    return found
