"""Random block heads for the embedded target, and a drafter that has one."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch

from slipstream.draft.base import DraftContext
from slipstream.draft.heads.block_executor import block_executor
from slipstream.draft.heads.dflash_files import save_dflash
from slipstream.draft.heads.dflash_head import DFlashConfig, DFlashHead
from slipstream.draft.heads.left_to_right import LeftToRightConfig
from slipstream.draft.proposers.block import BlockDrafter
from slipstream.draft.proposers.parallel import HeadOptions, target_of
from tests.kit.folders import kept_folder

VOCAB, HIDDEN, BLOCK = 4096, 320, 5
LAYOUTS: dict[str, dict[str, Any]] = {
    "mask": {},
    "anchor": {"from_anchor": True},
    "causal": {"causal": (True, True)},
    "mixed": {"causal": (True, False), "windows": (6, None), "from_anchor": True},
    "dflash2": {"convolution_taps": 2, "left_to_right": LeftToRightConfig(kind="selector", rank=8, top_k=6)},
    "markov": {"left_to_right": LeftToRightConfig(kind="gated", rank=8), "confidence": "hidden+token"},
    "rnn": {"from_anchor": True, "left_to_right": LeftToRightConfig(kind="rnn", rank=8)},
    "gru": {"causal": (True, True), "left_to_right": LeftToRightConfig(kind="gru", rank=8, state_size=12)},
    "refiner": {"causal": (True, True), "left_to_right": LeftToRightConfig(kind="refiner", rank=8)},
    "pruned": {"draft_vocab_size": 700, "confidence": "hidden"},
}
"""Flags of a configuration."""


def random_block_head(**flags: Any) -> DFlashHead:
    """A small head that reads two layers of the embedded target, with random weights; seeded."""
    given: dict[str, Any] = {
        "causal": (False, False),
        "windows": (None, None),
        "draft_vocab_size": VOCAB,
    } | flags
    config = DFlashConfig(
        hidden_size=HIDDEN,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        target_hidden_size=HIDDEN,
        vocab_size=VOCAB,
        intermediate_size=128,
        num_layers=2,
        feature_layers=(2, 5),
        block_size=BLOCK,
        mask_token_id=5,
        max_position_embeddings=512,
        **given,
    )
    torch.manual_seed(0)  # of the biases
    head = DFlashHead(config)
    generator = torch.Generator().manual_seed(0)
    if config.draft_vocab_size < VOCAB:
        head.draft_token_ids = (
            torch.randperm(VOCAB, generator=generator)[: config.draft_vocab_size].sort().values
        )
        head.lm_head = torch.nn.Linear(HIDDEN, config.draft_vocab_size, bias=False)
    for parameter in head.parameters():
        if parameter.ndim > 1:
            parameter.data = (
                torch.randn(parameter.shape, generator=generator) * 1.5 * parameter.shape[-1] ** -0.5
            )
    return head.eval().requires_grad_(False)


@functools.cache
def block_head(layout: str) -> str:
    """A folder with a head of one of `LAYOUTS`."""
    folder = kept_folder()
    save_dflash(random_block_head(**LAYOUTS[layout]), folder, target="embedded")
    return str(folder)


@dataclass(frozen=True, kw_only=True)
class RandomBlockOptions(HeadOptions):
    """`model` is one of `LAYOUTS`."""

    num_speculative_tokens: int = 4


class RandomBlockDrafter(BlockDrafter):
    """Drafts with a random head."""

    Options = RandomBlockOptions

    def __init__(self, options: RandomBlockOptions, context: DraftContext) -> None:
        target, head = target_of(options, context), random_block_head(**LAYOUTS[options.model])
        config = head.config
        self.executor = block_executor(head, target, options.quantization)
        super().__init__(options, context, config=config, like=target)
        self.traits = replace(self.traits, feature_layers=config.feature_layers)
