"""Logits over one text, by Transformers and by the layers that were read, and how far two of them differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from slipstream.models import RowGroup


def eager_logits(model: Any, token_ids: Sequence[int]) -> Tensor:
    """[tokens, vocab]: of a Transformers model, without a cache."""
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        found: Tensor = model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0]
    return found


def cached_logits(lm: Any, token_ids: Sequence[int], parts: int = 1, layers: Any = None) -> Tensor:
    """[tokens, vocab]: of a `CausalLM`, in so many passes over a cache of its own."""
    pool, slots = lm.trial_cache(len(token_ids))
    length, found = -(-len(token_ids) // parts), []
    for begin in range(0, len(token_ids), length):
        ids = token_ids[begin : begin + length]
        group = RowGroup(slots, begin, ids, range(len(ids)), owner=0)
        found.append(lm.forward([group], pool, layers=layers).logits.clone())
    return torch.cat(found)


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    """The median error of a row's logits, over their spread."""
    spread = (theirs - theirs.mean(-1, keepdim=True)).norm(dim=-1)
    return float(((ours - theirs).norm(dim=-1) / spread).median())
