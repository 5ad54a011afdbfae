"""Least squares without negative parts, and Student's t: as SciPy has them, which is not imported for them."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import nnls
from scipy.special import stdtrit

from slipstream.control.cost import non_negative
from slipstream.control.realised import quantile, within


@pytest.mark.parametrize("seed", range(5))
def test_non_negative_least_squares_are_scipys(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for number in range(100):
        size = int(rng.integers(1, 8))
        rows = rng.normal(size=(size + 3, size)) * 10 ** rng.uniform(-2, 2, size=size)
        wanted = rng.normal(size=size + 3)
        if number % 3 == 0:  # a solution on the bounds
            wanted = rows @ np.maximum(rng.normal(size=size), 0.0)
        found = non_negative(rows.T @ rows, rows.T @ wanted)
        expected, _ = nnls(rows, wanted)
        assert (found >= 0).all()
        assert np.linalg.norm(rows @ (found - expected)) <= 1e-9 * np.linalg.norm(wanted)


def test_nothing_to_fit_is_zero() -> None:
    assert non_negative(np.eye(3), np.zeros(3)).tolist() == [0.0, 0.0, 0.0]
    assert non_negative(np.eye(2), np.array([-1.0, 2.0])).tolist() == [0.0, 2.0]


def test_quantiles_of_student_are_scipys() -> None:
    for freedom in range(1, 80):
        for chance in (0.75, 0.95, 0.975, 0.9995):
            assert quantile(freedom, chance) == pytest.approx(stdtrit(freedom, chance), rel=1e-9)
    assert within(0.0, 3) == 0.0
