"""The way into a Transformers model: its attention interface.

A forward pass is one row of tokens, [1, N], in which the rows of several sequences follow each other: prompt chunks,
single tokens and draft trees. Each layer hands its queries, keys and values to `slipstream_attention`, which passes
them to the `AttentionPass` that travels with the call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from slipstream.models.attention.across import WholePass
from slipstream.models.attention.base import ATTENTION_NAME, AttentionPass, LayerProbe, NoMask, Variant
from slipstream.models.huggingface import AttentionInterface
from slipstream.models.mixers.latent import LatentHeads

CHUNKED = "chunked_attention"
"""The type of layers that see the chunk which they are in, by the name that configurations give it."""

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


_current: ContextVar[AttentionPass | LayerProbe | None] = ContextVar("_current", default=None)


@contextlib.contextmanager
def leading_to(attention: AttentionPass | LayerProbe) -> Iterator[None]:
    """Within the body, layers that are given no arguments of a call attend in this pass too."""
    token = _current.set(attention)
    try:
        yield
    finally:
        _current.reset(token)


def current_pass() -> AttentionPass | LayerProbe | None:
    """The pass of ours that runs now."""
    return _current.get()


class UnsupportedAttention(ValueError):
    """A layer attends in a way that the hook does not know. The text continues "cannot be decoded: "."""


def slipstream_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Tensor, None]:
    """The function that Transformers calls in every layer.

    `others` are the pass that it belongs to, what the model says of the layer, and what Transformers may add.
    """
    slipstream_pass: AttentionPass | LayerProbe | WholePass | None = others.pop("slipstream_pass", None)
    if slipstream_pass is None:
        slipstream_pass = _current.get()
    window, softcap, sinks = (others.pop(name, None) for name in ("sliding_window", "softcap", "s_aux"))
    bias, selected = others.pop("position_bias", None), others.pop("indices", None)
    if isinstance(attention_mask, NoMask):
        attention_mask = None
    if slipstream_pass is None:
        raise UnsupportedAttention("it does not pass the arguments of a call on to its attention")
    _refuse_unknown(others, dropout)
    is_over_input = key.shape[2] == 0 or (isinstance(slipstream_pass, WholePass) and slipstream_pass.sees_all)
    if is_over_input and any(each is not None for each in (window, softcap, sinks)):
        raise UnsupportedAttention("its attention over an encoder's input has a window, a cap or sinks")
    factor = scaling if scaling is not None else float(query.shape[-1]) ** -0.5
    if isinstance(slipstream_pass, WholePass):
        if slipstream_pass.sees_all and attention_mask is not None and not bool(attention_mask.all()):
            raise UnsupportedAttention("its encoder does not see all of its input at once")
        number = getattr(module, "layer_idx", None)
        return slipstream_pass.attend(number, query, key, value, factor, bias), None
    if key.shape[2] == 0:  # see `EncoderDecoder`
        return slipstream_pass.attend_across(module.layer_idx, query, factor), None  # type: ignore[arg-type]
    if getattr(module, "is_causal", True) is False:
        raise UnsupportedAttention("its attention is not causal")
    if isinstance(bias, Tensor):
        raise UnsupportedAttention("its attention uses position_bias as a matrix, which is not supported")
    latent = module if isinstance(module, LatentHeads) else None
    layer: int = module.layer_idx  # type: ignore[assignment]
    variant = Variant(
        factor, window, chunk_of(module, layer), softcap, sinks, latent is not None, bias, selected
    )
    _refuse_mixed(variant)
    if isinstance(slipstream_pass, LayerProbe):
        if layer in slipstream_pass.shapes:
            raise UnsupportedAttention(
                f"its layer {layer} attends more than once in a pass, which would need a place in the cache for each "
                "time"
            )
        output = slipstream_pass.attend(layer, query, key, value, variant, attention_mask)
        return (output if latent is None else output.new_zeros(*output.shape[:3], latent.v_head_dim)), None
    if attention_mask is not None:
        raise UnsupportedAttention("its attention layers mask on their own, which packed rows cannot follow")
    if latent is not None:
        return slipstream_pass.attend_to_latents(layer, latent, query, key, value, variant), None
    return slipstream_pass.attend(layer, query, key, value, variant), None


def _refuse_unknown(others: Mapping[str, Any], dropout: float) -> None:
    odd = [name for name, value in others.items() if name not in _IGNORED and value is not None]
    if odd or dropout:
        raise UnsupportedAttention(
            f"its attention uses {', '.join(odd) or 'dropout'}, which is not supported"
        )


def _refuse_mixed(variant: Variant) -> None:
    is_sparse = variant.selected is not None
    if (is_sparse and variant.reach) or (
        variant.bias is not None and (is_sparse or variant.reach or variant.values_in_keys)
    ):
        raise UnsupportedAttention(
            "its attention has several of a position bias, a window, an indexer and latents that cannot be combined"
        )


def chunk_of(module: torch.nn.Module, layer: int) -> int | None:
    """The chunk of a layer that sees no others; only its configuration says so."""
    config = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None) or ()
    if layer >= len(kinds) or kinds[layer] != CHUNKED:
        return None
    return getattr(config, "attention_chunk_size", None)


AttentionInterface.register(ATTENTION_NAME, slipstream_attention)
