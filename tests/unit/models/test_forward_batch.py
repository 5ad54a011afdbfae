"""The arrays of a pass, against what each row by itself is said to see."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from slipstream.core.proposal import Proposal
from slipstream.kv.slots import SharedPrefix, SlotMap
from slipstream.models.batch import Bucket, ForwardBatch
from slipstream.models.rows import RowGroup, tree_rows

CPU = torch.device("cpu")


def some_group(rng: random.Random) -> RowGroup:
    """A chain, a text with a tree below it, or a second level of a tree; its slots consecutive or not."""
    begin, past = rng.randrange(1000), rng.randrange(300)
    slots: SlotMap = range(begin, begin + 400) if rng.random() < 0.7 else rng.sample(range(2000), 400)
    shared = SharedPrefix(rng.randrange(2), rng.randrange(1, 50)) if rng.random() < 0.3 else None
    kind = rng.choice(("chain", "tree", "level"))
    if kind == "level":
        positions, stored = [past + 3, past + 3], [past, past + 1, past + 2]
        seen = [[0, 1, 3], [0, 2, 4]]
        return RowGroup(slots, past, [5, 6], [0, 1], positions, stored, seen, shared=shared)
    tokens = [rng.randrange(999) for _ in range(rng.randrange(1, 9))]
    size = rng.randrange(1, 14) if kind == "tree" else 0
    parents = tuple(rng.randrange(-1, node) if node else -1 for node in range(size))
    fast = rng.choice((0, past + 1))
    return tree_rows(
        slots, past, tokens, Proposal(tuple(range(size)), parents), rng.randrange(len(tokens)), fast, shared
    )


def seen_by(group: RowGroup, row: int) -> list[int]:
    """The entries of its sequence that a row sees."""
    if group.tail_seen is None or row < group.num_chain:
        return list(range(group.num_before + row + 1))
    run = group.num_past + group.num_chain
    return [*range(run), *(run + entry for entry in group.tail_seen[row - group.num_chain])]


@pytest.mark.parametrize("seed", range(40))
def test_the_arrays_say_what_each_row_is_and_sees(seed: int) -> None:
    rng = random.Random(seed)
    groups = [some_group(rng) for _ in range(rng.randrange(1, 9))]
    batch = ForwardBatch(groups)
    on, row = batch.on(CPU), 0
    wanted: list[int] = []
    for group in groups:
        wanted += [row + each for each in group.logit_rows]
        for own, position in enumerate(group.row_positions()):
            begin, end = batch.tail_begin[row : row + 2]
            run = int(on.run_length[row])
            tail = on.tail_entries[begin:end].tolist()
            assert int(on.token_ids[row]) == group.token_ids[own]
            assert int(on.positions[row]) == position
            assert int(on.slots[row]) == group.slots[group.num_before + own]
            assert int(on.run_begin[row]) == group.slots[0]
            assert [*range(run), *tail] == seen_by(group, own)
            assert on.tail_slots[begin:end].tolist() == [group.slots[entry] for entry in tail]
            at = [*range(group.num_past + group.num_chain), *group.stored_positions]
            at += list(group.row_positions())[group.num_chain :]
            assert on.tail_positions[begin:end].tolist() == [at[entry] for entry in tail]
            assert (row in batch.fast_rows) == (own < group.num_fast)
            row += 1
    assert (batch.num_rows, on.logit_rows.tolist()) == (row, wanted)
    assert batch.contiguous == all(isinstance(group.slots, range) for group in groups)
    begins = np.array(batch.addresses()) - batch.addresses()[0]
    assert [int(begin) for begin in begins] == [8 * part.storage_offset() for part in on]


def test_a_bucket_has_one_size_for_many_passes() -> None:
    rng = random.Random(1)
    bucket, scratch = Bucket(128, 128, 512), range(3000, 3128)
    static = None
    for _ in range(5):
        groups = [some_group(rng) for _ in range(3)]
        plain, padded = ForwardBatch(groups), ForwardBatch(groups, bucket, scratch)
        numbers = torch.from_numpy(padded.buffer)
        static = torch.empty_like(numbers) if static is None else static
        static.copy_(numbers)  # a recorded pass reads this one
        recorded, own = padded.views(static), plain.on(CPU)
        assert recorded.token_ids.shape == recorded.slots.shape == (128,)
        assert recorded.logit_rows.shape == (128,)
        assert recorded.tail_entries.shape == (512,)
        for name in (
            "token_ids",
            "positions",
            "slots",
            "run_begin",
            "run_length",
            "tail_slots",
            "logit_rows",
        ):
            part = getattr(own, name)
            assert torch.equal(getattr(recorded, name)[: len(part)], part)
        assert set(recorded.slots[plain.num_rows :].tolist()) <= set(scratch)
        logits = torch.arange(128)[:, None]
        for real, filled in zip(
            plain.by_group(logits[: plain.num_logit_rows]), padded.by_group(logits), strict=False
        ):
            assert torch.equal(real, filled)
    assert static is not None


@pytest.mark.parametrize("bucket", [Bucket(2, 9, 9), Bucket(9, 2, 9)])
def test_what_does_not_fit_a_bucket_is_refused(bucket: Bucket) -> None:
    with pytest.raises(ValueError, match=r"bucket of 2|do not fit"):
        ForwardBatch([RowGroup(range(9), 0, [1, 2, 3], range(3))], bucket, range(20, 40))


def test_a_group_without_rows_changes_nothing_for_the_others() -> None:
    one, none = RowGroup(range(9), 3, [7], [0]), RowGroup(range(20, 29), 4, [], [])
    alone, both = ForwardBatch([one]).on(CPU), ForwardBatch([none, one]).on(CPU)
    assert all(torch.equal(*pair) for pair in zip(alone, both, strict=True))
