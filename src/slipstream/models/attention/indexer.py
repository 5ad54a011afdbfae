"""Sparse attention by an indexer: a row attends to the entries that score best for it, DeepSeek V3.2's form.

Beside its keys a layer keeps a short *index key* of each token (DeepSeek-AI, "DeepSeek-V3.2", 2025, section 2.1). Its
indexer scores all entries that a row may see, and the row attends to the best `index_topk` of them: to all, as long as
there are no more. Of equal scores that of the earlier entry is better, so that a choice depends on the text alone;
where PyTorch chooses, it depends on what else is scored.

The indexer is Transformers' own. It is called once for each sequence of a pass, with the index keys of our cache and a
mask of what each row may see.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from slipstream.models.attention.base import NO_MASK, AttentionPass, LayerProbe
from slipstream.models.attention.hook import current_pass


class _Best(NamedTuple):
    """What `Tensor.topk` returns."""

    values: Tensor
    indices: Tensor


class _Visible(Tensor):
    """A mask of what rows may see. Scores that it was applied to are chosen from by score, then by position."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.topk:
            scores, count = args[0].as_subclass(Tensor), args[1]
            best = torch.sort(scores, dim=-1, descending=True, stable=True)
            return _Best(best.values[..., :count], best.indices[..., :count])
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


class _IndexKeys:
    """The cache as an indexer sees it."""

    def __init__(self, update: Callable[[Tensor], Tensor]) -> None:
        self._update = update

    def update_indexer(self, keys: Tensor, _layer: int) -> Tensor:
        """Index keys of the rows [1, rows, dim] -> those of all entries [1, entries, dim]."""
        return self._update(keys[0])[None]


def lead_indexers(model: nn.Module) -> None:
    """Let the indexers of a model score what our cache holds, in passes of ours."""
    for module in model.modules():
        leads, chooses = hasattr(module, "indexer"), hasattr(module, "index_topk")
        if not (leads or chooses) or isinstance(module.forward, partial):
            continue
        takes = inspect.signature(module.forward)
        if leads and "attention_mask" in takes.parameters:
            module.forward = partial(_attend, module.forward, takes)
        elif chooses and "past_key_values" in takes.parameters:
            module.forward = partial(_choose, module, module.forward, takes)


def _attend(stock: Any, takes: inspect.Signature, *given: Any, **others: Any) -> Any:
    """A layer's attention; in a pass of ours what reads its mask is told what rows may see in other ways."""
    if current_pass() is None:
        return stock(*given, **others)
    bound = takes.bind(*given, **others)
    bound.arguments["attention_mask"] = NO_MASK
    return stock(*bound.args, **bound.kwargs)


def _choose(module: Any, stock: Any, takes: inspect.Signature, *given: Any, **others: Any) -> Any:
    """What a layer's indexer chooses for each row: in a pass of ours one mask a sequence, [rows, entries], or None."""
    attention = current_pass()
    if attention is None:
        return stock(*given, **others)
    bound = takes.bind(*given, **others)
    named = bound.arguments
    if isinstance(attention, LayerProbe):
        rows = named["hidden_states"].shape[1]
        probe = attention

        def record(keys: Tensor) -> Tensor:
            probe.indexers[module] = keys.shape[-1]
            return keys

        named["attention_mask"] = torch.ones(
            1, rows, rows, dtype=torch.bool, device=named["hidden_states"].device
        )
        named["past_key_values"] = _IndexKeys(record)
        return stock(*bound.args, **bound.kwargs)
    assert isinstance(attention, AttentionPass)

    def choose(own: slice, visible: Tensor, update: Callable[[Tensor], Tensor]) -> Tensor | None:
        part = {name: _of_rows(value, own) for name, value in named.items()}
        part["attention_mask"] = visible[None].as_subclass(_Visible)
        part["past_key_values"] = _IndexKeys(update)
        indices = stock(**part)[0].long()  # [rows, at most index_topk]
        if visible.shape[1] <= module.index_topk:
            return None
        return torch.zeros_like(visible).scatter_(-1, indices, True) & visible

    return attention.select(module.index_entries, choose)


def _of_rows(value: Any, own: slice) -> Any:
    """An argument of an indexer, [1, rows, ...], for some of the rows."""
    if isinstance(value, tuple):
        return tuple(_of_rows(each, own) for each in value)
    return value[:, own] if isinstance(value, Tensor) else value
