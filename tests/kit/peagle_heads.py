"""P-EAGLE heads for the embedded target."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch

from slipstream.assets import EMBEDDED_EAGLE3
from slipstream.draft.heads.eagle_files import read_eagle, save_eagle
from slipstream.draft.heads.eagle_head import EagleConfig, EagleHead, default_feature_layers
from tests.kit.folders import kept_folder
from tests.kit.head_drafters import target

MASK = 7


def random_peagle(num_layers: int = 2, **options: Any) -> EagleHead:
    """A head that drafts at random."""
    torch.manual_seed(0)
    config = EagleConfig(
        version=3,
        hidden_size=320,
        target_hidden_size=320,
        vocab_size=4096,
        draft_vocab_size=options.pop("draft_vocab_size", 4096),
        intermediate_size=200,
        num_attention_heads=5,
        num_key_value_heads=5,
        head_dim=64,
        feature_layers=default_feature_layers(6),
        num_layers=num_layers,
        **{"mask_token_id": MASK, **options},
    )
    head = EagleHead(config)
    for parameter in head.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.08)
    if config.draft_vocab_size < config.vocab_size:
        head.draft_token_ids = torch.randperm(4096)[: config.draft_vocab_size].sort().values
    return head.eval().requires_grad_(False)


@functools.cache
def masked_eagle3(num_layers: int = 1) -> str:
    """The embedded EAGLE-3 head with masks, which it was not trained to read: its first draft token is as good as ever.
    Layers after the first change nothing."""
    given = read_eagle(EMBEDDED_EAGLE3, target())
    head = EagleHead(dataclasses.replace(given.config, mask_token_id=MASK, num_layers=num_layers))
    torch.manual_seed(0)
    for name, parameter in head.named_parameters():
        torch.nn.init.normal_(parameter, std=0.05)
        if name.startswith("upper.") and ("o_proj" in name or "down_proj" in name):
            torch.nn.init.zeros_(parameter)
    head.load_state_dict(given.state_dict(), strict=False)
    folder = kept_folder()
    save_eagle(head, folder, target="embedded", layout="speculators")
    return str(folder)


@functools.cache
def peagle_folder(layout: str = "speculators") -> str:
    """A folder with such a head."""
    folder = kept_folder()
    save_eagle(random_peagle(draft_vocab_size=700), folder, target="embedded", layout=layout)
    return str(folder)
