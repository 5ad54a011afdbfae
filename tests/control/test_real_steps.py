"""The policy over the best fixed setting, in worlds with the costs of real targets (`compare.py` has all of them)."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import pytest
from compare import STEPS, TASKS, fixed, run


@pytest.mark.parametrize(
    ("step", "tasks", "size", "bar"),
    [
        ("10 ms", TASKS, 1, 1.0),
        ("10 ms", ("sql",), 8, 0.97),
        ("35 ms", TASKS, 4, 0.97),
        ("1.3 ms", ("math",), 4, 0.97),
    ],
)
def test_it_makes_nearly_as_much_as_the_best_fixed_setting(
    step: str, tasks: Seq[str], size: int, bar: float
) -> None:
    _, rate = fixed(STEPS[step], tasks, size)
    made = [run(STEPS[step], tasks, size, seed)[0] for seed in (0, 1)]
    assert sum(made) / len(made) > bar * rate


@pytest.mark.parametrize("step", STEPS)
def test_traffic_that_cannot_pay_is_hardly_slower(step: str) -> None:
    machine = STEPS[step]
    made, _ = run(machine, ("creative",), 32, 0, hot=True)
    assert made > 0.98 * 32 / machine.step_s(32, 32)
