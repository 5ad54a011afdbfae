"""Which entries a row may see, and the attention over them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.core.proposal import Proposal
from slipstream.kv.pool import KVPool, LayerShape
from slipstream.models import RowGroup
from slipstream.models.attention.across import EncoderPass
from slipstream.models.attention.base import Variant, first_seen
from slipstream.models.attention.cache_adapter import CacheAdapterPass
from slipstream.models.attention.hook import slipstream_attention
from slipstream.models.attention.masks import Masks
from slipstream.models.attention.packed import PackedAttention, attend
from slipstream.models.batch import ForwardBatch
from slipstream.models.rows import tree_rows

CPU = torch.device("cpu")
SLOTS = range(99)


def visible(group: RowGroup, reach: int = 0) -> list[list[int]]:
    """For each row the entries it may see, counted from the sequence's first one."""
    beside = RowGroup(SLOTS, 3, [7, 7], [], [4, 4], [3], [[0, 1], [0, 2]])
    skipped, mask = Masks(ForwardBatch([beside, group, beside]), CPU).of_group(1, reach, 1)
    if mask is None:
        return [list(range(skipped, group.num_entries))] * len(group.token_ids)
    assert mask.shape == (len(group.token_ids), group.num_entries - skipped)
    return [[skipped + entry for entry, seen in enumerate(row) if seen] for row in mask.tolist()]


def test_a_chunk_sees_all_before_it() -> None:
    assert visible(RowGroup(SLOTS[5:], 2, [7, 7, 7], [])) == [[0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4]]


def test_a_single_row_needs_no_mask() -> None:
    masks = Masks(ForwardBatch([RowGroup(SLOTS, 9, [7], [])]), CPU)
    assert masks.of_group(0, 0, 1) == (0, None)
    assert masks.of_group(0, 4, 1) == (6, None)


@pytest.mark.parametrize("num_past", [0, 1, 2, 3, 4, 7])
@pytest.mark.parametrize("num_rows", [1, 2, 5])
@pytest.mark.parametrize("window", [1, 3, 4])
def test_a_window_holds_that_many_entries(num_past: int, num_rows: int, window: int) -> None:
    rows = visible(RowGroup(SLOTS, num_past, [7] * num_rows, []), window)
    for position, seen in enumerate(rows, start=num_past):
        assert seen == list(range(max(position - window + 1, 0), position + 1))


def tree(reach: int) -> list[list[int]]:
    """Past of 4; stored: the root at 4 and two children at 5; now: a child of each, at 6."""
    tail = [[0, 1, 3], [0, 2, 4]]
    group = RowGroup(SLOTS, 4, [7, 7], [], positions=[6, 6], stored_positions=[4, 5, 5], tail_seen=tail)
    return visible(group, reach)


def test_a_tree_row_sees_its_path_only() -> None:
    assert tree(0) == [[0, 1, 2, 3, 4, 5, 7], [0, 1, 2, 3, 4, 6, 8]]


def test_a_window_counts_depth_not_slots() -> None:
    assert tree(4) == [[3, 4, 5, 7], [3, 4, 6, 8]]
    assert tree(2) == [[5, 7], [6, 8]]


def test_a_chunk_of_positions_begins_at_its_multiples() -> None:
    assert tree(-4) == [[4, 5, 7], [4, 6, 8]]
    assert tree(-5) == [[5, 7], [6, 8]]
    assert tree(-6) == [[7], [8]]
    assert tree(-7) == tree(0)
    far = RowGroup(SLOTS, 0, [7] * 3, [], positions=[7, 8, 9], tail_seen=[[0], [0, 1], [0, 1, 2]])
    assert visible(far, -8) == [[0], [1], [1, 2]]


