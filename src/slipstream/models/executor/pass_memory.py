"""What recorded passes hold, from shapes alone: an estimate that is made before anything is loaded.

Every graph keeps the numbers that it reads and its verdicts. Graphs share the memory that their passes
compute with, so the largest counts, and where they leave logits and hidden states. A graph is counted for each bucket
of rows and of wanted rows, for each size that the partials of its attention double to up to the longest text, with
tokens chosen, also among filtered ones, and without. What CUDA itself keeps of a graph is not known.
"""

from __future__ import annotations

from collections.abc import Iterator

from slipstream.models.batch import Bucket
from slipstream.models.cuda import filters
from slipstream.models.cuda.attention_plan import MANY_ITEMS, SPLIT
from slipstream.models.cuda.tree_attention import Cut
from slipstream.models.executor.base import LargestPass
from slipstream.models.executor.choices import PassVerdicts
from slipstream.models.executor.pass_layout import (
    ROWS,
    WANTED,
    PassLayout,
    PassShape,
    plan_sizes,
    usual_seen,
)

_NUMBER, _FLOAT = 8, 4
"""Bytes of an int64 and of a float32."""


def recorded_bytes(largest: LargestPass) -> int:
    """All graphs of an engine with such passes, what the largest computes with, and where all leave outputs."""
    held = num_rows = 0
    for num_rows in _doublings(ROWS[0], min(largest.num_rows, ROWS[-1])):
        for num_wanted in {min(num_rows, most) for most in WANTED}:
            held += sum(
                map(graph_bytes, _shapes(Bucket(num_rows, num_wanted, usual_seen(num_rows)), largest))
            )
    *_, partials = _doublings(
        ROWS[0], max(_most_partials(size, largest) for size in ROWS if size <= num_rows)
    )
    scratch = partials * largest.num_heads * (largest.head_dim + 2) * _FLOAT
    num_wanted = min(num_rows, WANTED[-1])
    logits = 2 * num_wanted * largest.vocab * largest.itemsize  # as computed and filtered
    filtering = min(num_wanted, filters.ROWS) * largest.vocab * filters.ROW_BYTES
    return held + num_rows * largest.row_bytes + scratch + logits + filtering + output_bytes(largest)


def _shapes(bucket: Bucket, largest: LargestPass) -> Iterator[PassShape]:
    for num_partials in _doublings(bucket.num_rows, _most_partials(bucket.num_rows, largest)):
        plan = plan_sizes(bucket.num_rows, num_partials)
        ways = ((False, False), (True, False), (True, True))
        yield from (PassShape(bucket, plan, (), *way) for way in ways)


def graph_bytes(shape: PassShape) -> int:
    """What one graph reads, and its verdicts."""
    num_rows, num_wanted, num_seen = shape.bucket
    numbers = PassLayout(shape, 6 * num_rows + 1 + 3 * num_seen + num_wanted).size
    return (numbers + (len(PassVerdicts._fields) * num_wanted if shape.chooses else 0)) * _NUMBER


def output_bytes(largest: LargestPass) -> int:
    """Where all graphs leave logits and hidden states."""
    return WANTED[-1] * largest.vocab * largest.itemsize + ROWS[-1] * largest.tap_bytes


def _doublings(first: int, most: int) -> Iterator[int]:
    """`first`, doubled until it is at least `most`."""
    yield first
    while first < most:
        first *= 2
        yield first


def _most_partials(num_rows: int, largest: LargestPass) -> int:
    """The most partials of a pass: a row's splits, while there are few enough items, and two more for a tree's row."""
    group = max(largest.num_heads // largest.num_kv_heads, 1)
    tile_rows = max(Cut.of(largest.head_dim, largest.is_int8).tile // group, 1)
    splits = -(-largest.context // SPLIT)
    return max(min(num_rows * splits, MANY_ITEMS * tile_rows), num_rows) + 2 * num_rows
