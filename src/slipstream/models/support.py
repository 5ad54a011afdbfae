"""What is known from a configuration alone: whether a model can be decoded here, and its context length."""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any

from slipstream.errors import UnsupportedModelError
from slipstream.models.huggingface import MODEL_FOR_CAUSAL_LM_MAPPING, encoder_decoders

_RELATIVE_LENGTHS = {"bloom": ("seq_length", 2048)}
"""By type of a model with relative positions, which of its configuration says how long texts are, and what they were in
training, for one that does not say."""
_T5_LENGTH = ("n_positions", 512)
"""The same for the family of T5."""

_ALIBI = "its ALiBi bias counts packed keys, so that neither sequences nor tree branches can share a pass"

_DRAFTS = (
    "it drafts for a Gemma 4 over that model's keys and values, and is no model of its own; name that Gemma 4 as the "
    "model and this as its drafter, --spec mtp:PATH"
)

_REFUSED = {
    "gemma4_assistant": _DRAFTS,
    "gemma4_unified_assistant": _DRAFTS,
    "reformer": "its hashed attention does not see all earlier positions",
    "xlnet": "it does not decode from left to right",
}

_ATTENDING_LAYERS = frozenset(
    {"full_attention", "sliding_attention", "chunked_attention", "indexed_attention", "attention"}
    | {"hybrid", "hybrid_sliding"}
)
"""Layer types whose masks the attention hook can make."""

_RECURRENT_LAYERS = frozenset({"linear_attention", "conv", "hybrid", "hybrid_sliding"})
"""Layer types that keep a state; which of them are known is found when the model is loaded (`models.mixers`)."""

_CHOICE = (
    "a cache of what their indexer keeps of each token, and a choice among tokens that drafts do not change"
)
_STATE = "a cache from which what drafts have left can be taken back"
_NEEDED = {
    "minimax_m3_sparse": _CHOICE,
    "compressed_sparse_attention": "a cache of compressed blocks, and a choice among them",
    "heavily_compressed_attention": "a cache of compressed blocks, and a choice among them",
}
"""What layers would need that are not known."""

_STATELESS_LAYERS = frozenset({"mlp", "moe", "dense"})
"""Layer types in which no row depends on another."""


_UNBOUNDED_LAYERS = frozenset({"linear_attention", "conv", "sliding_attention"})
"""Layer types of which a model is made that no text is too long for: they have no positions, or see those near them."""

UNBOUNDED_CONTEXT = 131072
"""The longest text for such a model; an engine's own limit, `max_model_len`, is not above it."""


def check_config(config: Any) -> None:
    """Raise `UnsupportedModelError` for models that are known not to work, before any weights are read."""
    if config.model_type in _REFUSED:
        raise unsupported(config, _REFUSED[config.model_type])
    if is_encoder_decoder(config):
        if encoder_decoders(config) is None:
            raise unsupported(config, "it is an encoder-decoder of a family that is not known")
        return
    if getattr(config, "alibi", False):
        raise unsupported(config, _ALIBI)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and "AutoModelForCausalLM" not in _remote_classes(
        config
    ):
        raise unsupported(config, _not_causal(config))
    kinds = getattr(text_config(config), "layer_types", None) or ()
    known = _ATTENDING_LAYERS | _RECURRENT_LAYERS | _STATELESS_LAYERS
    others = sorted(set(kinds) - known)
    if others:
        needed = "; ".join(dict.fromkeys(_NEEDED.get(kind, _STATE) for kind in others))
        first = next(layer for layer, kind in enumerate(kinds) if kind in others)
        raise unsupported(
            config,
            f"its {', '.join(others)} layers are not plain attention (the first is layer {first}); they would need "
            f"{needed}",
        )
    _check_reach(config, kinds)


def _check_reach(config: Any, kinds: Collection[str]) -> None:
    """Raise `UnsupportedModelError` where layers of a kind say that they see less than one position."""
    for kind, name in (
        ("sliding_attention", "sliding_window"),
        ("chunked_attention", "attention_chunk_size"),
    ):
        size = getattr(text_config(config), name, None)
        if kind in kinds and (type(size) is not int or size < 1):
            raise unsupported(config, f"its {kind} layers have {name} {size!r}, which must be 1 or more")


def layers_without_state(config: Any) -> set[int]:
    """The layers in which no row depends on another."""
    kinds = getattr(text_config(config), "layer_types", None) or ()
    return {layer for layer, kind in enumerate(kinds) if kind in _STATELESS_LAYERS}


