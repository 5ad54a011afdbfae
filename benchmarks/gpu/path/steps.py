"""Part `steps`: target passes by rows and context, captured and eager: ms, kernels, and how long the GPU has nothing to
do. Weights and entries are random."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.gpu.path.part import Part
from benchmarks.gpu.path.shapes import SHAPES, TINY, WAYS, Way, bytes_of, causal_lm
from benchmarks.gpu.path.timing import wall_ms
from benchmarks.gpu.trace import profiled
from slipstream.core.proposal import Proposal
from slipstream.models import CausalLM, RowGroup
from slipstream.models.executor.choices import OwnTokens, TokenChoices
from slipstream.sampling.params import SamplingParams

WHOLE = ("fused", "captured")
"""Ways of which all contexts are measured; of the others the least, by few and many rows."""
ROWS = (1, 8, 16, 64)
CONTEXTS = (128, 2048, 8192)
GREEDY = SamplingParams(temperature=0.0)
MANY = 8
"""Requests of one row each."""
NUM_TIMED = 20
NUM_TRACED = 3


class Passes:
    """A model, and a cache that is full of random entries."""

    def __init__(self, lm: CausalLM, num_slots: int) -> None:
        self.lm = lm
        self._pool = lm.new_cache(num_slots, prefix_caching=False).pool
        for tensor in self._pool.tensors:
            tensor.normal_()

    def run(self, context: int, rows: int, sequences: int = 1) -> None:
        """One pass, to the tokens on the host: `rows` of each sequence, behind so many entries."""
        room = context + rows
        groups = [
            RowGroup(range(number * room, (number + 1) * room), context, [5] * rows, range(rows))
            for number in range(sequences)
        ]
        choices = TokenChoices()
        for _ in groups:
            choices.add(OwnTokens([0] * rows, GREEDY), Proposal.chain([5] * (rows - 1)))
        output = self.lm.forward(groups, self._pool, choices=choices)
        (output.logits.argmax(-1) if output.verdicts is None else output.verdicts).tolist()


def measure(part: Part) -> None:
    """See the module."""
    shapes = {"tiny": TINY} if part.is_tiny else SHAPES
    for way_name, way in WAYS.items():
        for name, shape in shapes.items():
            of_shape(part, name, shape, way_name, way)


def of_shape(part: Part, name: str, shape: dict[str, int], way_name: str, way: Way) -> None:
    """All cells of one model, computed in one way."""
    contexts = (24,) if part.is_tiny else CONTEXTS if way_name in WHOLE else CONTEXTS[:1]
    rows = (1, 4) if part.is_tiny else ROWS if way_name in WHOLE else (ROWS[0], ROWS[-1])
    asked = [(context, count, 1) for context in contexts for count in rows]
    asked += [(context, 1, MANY) for context in contexts[:2]]
    about = {"shape": name, "way": way_name}
    names = {each: f"{name}, {way_name}, behind {each[0]}, {each[2]} of {each[1]} rows" for each in asked}
    passes: Passes | None = None
    if not all(map(part.kept.has, names.values())):
        num_slots = max((context + count) * number for context, count, number in asked)
        try:
            passes = Passes(causal_lm(shape, part.device, way), num_slots)
        except Exception as error:
            part.without(f"{name}, {way_name}", f"{type(error).__name__}: {error}")
            return
    for each, cell in names.items():
        part.cell(cell, lambda each=each: {**about, **one(part, passes, *each)}, needs_s=4)  # type: ignore[misc]


def one(part: Part, passes: Passes | None, context: int, rows: int, sequences: int) -> dict[str, Any]:
    """A cell."""
    assert passes is not None
    run = partial(passes.run, context, rows, sequences)
    executor: Any = passes.lm.executor
    before = sum(getattr(executor, "eager", {}).values())
    found = wall_ms(run, 2 if part.is_tiny else NUM_TIMED)
    found |= {"context": context, "rows": rows, "sequences": sequences}
    found["outside_graphs"] = sum(getattr(executor, "eager", {}).values()) - before
    found["bytes_read"] = bytes_of(passes.lm.model)
    if part.is_tiny:
        return found
    traced = profiled(partial(_times, run, NUM_TRACED), NUM_TRACED)
    kept = {name: traced[name] for name in ("device_ms", "kernels", "copies", "device_us_by_kernel")}
    return found | kept | {"idle": 1 - traced["device_ms"] / found["ms"]}


def _times(run: Callable[[], None], number: int) -> None:
    for _ in range(number):
        run()
