"""A small model on a CPU, whose rows cost much: what gains nothing there is not chosen.

The costs of passes are those measured on SmolLM2-135M (AVX2, two cores): one row takes 8.9 ms, and v(2), v(4), v(5),
v(8), v(16) are 1.15, 1.35, 1.58, 2.41, 4.32. With ten requests at once `self`, `layer_skip`, `token_recycling`,
`jacobi` and `lookahead` took 2 to 4 times the processor time of off.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from world import Machine, Simulated, World, chain

from slipstream.control.types import PolicyDrafter

ONE_ROW_S = 0.0089
MEASURED = {1: 1.0, 2: 1.15, 4: 1.35, 5: 1.58, 8: 2.41, 16: 4.32}
"""Rows to v."""
FOREVER = 10**9


@dataclass(frozen=True)
class NarrowMachine(Machine):
    """Between the rows that were measured, and beyond them, costs are straight lines."""

    def pass_s(self, rows: float) -> float:
        known = sorted(MEASURED)
        after = next((place for place, count in enumerate(known) if count >= rows), len(known) - 1)
        low, high = known[max(after, 1) - 1], known[max(after, 1)]
        slope = (MEASURED[high] - MEASURED[low]) / (high - low)
        return ONE_ROW_S * (MEASURED[low] + slope * (rows - low))


def test_the_costs_are_the_measured_ones() -> None:
    machine = NarrowMachine()
    assert {rows: round(machine.pass_s(rows) / ONE_ROW_S, 9) for rows in MEASURED} == MEASURED
    assert machine.pass_s(32) > 8 * ONE_ROW_S


def suffix(found: float, alpha: float) -> Simulated:
    """Finds a draft of six tokens in this share of the steps."""
    return Simulated(
        PolicyDrafter("suffix", 16, False, True), {"t": alpha}, level_s=0.0, found={"t": [(found, 6)]}
    )


def block(name: str, alpha: float, size: int, call_s: float = 0.0005) -> Simulated:
    """A drafter whose proposals have always the same rows, taken or left."""
    return Simulated(PolicyDrafter(name, size, False), {"t": alpha}, call_s=call_s, level_s=0.0)


LOSING = [
    chain("self", {"t": 1.0}, depth=3, level_s=ONE_ROW_S),
    chain("layer_skip", {"t": 0.5}, depth=3, level_s=0.6 * ONE_ROW_S),
    block("token_recycling", 0.3, 16),
    block("jacobi", 0.05, 8),
    block("lookahead", 0.2, 16),
]
"""With the acceptance of chat; `self` is the target itself, so all its draft tokens are accepted."""


def test_each_of_them_loses_where_it_is_always_used() -> None:
    world = World(LOSING, size=10, tasks=("t",), prompt=0, answer=FOREVER, machine=NarrowMachine())
    for number, drafter in enumerate(LOSING):
        used = world.fixed_rate({"t": (number, drafter.traits.max_depth)})
        assert used < 0.92 * world.off_rate(), drafter.traits.name


@pytest.mark.parametrize("size", [1, 4, 10])
def test_what_loses_on_a_narrow_model_is_not_chosen(size: int) -> None:
    """All of them together, beside a lookup that finds little. Steps without drafts are those of off."""
    world = World(
        [suffix(0.1, 0.3), *LOSING],
        size=size,
        tasks=("t",),
        prompt=0,
        answer=FOREVER,
        machine=NarrowMachine(),
    )
    world.run(100)
    world.restart()
    world.run(150)
    asked = dict(zip((drafter.traits.name for drafter in world.drafters), world.num_asked, strict=True))
    losing = sum(count for name, count in asked.items() if name != "suffix")
    assert losing <= 0.05 * 150 * size  # trials of what is not chosen
    assert world.rate > 0.97 * world.off_rate()


@pytest.mark.parametrize("size", [1, 10])
def test_the_usual_choice_for_a_quantised_file_is_as_fast_as_off(size: int) -> None:
    """For such a target `auto` has suffix alone, whether it finds what comes or not."""
    for found, alpha in ((0.05, 0.1), (0.3, 0.2), (0.3, 0.8)):
        world = World(
            [suffix(found, alpha)],
            size=size,
            tasks=("t",),
            prompt=0,
            answer=FOREVER,
            machine=NarrowMachine(),
        ).run(100)
        world.restart()
        world.run(150)
        assert world.rate > 0.97 * world.off_rate(), (found, alpha)
