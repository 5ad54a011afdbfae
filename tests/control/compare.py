"""The policy in simulated worlds with real costs, over the best fixed setting of each world.

    python tests/control/compare.py            # a table; deterministic, some minutes

Costs and acceptance are those of docs/benchmarks/drafters.json and step_cost.json: the embedded pair (1.3 ms a step),
the target cost-expanded to 0.3 G in int8 (10 ms) and float32 (35 ms); suffix decoding, the embedded draft and EAGLE-3.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import world
from world import Machine, Simulated, World

from slipstream.control.types import Choice, PolicyDrafter

SEEDS = (0, 1)

STEPS = {
    "1.3 ms": Machine(read_s=0.00105, row_s=0.00011, other_s=0.0002, slot_s=0.00002),
    "10 ms": Machine(read_s=0.0090, row_s=0.0006, other_s=0.0003, slot_s=0.00003),
    "35 ms": Machine(read_s=0.0345, row_s=0.0018, other_s=0.0004, slot_s=0.00003),
}
TASKS = ("sql", "math", "code", "chat", "howto", "creative")
DRAFT = {"sql": 0.85, "math": 0.75, "code": 0.68, "chat": 0.55, "howto": 0.72, "creative": 0.5}
EAGLE = {"sql": 0.75, "math": 0.8, "code": 0.82, "chat": 0.72, "howto": 0.85, "creative": 0.62}
SUFFIX = {"sql": 0.75, "math": 0.85, "code": 0.85, "chat": 0.6, "howto": 0.65, "creative": 0.55}
FOUND = {
    "sql": ((0.15, 2), (0.08, 6)),
    "math": ((0.2, 2), (0.3, 8)),
    "code": ((0.2, 3), (0.12, 8)),
    "chat": ((0.15, 1), (0.06, 4)),
    "howto": ((0.12, 1), (0.05, 4)),
    "creative": ((0.12, 1), (0.08, 5)),
}
HOT = {"creative": 0.12}
"""At temperature 1.2."""


def drafters(machine: Machine, hot: bool = False) -> list[Any]:
    draft, eagle, suffix = (HOT,) * 3 if hot else (DRAFT, EAGLE, SUFFIX)
    found = {"creative": ((0.25, 1), (0.05, 2))} if hot else FOUND
    return [
        Simulated(
            PolicyDrafter("suffix", 16, False, True),
            suffix,
            call_s=4e-5,
            level_s=0.0,
            slot_s=2e-5,
            found=found,
        ),
        Simulated(PolicyDrafter("draft", 6, True), draft, 6e-5, 2.4e-4, 2e-5, 3e-5),
        Simulated(
            PolicyDrafter("eagle3", 4, True),
            eagle,
            2e-4,
            1.1e-3 * (machine.read_s / 0.0345) ** 0.5,
            4e-5,
            4e-5,
        ),
    ]


class Fixed:
    """In place of the policy: the same choice for all, always."""

    in_probe, planning_s = False, 0.0

    def __init__(self, choice: Any) -> None:
        self.choice = choice

    def choose(self, requests: Seq[Any], num_prompt_rows: int) -> list[Any]:
        return [self.choice] * len(requests)

    def announce(self, *_: Any) -> int:
        return int(self.choice.drafter)

    def note_called(self, *_: Any, **__: Any) -> None:
        pass

    observe = release = note_called


def run(
    machine: Machine, tasks: Seq[str], size: int, seed: int, hot: bool = False, choice: Any = None
) -> tuple[float, World]:
    """Expected tokens a second, after a time to learn; of a fixed choice, or of the policy."""
    num_steps = 1200 if machine.read_s < 0.005 else 600
    source = World(
        drafters(machine, hot),
        size=size,
        tasks=tasks,
        seed=seed,
        machine=machine,
        prompt=40,
        answer=96,
        limit=16,
        one_by_one=True,
        clock=world.FakeClock(1.2e-3 if size > 4 else 6e-4),
    )
    if choice is not None:
        source.policy = Fixed(choice)  # type: ignore[assignment]
    source.run(num_steps)
    source.restart()
    source.run(num_steps)
    return source.rate, source


def fixed(machine: Machine, tasks: Seq[str], size: int, hot: bool = False) -> tuple[str, float]:
    """The setting that is the best one in other rounds, and its tokens a second in these."""
    settings = {"off": Choice(), "suffix": Choice(lookup=0, min_tokens=1)}
    settings |= {f"draft-{depth}": Choice(1, depth) for depth in range(1, 7)}
    settings |= {f"eagle3-{depth}": Choice(2, depth) for depth in range(1, 5)}
    rates = {name: run(machine, tasks, size, 100, hot, choice)[0] for name, choice in settings.items()}
    best = max(rates, key=lambda name: rates[name])
    return best, statistics.fmean(run(machine, tasks, size, seed, hot, settings[best])[0] for seed in SEEDS)


def cells() -> Iterator[tuple[str, Seq[str], int, bool]]:
    """Step, tasks, requests at once, and whether at a high temperature."""
    for name in STEPS:
        for tasks in (TASKS, *((task,) for task in ("sql", "math", "howto", "creative"))):
            for size in (1, 4, 8, 16):
                yield name, tasks, size, False
        yield name, ("creative",), 32, True


def main() -> None:
    """With a file: rates of the policy go there, or what is in it is compared with them."""
    rates: dict[str, float] = {}
    for name, tasks, size, hot in cells():
        if len(sys.argv) > 2 and sys.argv[2] not in name:
            continue
        made = statistics.fmean(run(STEPS[name], tasks, size, seed, hot)[0] for seed in SEEDS)
        label = f"{name:7s}{'mixed' if len(tasks) > 1 else tasks[0]:9s}{'hot' if hot else '':4s}x{size:<3d}"
        rates[label] = made
        if Choice is not None:
            best, rate = fixed(STEPS[name], tasks, size, hot)
            print(f"{label} {made / rate:6.3f} of {best}", flush=True)
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(rates, indent=1))


if __name__ == "__main__":
    main()
