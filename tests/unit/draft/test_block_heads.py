"""Executors of block heads: the module's own numbers, in PyTorch's operators and in the CPU kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from slipstream.draft.heads.block_executor import BlockExecutor, EagerBlocks, block_executor
from slipstream.draft.heads.block_native import NativeBlocks
from slipstream.draft.heads.dflash_head import DFlashConfig, DFlashHead
from slipstream.draft.heads.left_to_right import LeftToRightConfig
from slipstream.draft.proposers.block import entry_shapes
from slipstream.kv.pool import KVPool
from slipstream.models import CausalLM, RowGroup, load_model
from slipstream.models.batch import ForwardBatch
from tests.kit.dflash_heads import attend_over
from tests.kit.small_llama import sizes

VOCAB, HIDDEN, LAYERS, BLOCK, MASK = 1003, 72, 3, 5, 11
HEADS: dict[str, dict[str, Any]] = {
    "mask": {},
    "anchor": {"from_anchor": True, "attention_bias": True},
    "causal": {"causal": (True, True)},
    "window": {"windows": (7, 7)},
    "causal window": {"causal": (True, True), "windows": (7, 7)},
    "mixed": {"causal": (True, False), "windows": (7, None)},
    "convolutions": {"convolution_taps": 2, "convolution_group": 8},
    "scaled": {"embedding_scale": 0.5, "logit_scale": 2.0, "logit_softcap": 3.0},
    "pruned": {"draft_vocab_size": 205},
    "own table": {"own_table": True, "from_anchor": True},
    "markov": {"left_to_right": LeftToRightConfig(kind="vanilla", rank=8), "confidence": "hidden+token"},
}
IN_PYTORCH = {"mixed", "convolutions", "scaled"}
"""Those that the kernels do not compute."""
TEXTS = [
    [(17 * i * i + 5 * i + 3 * seed) % VOCAB for i in range(length)] for seed, length in enumerate((9, 24, 2))
]
"""The last token of each is the anchor."""
SLOTS = [range(first, first + 40) for first in (50, 0, 100)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of awkward shape, whose embedding is its output layer."""
    torch.manual_seed(0)
    shape = sizes(HIDDEN, LAYERS, 6, 2, vocab=VOCAB, inner=101, head_dim=24, spread=0.2, tied=True)
    path = tmp_path_factory.mktemp("target")
    LlamaForCausalLM(LlamaConfig(**shape)).save_pretrained(path)
    return path


@pytest.fixture(scope="module", params=["native", "torch"])
def lm(request: pytest.FixtureRequest, folder: Path) -> CausalLM:
    return load_model(str(folder), cpu_kernels=request.param)


def new_head(own_table: bool = False, **options: Any) -> DFlashHead:
    torch.manual_seed(1)
    given: dict[str, Any] = {
        "causal": (False, False),
        "windows": (None, None),
        "draft_vocab_size": VOCAB,
    } | options
    config = DFlashConfig(
        hidden_size=HIDDEN,
        target_hidden_size=HIDDEN,
        vocab_size=VOCAB,
        intermediate_size=53,
        num_layers=2,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=24,
        feature_layers=(1, 3),
        block_size=BLOCK,
        mask_token_id=MASK,
        **given,
    )
    head = DFlashHead(config)
    if config.draft_vocab_size < VOCAB:
        head.draft_token_ids = torch.randperm(VOCAB)[: config.draft_vocab_size].sort().values
        head.lm_head = torch.nn.Linear(HIDDEN, config.draft_vocab_size, bias=False)
    if own_table:
        head.embedding = torch.randn(VOCAB, HIDDEN)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return head.eval().requires_grad_(False)


