"""Attention of packed rows over Slipstream's own cache, reached through Transformers' attention interface.

A forward pass is one row of tokens, [1, N], in which the rows of several sequences follow each other:
prompt chunks, single tokens and draft trees. Each layer hands its queries, keys and values to
`slipstream_attention`, which passes them to the sink that travels with the call. `PackedAttention` stores
the new keys and values behind the valid entries of each sequence and attends to that one contiguous range.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from slipstream.kv.pool import LayerShape
from slipstream.models.rows import Batch

ATTENTION_NAME = "slipstream"

_IGNORED = frozenset(
    {
        "cache_position",
        "head_mask",
        "is_causal",  # false for a single row; whether a layer looks ahead is found when the model is loaded
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "use_cache",
    }
)
"""Arguments of the interface that say nothing about the arithmetic of packed, causal rows."""


@dataclass(frozen=True, slots=True)
class Variant:
    """How a layer's attention departs from softmax(q·k)·v over all earlier positions."""

    scaling: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    """[heads]: one logit a head that takes part in the softmax and carries no value."""


class AttentionSink(Protocol):
    """What travels with a forward pass and answers each layer's attention."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, variant: Variant, mask: Tensor | None
    ) -> Tensor:
        """query [1, heads, N, key_dim], key/value [1, kv_heads, N, dim] -> [1, N, heads, value_dim].

        `mask` is what the layer was told to mask with: nothing, unless it makes its own or is being probed.
        """


def slipstream_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    slipstream_batch: AttentionSink | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **unknown: Any,
) -> tuple[Tensor, None]:
    """The function that Transformers calls in every layer."""
    if slipstream_batch is None:
        raise ValueError("it does not pass the arguments of a call on to its attention")
    odd = [name for name, value in unknown.items() if name not in _IGNORED and value is not None]
    if odd or dropout:
        raise ValueError(f"its attention uses {', '.join(odd) or 'dropout'}, which is not supported")
    if getattr(module, "is_causal", True) is False:
        raise ValueError("its attention is not causal")
    variant = Variant(
        scaling if scaling is not None else float(query.shape[-1]) ** -0.5, sliding_window, softcap, s_aux
    )
    layer: int = module.layer_idx  # type: ignore[assignment]
    return slipstream_batch.attend(layer, query, key, value, variant, attention_mask), None


AttentionInterface.register(ATTENTION_NAME, slipstream_attention)


class PackedAttention:
    """Answers the attention of one forward pass over a `Batch`."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, variant: Variant, mask: Tensor | None
    ) -> Tensor:
        """See `AttentionSink.attend`."""
        if mask is not None:
            raise ValueError("its attention layers mask on their own, which packed rows cannot follow")
        batch = self._batch
        keys, values = batch.store(layer, key[0], value[0])
        repeats = query.shape[1] // key.shape[1]
        outputs: list[Tensor] = []
        first_row = 0
        for group in batch.groups:
            last_row = first_row + len(group.token_ids)
            skipped, visible = group.view(variant.sliding_window, repeats, batch.device)
            entries = slice(group.start + skipped, group.end_slot)
            outputs.append(
                attend(
                    query[0, :, first_row:last_row],
                    keys[entries].transpose(0, 1),
                    values[entries].transpose(0, 1),
                    visible,
                    variant,
                )
            )
            first_row = last_row
        heads = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)  # [heads, N, value_dim]
        return heads.transpose(0, 1)[None].contiguous()


class LayerProbe:
    """Stands in for a batch when a model is tried out: records what each layer would store, and its mask."""

    def __init__(self) -> None:
        self.shapes: dict[int, LayerShape] = {}
        self.masks: dict[int, tuple[Variant, Tensor | None]] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, variant: Variant, mask: Tensor | None
    ) -> Tensor:
        """See `AttentionSink.attend`; the answer is all zeros."""
        self.record(layer, key, value)
        self.masks[layer] = (variant, mask)
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])

    def record(self, layer: int, key: Tensor, value: Tensor) -> None:
        """key/value [1, kv_heads, N, dim], as they would be stored."""
        self.shapes[layer] = LayerShape(key.shape[1], key.shape[3], value.shape[3])


class HookRoute:
    """How a model that attends through the attention interface is made to use our cache."""

    attn_implementation = ATTENTION_NAME

    def arguments(self, batch: Batch) -> dict[str, Any]:
        """Keyword arguments of the model's forward."""
        return {"slipstream_batch": PackedAttention(batch)}

    def probe_arguments(self, probe: LayerProbe) -> dict[str, Any]:
        """The same, with a probe in the batch's place."""
        return {"slipstream_batch": probe}


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, variant: Variant) -> Tensor:
    """query [heads, n, key_dim], key/value [kv_heads, S, dim] -> [heads, n, value_dim].

    The heads that share a key head are folded into rows, so that grouped-query attention copies no keys;
    `mask`, bool [heads / kv_heads * n, S], is folded likewise.
    """
    heads, n, _ = query.shape
    query = query.reshape(key.shape[0], heads // key.shape[0] * n, -1)  # [kv_heads, rows, key_dim]
    if variant.softcap is None and variant.sinks is None:
        output = F.scaled_dot_product_attention(
            query[None], key[None], value[None], attn_mask=mask, scale=variant.scaling
        )[0]
    else:
        output = _explicit_attention(query, key, value, mask, variant)
    return output.reshape(heads, n, -1)


def _explicit_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, variant: Variant
) -> Tensor:
    """The same by hand, for what the fused kernel cannot do: capped logits (Gemma 2) and sinks (gpt-oss)."""
    scores = query @ key.transpose(1, 2) * variant.scaling  # [kv_heads, rows, S]
    if variant.softcap is not None:
        scores = torch.tanh(scores / variant.softcap) * variant.softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if variant.sinks is None:
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32)
    else:
        kv_heads, rows, _ = scores.shape
        sinks = variant.sinks.reshape(kv_heads, -1, 1)  # [kv_heads, heads / kv_heads, 1]
        sinks = sinks.repeat_interleave(rows // sinks.shape[1], dim=1).to(scores.dtype)
        weights = torch.softmax(torch.cat([scores, sinks], dim=-1), dim=-1, dtype=torch.float32)[..., :-1]
    return weights.to(value.dtype) @ value