def _not_causal(config: Any) -> str:
    """Why a configuration that is none of a causal language model is refused: what is inside it is named."""
    text = text_config(config)
    if text is config:
        return "it is not a causal language model"
    return (
        f"its language model is a {text.model_type}, but it is not known how to take that out of this family"
    )


def unsupported(config: Any, reason: str) -> UnsupportedModelError:
    """The error that says why a family cannot be decoded."""
    return UnsupportedModelError(f"{config.model_type} cannot be decoded: {reason}")


def context_length(config: Any, wanted: int | None = None) -> int:
    """The longest text, in tokens, whose result does not depend on the other sequences of a batch.

    LongRoPE has two sets of frequencies. Transformers takes the second for *all* rows of a pass as soon as one of them
    lies beyond the original length, so one sequence would change another's text. Therefore one set is chosen for good:
    the second where `wanted` is beyond the original length, else the first, for texts of at most that length. Where
    positions are relative, texts may be as long as `wanted`.
    """
    length = full_context_length(config)
    if _relative_length(text_config(config)):
        return max(length, wanted or 0)
    original = original_context_length(config)
    return length if original is None or (wanted or 0) > original else original


def is_encoder_decoder(config: Any) -> bool:
    """Whether a model has an encoder for its input, and a decoder for its answer."""
    return bool(getattr(config, "is_encoder_decoder", False))


def encoder_length(config: Any, context: int) -> int:
    """The most positions of an encoder's input, where texts of `context` tokens can be decoded."""
    return int(getattr(config, "max_source_positions", None) or context)


def full_context_length(config: Any) -> int:
    """Positions that the configuration says there are."""
    text = text_config(config)
    names = ("max_position_embeddings", "max_target_positions", "max_seq_len")
    length = next(filter(None, (getattr(text, name, None) for name in names)), None)
    kinds = set(getattr(text, "layer_types", None) or ())
    if not length and kinds <= _UNBOUNDED_LAYERS and kinds & _RECURRENT_LAYERS:
        return UNBOUNDED_CONTEXT
    length = length or _relative_length(text)
    if not length:
        raise unsupported(config, "its configuration does not say how long its context is")
    return int(length)


def _relative_length(text: Any) -> int | None:
    """How long texts are where positions are relative: longer ones can be decoded. None where positions are not."""
    name, usual = _RELATIVE_LENGTHS.get(text.model_type, _T5_LENGTH)
    if text.model_type in _RELATIVE_LENGTHS or hasattr(text, "relative_attention_num_buckets"):
        return getattr(text, name, None) or usual
    return None


def original_context_length(config: Any) -> int | None:
    """Return where LongRoPE's second set of frequencies begins; None for a model without them."""
    full = full_context_length(config)
    for rope in _rope_parameters(text_config(config)):
        original = rope.get("original_max_position_embeddings")
        if rope.get("rope_type") == "longrope" and original and original < full:
            return int(original)
    return None


def text_config(config: Any) -> Any:
    """The language model's part of a configuration; of an encoder-decoder the decoder's."""
    if getattr(config, "decoder_layers", None) and not is_encoder_decoder(config):  # a decoder alone
        config = copy.deepcopy(config)
        config.is_encoder_decoder = True  # else `get_text_config` takes the encoder's sizes for its own
        text = config.get_text_config(decoder=True)
        text.is_encoder_decoder = False
        return text
    text = config.get_text_config(decoder=True)
    if text is not config and getattr(text, "num_decoder_layers", None):  # a copy, see `get_text_config`
        text.num_hidden_layers = text.num_decoder_layers
    return text


def experts_of(config: Any) -> tuple[int, int]:
    """How many experts a layer has, and to how many a row is sent; (0, 1) where there are none."""
    number = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    chosen = getattr(config, "num_experts_per_tok", None) or getattr(config, "top_k_experts", None)
    return (int(number), int(chosen)) if number and chosen else (0, 1)


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    """One set of parameters, or one a layer type."""
    rope = getattr(config, "rope_parameters", None) or {}
    return [rope, *(value for value in rope.values() if isinstance(value, dict))]


def _remote_classes(config: Any) -> dict[str, str]:
    """Which classes the checkpoint brings code for."""
    return getattr(config, "auto_map", None) or {}