def features_of(number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(len(TEXTS[number]) - 1, 2 * HIDDEN, generator=generator)


def new_pool(config: DFlashConfig, held: torch.dtype = torch.float32) -> KVPool:
    """Entries that were not written are NaN, so that reading one shows."""
    pool = KVPool(entry_shapes(config), 150, torch.float32, torch.device("cpu"), cache_dtype=held)
    pool.fill(float("nan"))
    return pool


def drafted(executor: BlockExecutor, pool: KVPool, numbers: list[int]) -> tuple[Tensor, Tensor]:
    """States and logits of a block behind each of these texts, whose entries are written first, in two parts."""
    config = executor.config
    for low, high in ((0, 1), (1, 40)):
        parts = [(SLOTS[n], TEXTS[n][:-1][low:high], features_of(n)[low:high]) for n in numbers]
        if not (parts := [part for part in parts if part[1]]):
            continue
        rows = ForwardBatch([RowGroup(slots, low, token_ids, []) for slots, token_ids, _ in parts])
        executor.store(rows, pool, torch.cat([features for *_, features in parts]))
    wanted = range(config.first_slot, BLOCK)
    blocks = [
        RowGroup(SLOTS[n], len(TEXTS[n]) - 1, [TEXTS[n][-1], *[MASK] * (BLOCK - 1)], wanted) for n in numbers
    ]
    return executor.forward(blocks, pool)


def expected(head: DFlashHead, lm: CausalLM, number: int) -> tuple[Tensor, Tensor]:
    """The same by the module alone, from the whole text."""
    text, features = TEXTS[number], features_of(number)
    token_ids = torch.tensor([[text[-1], *[MASK] * (BLOCK - 1)]])
    embeds = lm.embed(token_ids) if head.embedding is None else head.embedding[token_ids]
    positions = torch.arange(len(text) - 1, len(text) - 1 + BLOCK)[None]
    states = head(embeds, positions, attend_over(head, features))
    return states, head.logits(states[:, head.config.first_slot :], lm.project)


@torch.inference_mode()
@pytest.mark.parametrize("kind", HEADS)
def test_a_block_is_the_modules(kind: str, lm: CausalLM) -> None:
    executor = block_executor(new_head(**HEADS[kind]), lm, None)
    native = lm.is_native and kind not in IN_PYTORCH
    assert isinstance(executor, NativeBlocks if native else EagerBlocks)
    states, logits = drafted(executor, new_pool(executor.config), [0, 1, 2])
    for number in range(3):
        for ours, theirs in zip((states, logits), expected(new_head(**HEADS[kind]), lm, number), strict=True):
            torch.testing.assert_close(ours[number], theirs[0], atol=1e-4 * float(theirs.std()), rtol=0)


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("kind", [kind for kind in HEADS if kind not in IN_PYTORCH])
def test_neighbours_change_no_bit_in_the_kernels(kind: str, quantization: str | None, folder: Path) -> None:
    lm = load_model(str(folder), cpu_kernels="native")
    executor = block_executor(new_head(**HEADS[kind]), lm, quantization)
    together = drafted(executor, new_pool(executor.config), [0, 1, 2])
    for number in range(3):
        alone = drafted(executor, new_pool(executor.config), [number])
        for ours, theirs in zip(alone, together, strict=True):
            assert torch.equal(ours[0], theirs[number])


def test_int8_is_close(folder: Path) -> None:
    lm = load_model(str(folder), cpu_kernels="native")
    exact, rounded = (
        drafted(block_executor(new_head(), lm, quantization), new_pool(new_head().config), [0, 1, 2])[1]
        for quantization in (None, "int8")
    )
    assert 0 < float((rounded - exact).abs().max()) < 0.1 * float(exact.std())


@torch.inference_mode()
@pytest.mark.parametrize("held", [torch.bfloat16, torch.int8])
def test_entries_may_be_held_in_fewer_bits(held: torch.dtype, lm: CausalLM) -> None:
    exact, rounded = (
        drafted(block_executor(new_head(), lm, None), new_pool(new_head().config, dtype), [0, 1, 2])[1]
        for dtype in (torch.float32, held)
    )
    assert 0 < float((rounded - exact).abs().max()) < 0.1 * float(exact.std())


@torch.inference_mode()
def test_tokens_that_the_head_does_not_know_cannot_be_drafted(lm: CausalLM) -> None:
    head = new_head(**HEADS["pruned"])
    known = head.draft_token_ids.clone()
    executor = block_executor(head, lm, None)
    _, logits = drafted(executor, new_pool(executor.config), [1])
    full = executor.spread(logits)
    assert full.shape == (1, BLOCK - 1, VOCAB)
    assert torch.equal(full[..., known], logits)
    assert set((full[0, 0] > float("-inf")).nonzero()[:, 0].tolist()) == set(known.tolist())


def test_what_is_held_is_counted(lm: CausalLM) -> None:
    plain, corrected = (
        block_executor(new_head(**HEADS[kind]), lm, None).footprint() for kind in ("mask", "markov")
    )
    assert corrected - plain >= 4 * 2 * VOCAB * 8  # the Markov head's two tables
    own = block_executor(new_head(**HEADS["own table"]), lm, None).footprint()
    assert own - plain >= 4 * VOCAB * HIDDEN
