"""Least squares whose parts are not negative. SciPy has it too, but takes half a second of every start to import."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_ROUNDING = 1e-12
"""A gradient of no more than this share of the largest target is none."""


def non_negative(products: NDArray[np.float64], targets: NDArray[np.float64]) -> NDArray[np.float64]:
    """The x of no negative entry at which xᵀ·`products`·x / 2 - `targets`·x is least.

    `products` [n, n] is symmetric and positive definite: of a least-squares problem, the normal equations' matrix.
    Lawson and Hanson's method: entries are freed one at a time, the steepest first, and those that the solution of the
    free ones would make negative are set to zero again.
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