@pytest.mark.parametrize("num_past", [0, 1, 3, 4, 7])
@pytest.mark.parametrize("num_rows", [1, 2, 5])
@pytest.mark.parametrize("chunk", [1, 3, 4])
def test_a_chunk_holds_what_came_since_its_multiple(num_past: int, num_rows: int, chunk: int) -> None:
    rows = visible(RowGroup(SLOTS, num_past, [7] * num_rows, []), -chunk)
    for position, seen in enumerate(rows, start=num_past):
        assert seen == [entry for entry in range(position + 1) if entry // chunk == position // chunk]


@pytest.mark.parametrize("reach", [0, 3, -3])
@pytest.mark.parametrize("num_tokens", [1, 4])
def test_a_tree_may_hang_below_a_chunk(num_tokens: int, reach: int) -> None:
    """Past of 2, a chunk of committed tokens, and below its last one: a node, its sibling, and a child of the first."""
    group = tree_rows(SLOTS, 2, [7] * num_tokens, Proposal((7, 7, 7), (-1, -1, 0)), 0)
    root = 1 + num_tokens
    chunk = [list(range(position + 1)) for position in range(2, root + 1)]
    before = list(range(root + 1))
    nodes = [[*before, root + 1], [*before, root + 2], [*before, root + 1, root + 3]]
    positions = [*range(2, root + 1), root + 1, root + 1, root + 2]
    depth = [*range(root + 1), root + 1, root + 1, root + 2]  # of each entry
    expected = [
        [entry for entry in seen if depth[entry] >= first_seen(position, reach)]
        for seen, position in zip([*chunk, *nodes], positions, strict=True)
    ]
    assert visible(group, reach) == expected


def test_where_rows_and_entries_are() -> None:
    """Two rows behind two past entries and a stored one, or behind three past ones, in slots of either kind."""
    scattered = [8, 2, 5, 1, 7]
    tree: dict[str, Any] = {"positions": [3, 3], "stored_positions": [2], "tail_seen": [[0, 1], [0, 2]]}
    assert ForwardBatch([RowGroup(SLOTS[4:], 3, [7, 7], [])]).slots_on(CPU) == range(7, 9)
    assert ForwardBatch([RowGroup(SLOTS[4:], 2, [7, 7], [], **tree)]).slots_on(CPU) == range(7, 9)
    for group in (RowGroup(scattered, 3, [7, 7], []), RowGroup(scattered, 2, [7, 7], [], **tree)):
        alone, together = ForwardBatch([group]), ForwardBatch([group, RowGroup(SLOTS[10:], 0, [7], [])])
        assert torch.as_tensor(alone.slots_on(CPU)).tolist() == [1, 7]
        assert torch.as_tensor(together.slots_on(CPU)).tolist() == [1, 7, 10]
        assert (list(alone.entry_slots), list(together.entry_slots)) == (scattered, [*scattered, 10])


def test_views_are_made_once_for_all_layers() -> None:
    masks = Masks(ForwardBatch([RowGroup(SLOTS, 0, [7] * 3, [])]), CPU)
    mask = masks.of_group(0, 0, 2)[1]
    assert mask is masks.of_group(0, 0, 2)[1] is masks.of_group(0, -3, 2)[1] is masks.of_group(0, 9, 2)[1]
    assert mask is not None
    assert mask.shape == (6, 3)


def explicit(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, variant: Variant) -> Tensor:
    """Attention of one head at a time, as the definition has it."""
    outputs = []
    for head in range(len(query)):
        shared = head * len(key) // len(query)
        scores = query[head] @ key[shared].T * variant.scaling
        if variant.softcap is not None:
            scores = variant.softcap * torch.tanh(scores / variant.softcap)
        scores = scores.masked_fill(~mask, float("-inf"))
        if variant.sinks is not None:
            scores = torch.cat([scores, variant.sinks[head].expand(len(scores), 1)], dim=1)
        outputs.append(F.softmax(scores, dim=-1)[:, : key.shape[1]] @ value[shared])
    return torch.stack(outputs)


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (4, 1)])
@pytest.mark.parametrize(
    "variant",
    [Variant(0.3), Variant(0.3, softcap=1.5), Variant(0.3, sinks=torch.linspace(-1, 2, 12))],
    ids=["plain", "softcap", "sinks"],
)
def test_attend(heads: tuple[int, int], variant: Variant) -> None:
    num_heads, kv_heads = heads
    if variant.sinks is not None:
        variant = Variant(variant.scaling, sinks=variant.sinks[:num_heads])
    query, key, value = torch.randn(num_heads, 3, 8), torch.randn(kv_heads, 5, 8), torch.randn(kv_heads, 5, 4)
    mask = torch.ones(3, 5, dtype=torch.bool).tril(2)
    ours = attend(query, key, value, mask.repeat(num_heads // kv_heads, 1), variant)
    torch.testing.assert_close(ours, explicit(query, key, value, mask, variant))


def test_keys_and_values_are_not_copied_for_a_single_row(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = KVPool([LayerShape(2, 8, 8)], 16, torch.float32, CPU)
    seen: list[tuple[Tensor, Tensor]] = []
    kernel = F.scaled_dot_product_attention

    def spy(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        seen.append((key, value))
        return kernel(query, key, value, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    rows = ForwardBatch([RowGroup(pool.slots[3:], 6, [7], []), RowGroup(pool.slots[12:], 0, [7], [])])
    attention = PackedAttention(rows, pool)
    entry = torch.randn(1, 2, 2, 8)
    output = attention.attend(0, torch.randn(1, 4, 2, 8), entry, entry, Variant(1.0))
    assert output.shape == (1, 2, 4, 8)
    for (key, value), slot in zip(seen, [3, 12], strict=True):
        assert key.data_ptr() == pool.keys[0][:, slot].data_ptr()
        assert value.data_ptr() == pool.values[0][:, slot].data_ptr()
    torch.testing.assert_close(pool.keys[0][:, 9], entry[0, :, 0])
    torch.testing.assert_close(pool.values[0][:, 12], entry[0, :, 1])


@pytest.mark.parametrize("slots", [range(9), [8, 2, 5, 1, 7, 0, 3]], ids=["contiguous", "scattered"])
def test_layers_of_one_pass_may_have_different_windows(slots: Any) -> None:
    pool = KVPool([LayerShape(1, 4, 4)] * 3, 9, torch.float32, CPU)
    for tensor in pool.tensors:
        tensor.normal_()
    attention = PackedAttention(ForwardBatch([RowGroup(slots, 6, [7], [])]), pool)
    query, entry = torch.randn(1, 1, 1, 4), torch.randn(1, 1, 1, 4)
    for layer, window in enumerate([3, None, 5]):
        output = attention.attend(layer, query, entry, entry, Variant(0.5, window))
        seen = torch.tensor([slots[i] for i in range(7 - (window or 7), 7)])
        keys, values = (pool.keys[layer][0, seen], pool.values[layer][0, seen])
        expected = torch.softmax(query[0, 0] @ keys.T * 0.5, dim=-1) @ values
        torch.testing.assert_close(output[0, 0], expected)


def test_the_packed_mask_keeps_sequences_apart() -> None:
    pool = KVPool([LayerShape(1, 4, 4)], 16, torch.float32, CPU)
    rows = ForwardBatch([RowGroup(pool.slots, 1, [7, 7], []), RowGroup(pool.slots[8:], 2, [7], [])])
    mask = CacheAdapterPass(rows, pool, share=1).arguments()["attention_mask"]
    assert mask.int().tolist() == [[[[1, 1, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 1]]]]


def test_copies_of_a_key_head_are_stored_once() -> None:
    pool = KVPool([LayerShape(2, 4, 4)], 8, torch.float32, CPU)
    rows = ForwardBatch([RowGroup(pool.slots, 0, [7, 7], [])])
    cache = CacheAdapterPass(rows, pool, share=3).arguments()["past_key_values"]
    heads = torch.randn(1, 2, 2, 4).repeat_interleave(3, dim=1)
    keys, values = cache.update(heads, heads, 0)
    torch.testing.assert_close(keys, heads)
    torch.testing.assert_close(values, heads)


def no_bias(distance: Tensor) -> Tensor:
    return torch.zeros(1, *distance.shape)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"position_bias": torch.zeros(1)}, "position_bias"),
        ({"dropout": 0.1}, "dropout"),
        ({"attention_mask": torch.ones(1, 1, 1, 1)}, "mask on their own"),
        ({"slipstream_pass": None}, "does not pass the arguments"),
        ({"position_bias": no_bias, "sliding_window": 3}, "cannot be combined"),
        ({"position_bias": no_bias, "indices": [None]}, "cannot be combined"),
        ({"sliding_window": 3, "indices": [None]}, "cannot be combined"),
        ({"sliding_window": 3, "slipstream_pass": EncoderPass()}, "has a window, a cap or sinks"),
        ({"softcap": 9.0, "slipstream_pass": EncoderPass()}, "has a window, a cap or sinks"),
    ],
)
def test_what_the_hook_cannot_do_is_refused(options: dict[str, Any], message: str) -> None:
    module = torch.nn.Module()
    module.layer_idx = 0  # type: ignore[assignment]
    pool = KVPool([LayerShape(1, 4, 4)], 8, torch.float32, CPU)
    rows = torch.randn(1, 1, 1, 4)
    arguments: dict[str, Any] = {
        "attention_mask": None,
        "slipstream_pass": PackedAttention(ForwardBatch([RowGroup(pool.slots, 0, [7], [])]), pool),
        **options,
    }
    with pytest.raises(ValueError, match=message):
        slipstream_attention(module, rows, rows, rows, **arguments)
