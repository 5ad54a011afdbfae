"""Small random DFlash heads, and plain attention for their blocks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slipstream.draft.heads.dflash_head import DFlashConfig, DFlashHead
from slipstream.draft.heads.head_config import Attend

HIDDEN, VOCAB, BLOCK = 24, 50, 5


def random_head(seed: int = 0, **options: Any) -> DFlashHead:
    torch.manual_seed(seed)
    flags = {"causal": (False, False), "windows": (None, None), "draft_vocab_size": VOCAB} | options
    if flags.get("convolution_taps"):
        flags["convolution_group"] = 8
    head = DFlashHead(
        DFlashConfig(
            hidden_size=HIDDEN,
            target_hidden_size=16,
            vocab_size=VOCAB,
            intermediate_size=40,
            num_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            feature_layers=(1, 3),
            block_size=BLOCK,
            mask_token_id=VOCAB - 1,
            **flags,
        )
    )
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return head.eval().requires_grad_(False)


def attend_over(head: DFlashHead, features: Tensor) -> Attend:
    """Plain attention of blocks at position `len(features)` over the text before it, by the head's own flags."""
    n = len(features)
    entries = head.context_entries(head.encode(features[None]), torch.arange(n)[None])

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        blocks, _, rows, _ = query.shape
        keys, values = (
            torch.cat([held.expand(blocks, -1, -1, -1), own], dim=2)
            for held, own in zip(entries[layer], (key, value), strict=True)
        )
        seen = torch.ones(rows, n + rows, dtype=torch.bool)
        if head.config.causal[layer]:
            seen = seen.tril(n)
        if (window := head.config.windows[layer]) is not None:
            seen[:, : max(0, n - window)] = False
        out = torch.nn.functional.scaled_dot_product_attention(
            query, keys, values, attn_mask=seen, enable_gqa=True
        )
        return out.transpose(1, 2)

    return attend
