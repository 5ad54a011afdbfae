"""Where the numbers of a recorded pass lie in the one buffer that it reads."""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from slipstream.models.batch import Bucket, ForwardBatch
from slipstream.models.cuda.attention_plan import AttentionPlan, PlanSizes
from slipstream.models.executor.choices import NUM_FILTER_ROWS, NUM_ROWS, TokenChoices

ROWS = (16, 32, 64, 128, 256, 512, 1024, 2048)
"""Rows of a bucket."""
WANTED = (64, 256)
"""The most rows of a bucket whose logits are computed: of few sequences, or of many and of trees."""
LEAST_SEEN, LEAST_ITEMS = 256, 64
"""The smallest arrays of single entries and of items."""
SEEN_BY_A_ROW = 8
"""Single entries for which a row has room, in a bucket of few enough rows for trees."""


def doubled(number: int) -> int:
    """The next power of two."""
    return 1 << max(number - 1, 0).bit_length()


def usual_seen(num_rows: int) -> int:
    """Room for single entries in a bucket of so many rows; more than that doubles."""
    return max(LEAST_SEEN, SEEN_BY_A_ROW * num_rows if num_rows <= WANTED[-1] else 0)


def plan_sizes(num_rows: int, num_partials: int) -> PlanSizes:
    """Room for a plan with so many partials, which has no more items: all of it doubles together, so that passes of a
    bucket have few shapes."""
    times = doubled(-(-num_partials // num_rows))
    return PlanSizes(num_rows, max(LEAST_ITEMS, num_rows) * times, num_rows * times)


class PassShape(NamedTuple):
    """What passes have in common that one graph serves."""

    bucket: Bucket
    plan: PlanSizes
    hidden_layers: tuple[int, ...]
    chooses: bool
    filters: bool
    """Whether some tokens are chosen among those that filters leave."""

    @property
    def num_choice_rows(self) -> int:
        """Rows of `TokenChoices.table`."""
        return (NUM_ROWS if self.chooses else 0) + (NUM_FILTER_ROWS if self.filters else 0)


class PassLayout:
    """The parts of the buffer, int64, by name; a part that a pass has not is empty."""

    def __init__(self, shape: PassShape, batch_size: int) -> None:
        """`batch_size` numbers are those of the `ForwardBatch`."""
        self._num_wanted = shape.bucket.num_wanted
        sizes = {
            "batch": batch_size,
            "items": 5 * shape.plan.num_items,
            "partials": shape.plan.num_rows + 1,
            "choices": shape.num_choice_rows * self._num_wanted,
        }
        ends = list(accumulate(sizes.values()))
        self._parts = {
            name: slice(end - size, end) for (name, size), end in zip(sizes.items(), ends, strict=True)
        }
        self.size = ends[-1]

    def part(self, buffer: Tensor, name: str) -> Tensor:
        """A view of one part."""
        return buffer[self._parts[name]]

    def choices(self, buffer: Tensor) -> Tensor:
        """What `TokenChoices.table` says."""
        return self.part(buffer, "choices").view(-1, self._num_wanted)

    def numbers(
        self, padded: ForwardBatch, plan: AttentionPlan, choices: TokenChoices | None
    ) -> NDArray[np.int64]:
        """The buffer of a pass; zeros where a bucket has more than the pass."""
        numbers = np.zeros(self.size, np.int64)
        numbers[self._parts["batch"]] = padded.buffer
        begin = self._parts["items"].start
        numbers[begin : begin + plan.items.size] = plan.items.ravel()
        numbers[self._parts["partials"]] = plan.partials
        if choices is not None:
            numbers[self._parts["choices"]] = choices.table(self._num_wanted).ravel()
        return numbers
