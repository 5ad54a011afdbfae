"""Sequences that begin with copies of the same entries: one of them is read for all, and no bit changes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig

from slipstream import LLM, SamplingParams
from slipstream.core.proposal import Proposal
from slipstream.kv.pool import KVPool
from slipstream.kv.segments import SegmentAccounting
from slipstream.kv.slots import SharedPrefix
from slipstream.models import CausalLM, RowGroup, load_model
from slipstream.models.batch import ForwardBatch, side_by_side
from slipstream.models.rows import tree_rows
from tests.kit.marks import needs_kernels

PARTITION = 256
"""Entries of a partition of the kernels' attention: what is shared is read once by whole partitions."""
NUM_SHARED = 2 * PARTITION + 30
NUM_SEQUENCES = 3
ROOM = 700
SHARED_TEXT = [(17 * i * i + 5 * i + 3) % 96 for i in range(NUM_SHARED)]
ENDS = [[(7 * i + 11 * which) % 96 for i in range(40)] for which in range(NUM_SEQUENCES)]
WINDOW = 300
"""Shorter than the text, and beginning inside of what is shared."""


@pytest.fixture(scope="module", params=["plain", "window"])
def lm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    torch.manual_seed(0)
    shape = {
        "vocab_size": 97, "hidden_size": 72, "intermediate_size": 101, "num_hidden_layers": 2,
        "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 24, "initializer_range": 0.2,
    }  # fmt: skip
    config = (
        LlamaConfig(**shape) if request.param == "plain" else MistralConfig(**shape, sliding_window=WINDOW)
    )
    folder: Path = tmp_path_factory.mktemp(request.param)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return load_model(str(folder), cpu_kernels="native")


def filled(lm: CausalLM, cache: str) -> KVPool:
    """The sequences one behind the other in a pool: what they share was copied from the first one."""
    pool = KVPool(lm.shapes, NUM_SEQUENCES * ROOM, lm.dtype, lm.device, cache_dtype=getattr(torch, cache))
    pool.fill(math.nan)
    lm.forward([RowGroup(slots_of(0), 0, SHARED_TEXT, [])], pool)
    for which in range(1, NUM_SEQUENCES):
        pool.move(0, which * ROOM, NUM_SHARED)
    return pool


def slots_of(which: int) -> range:
    return range(which * ROOM, (which + 1) * ROOM)


def passes(lm: CausalLM, pool: KVPool, shared: Sequence[SharedPrefix | None]) -> list[Tensor]:
    """Logits of two passes: chunks of several lengths, then a row, a tree and a chain.

    No more rows than go through entries together, else some sequence is read for itself.
    """
    lengths = [9, 1, 8]
    chunks = [
        RowGroup(slots_of(i), NUM_SHARED, ENDS[i][:n], range(n), shared=shared[i])
        for i, n in enumerate(lengths)
    ]
    first = lm.forward(chunks, pool).logits
    proposals = [Proposal((), ()), Proposal((3, 4, 5, 6), (-1, -1, 0, 1)), Proposal((9, 8), (-1, 0))]
    trees = [
        tree_rows(slots_of(i), NUM_SHARED + n, [ENDS[i][n]], proposals[i], 0, shared=shared[i])
        for i, n in enumerate(lengths)
    ]
    return [first, lm.forward(trees, pool).logits]


@needs_kernels
@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("cache", ["float32", "bfloat16", "int8"])
def test_what_is_shared_is_read_from_one_and_gives_the_same_bits(
    lm: CausalLM, cache: str, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one thread a tile is done at once, with several its partitions are cut."""
    monkeypatch.setattr(lm, "num_threads", num_threads)
    alone = passes(lm, filled(lm, cache), [None] * NUM_SEQUENCES)
    pool = filled(lm, cache)
    for which in (1, 2):  # a partition that is still read here shows
        for tensor in pool.tensors:
            if tensor.dtype != torch.int8:
                tensor[which * ROOM : which * ROOM + 2 * PARTITION] = math.nan
    shared = [SharedPrefix(1, NUM_SHARED), SharedPrefix(1, NUM_SHARED), SharedPrefix(1, 2 * PARTITION)]
    for ours, expected in zip(passes(lm, pool, shared), alone, strict=True):
        assert expected.isfinite().all()
        assert torch.equal(ours, expected)


@needs_kernels
@pytest.mark.parametrize(
    ("shared", "own_from"),
    [
        ([SharedPrefix(1, NUM_SHARED), SharedPrefix(2, NUM_SHARED), SharedPrefix(2, NUM_SHARED)], [0, 0]),
        ([SharedPrefix(1, NUM_SHARED), None, SharedPrefix(1, NUM_SHARED)], [0, NUM_SHARED]),
        (
            [SharedPrefix(1, NUM_SHARED), SharedPrefix(1, PARTITION - 1), SharedPrefix(1, PARTITION)],
            [PARTITION - 1, PARTITION],
        ),
    ],
    ids=["families", "one of its own", "less than a partition"],
)
def test_nothing_else_is_read_from_another(
    lm: CausalLM, shared: list[SharedPrefix | None], own_from: list[int]
) -> None:
    """The second and the third sequence have entries of their own from some place on, so who reads on shows."""

    def pool() -> KVPool:
        made = filled(lm, "float32")
        for which, first in zip((1, 2), own_from, strict=True):
            for tensor in made.tensors:
                tensor[which * ROOM + first : which * ROOM + NUM_SHARED] *= 1.5
        return made

    alone = passes(lm, pool(), [None] * NUM_SEQUENCES)
    for ours, expected in zip(passes(lm, pool(), shared), alone, strict=True):
        assert torch.equal(ours, expected)


def group(start: int, num_past: int, shared: SharedPrefix | None, num_rows: int = 1) -> RowGroup:
    return RowGroup(range(start, start + 100), num_past, [5] * num_rows, [], shared=shared)


def test_rows_name_the_first_holder_and_what_both_have_of_it() -> None:
    groups = [
        group(0, 60, None),
        group(100, 50, SharedPrefix(7, 40)),
        group(200, 30, SharedPrefix(7, 45), num_rows=2),
        group(300, 60, SharedPrefix(8, 60)),
    ]
    rows = ForwardBatch(groups)
    assert rows.shares
    found = rows.on(torch.device("cpu"))
    assert found.shared_begin.tolist() == [0, 100, 100, 100, 300]
    assert found.shared_length.tolist() == [0, 40, 30, 30, 60]
    lone = ForwardBatch([groups[0], groups[1], groups[3]])
    assert not lone.shares
    assert lone.on(torch.device("cpu")).shared_begin.tolist() == []


def test_those_that_share_become_neighbours_and_the_order_stays_otherwise() -> None:
    one, other = SharedPrefix(1, 9), SharedPrefix(2, 9)
    groups = [group(0, 9, s) for s in (one, None, other, one, None, other, one)]
    assert side_by_side(groups) == [0, 3, 6, 1, 2, 5, 4]
    assert side_by_side(groups[1:3]) == [0, 1]


def test_copies_of_copies_are_one_family_and_a_much_longer_common_part_makes_a_new_one() -> None:
    accounting = SegmentAccounting(4096, lambda source, destination, count: None)
    text = list(range(400))

    def begin(owner: int, token_ids: list[int]) -> None:
        num_valid = accounting.open(owner, token_ids)
        assert num_valid is not None
        accounting.commit(owner, token_ids[num_valid:])

    begin(0, text)
    assert accounting.shared(0) is None
    begin(1, [*text[:300], 1000])
    begin(2, [*text[:200], 1001])
    first, second, third = (accounting.shared(owner) for owner in range(3))
    assert first is not None
    assert second is not None
    assert third is not None
    assert first.family == second.family == third.family
    assert (first.length, second.length, third.length) == (300, 300, 200)
    begin(3, [*text[:200], 1001, *range(2000, 2500)])
    begin(4, [*text[:200], 1001, *range(2000, 2400)])
    fourth, fifth = accounting.shared(3), accounting.shared(4)
    assert fourth is not None
    assert fifth is not None
    assert fourth.family == fifth.family != first.family
    accounting.truncate(1, 120)
    assert accounting.shared(1) == SharedPrefix(first.family, 120)


@needs_kernels
def test_samples_of_one_long_prompt_share_it_in_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[ForwardBatch] = []
    made = ForwardBatch.__init__

    def spy(self: ForwardBatch, groups: Sequence[RowGroup]) -> None:
        made(self, groups)
        seen.append(self)

    monkeypatch.setattr(ForwardBatch, "__init__", spy)
    prompt = [2, *[(13 * i) % 900 + 50 for i in range(PARTITION + 20)]]
    params = SamplingParams(n=3, temperature=0.9, seed=5, max_tokens=8, ignore_eos=True)
    llm = LLM(speculative_config={"method": "token_recycling"}, max_model_len=512)
    [output] = llm.generate([prompt], params, use_tqdm=False)
    sharing = [rows for rows in seen if rows.shares]
    assert sharing
    lengths = sharing[-1].on(torch.device("cpu")).shared_length
    assert int(lengths.min()) >= PARTITION
    lone = LLM(speculative_config={"method": "off"}, max_model_len=512, enable_prefix_caching=False)
    [expected] = lone.generate([prompt], params, use_tqdm=False)
    assert [one.token_ids for one in output.outputs] == [one.token_ids for one in expected.outputs]
