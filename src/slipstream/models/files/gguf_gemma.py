"""Gemma's families in GGUF files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from slipstream.errors import ModelError
from slipstream.models.files.gguf_family import (
    AROUND,
    ATTENTION,
    ENDS,
    EXPERTS,
    HEAD_NORMS,
    MLP,
    NORMS,
    GgufArchitecture,
    Keys,
)


def _gemma(keys: Keys, sizes: Mapping[str, Any]) -> dict[str, Any]:
    return {"hidden_activation": "gelu_pytorch_tanh"}


def _gemma2(keys: Keys, sizes: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": keys.size("attention.sliding_window"),
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": _attention_scalar(sizes, largest=46),
    }


def _gemma3(keys: Keys, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Five layers with a window, then one without; only the latter has scaled positions."""
    theta = float(keys.number("rope.freq_base_swa") or 10000.0)
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": keys.size("attention.sliding_window"),
        "final_logit_softcapping": keys.number("final_logit_softcapping"),
        "query_pre_attn_scalar": _attention_scalar(sizes, largest=62),
        "rope_parameters": {
            "full_attention": sizes["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": theta},
        },
    }


def _attention_scalar(sizes: Mapping[str, Any], largest: int) -> int:
    """Which of Gemma's models has another scale than its head's width is in no key: it is known by its layers."""
    if sizes["num_hidden_layers"] == largest:
        return int(sizes["hidden_size"] // sizes["num_attention_heads"])
    return int(sizes["head_dim"])


_LAYER_INPUTS = {
    **{"inp_gate": "per_layer_input_gate", "proj": "per_layer_projection"},
    **{"post_norm": "post_per_layer_input_norm"},
}
_UNROTATED = 1e29
"""A frequency that is divided by as much as this does not turn."""


def _gemma4_sizes(keys: Keys) -> dict[str, Any]:
    """Layers with a window have other heads than those without, and the last layers may read others' keys."""
    num_layers, shared = keys.size("block_count"), keys.count("attention.shared_kv_layers", 0)
    windows = keys.get("attention.sliding_window_pattern")
    if not isinstance(windows, list) or len(windows) != num_layers or shared >= num_layers:
        raise ModelError(f"{keys.file.path!r} does not say which of its {num_layers} layers have a window")
    widths, heads = (
        value if isinstance(value, list) else [value] * num_layers
        for value in (keys.get("feed_forward_length"), keys.get("attention.head_count_kv"))
    )
    own = num_layers - shared
    of_windows = {number for number, window in zip(heads, windows, strict=False) if window}
    of_others = {number for number, window in zip(heads, windows, strict=False) if not window}
    fits = len(widths) == len(heads) == num_layers and len({*widths[:own]}) == 1
    fits = fits and len({*widths[own:]}) < 2 and len(of_windows) == len(of_others) == 1
    if not fits or not all(type(number) is int and number > 0 for number in (*widths, *heads)):
        raise ModelError(f"{keys.file.path!r}: its layers' sizes are not those of a Gemma 4")
    wide = bool(shared) and widths[-1] == 2 * widths[0]
    if not wide and widths[-1] != widths[0]:
        raise ModelError(
            f"{keys.file.path!r}: its last layers are {widths[-1]} wide, and the others {widths[0]}"
        )
    without = [layer for layer in range(own) if not windows[layer]]
    is_key = bool(without) and all(f"blk.{layer}.attn_v.weight" not in keys.file.tensors for layer in without)
    if of_windows != of_others and not is_key:
        raise ModelError(
            f"{keys.file.path!r}: its layers differ in attention.head_count_kv, which is not supported"
        )
    return {
        "intermediate_size": widths[0],
        "use_double_wide_mlp": wide,
        "num_key_value_heads": of_windows.pop(),
        "num_global_key_value_heads": of_others.pop(),
        "head_dim": keys.size("attention.key_length_swa"),
        "global_head_dim": keys.size("attention.key_length"),
        "num_kv_shared_layers": shared,
        "attention_k_eq_v": is_key,
        "layer_types": ["sliding_attention" if window else "full_attention" for window in windows],
        "hidden_size_per_layer_input": keys.count("embedding_length_per_layer_input", 0),
    }


def _gemma4_lacks(keys: Keys, layer: int) -> set[str]:
    lacks = set() if keys.count("embedding_length_per_layer_input", 0) else {*_LAYER_INPUTS}
    if layer >= keys.size("block_count") - keys.count("attention.shared_kv_layers", 0):
        return lacks | {"attn_k", "attn_v", "attn_k_norm"}
    return lacks if f"blk.{layer}.attn_v.weight" in keys.file.tensors else lacks | {"attn_v"}


def _gemma4_shapes(keys: Keys, sizes: Mapping[str, Any], layer: int) -> dict[str, tuple[int, ...]]:
    is_global = sizes["layer_types"][layer] == "full_attention"
    width = sizes["global_head_dim" if is_global else "head_dim"]
    kv = sizes["num_global_key_value_heads" if is_global else "num_key_value_heads"]
    is_shared = layer >= sizes["num_hidden_layers"] - sizes["num_kv_shared_layers"]
    inner = sizes["intermediate_size"] * (1 + (is_shared and sizes["use_double_wide_mlp"]))
    hidden, queries = sizes["hidden_size"], sizes["num_attention_heads"] * width
    return {
        "attn_q": (queries, hidden),
        "attn_k": (kv * width, hidden),
        "attn_v": (kv * width, hidden),
        "attn_output": (hidden, queries),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
        "inp_gate": (sizes["hidden_size_per_layer_input"], hidden),
        "proj": (hidden, sizes["hidden_size_per_layer_input"]),
    }


def _gemma4_rope(keys: Keys, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """In layers without a window only the first frequencies turn: the file divides the others by very much."""
    factors = keys.file.tensors.get("rope_freqs.weight")
    half = sizes["global_head_dim"] // 2
    if factors is None or factors.format.dtype != torch.float32 or factors.shape != (half,):
        raise ModelError(f"{keys.file.path!r} lacks rope_freqs.weight, or it is no list of {half} float32")
    numbers = factors.numbers()
    turns = int((numbers == 1).sum())
    fits = bool((numbers[:turns] == 1).all()) and bool((numbers[turns:] > _UNROTATED).all())
    if not fits or keys.get("rope.scaling.type", "none") != "none":
        raise ModelError(
            f"{keys.file.path!r} has rotary positions that are not those of a Gemma 4 (rope_freqs)"
        )
    if keys.get("rope.dimension_count_swa", sizes["head_dim"]) != sizes["head_dim"]:
        raise ModelError(
            f"{keys.file.path!r} rotates a part of its heads in layers with a window, which is not supported"
        )
    return {
        "full_attention": {
            "rope_type": "proportional",
            "rope_theta": keys.number("rope.freq_base", 1e6),
            "partial_rotary_factor": turns / half,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": keys.number("rope.freq_base_swa", 1e4)},
    }


def _gemma4(keys: Keys, sizes: Mapping[str, Any]) -> dict[str, Any]:
    table, width = keys.file.tensors.get("per_layer_token_embd.weight"), sizes["hidden_size_per_layer_input"]
    if width and (table is None or table.shape[1:] != (width * sizes["num_hidden_layers"],)):
        raise ModelError(
            f"{keys.file.path!r} has no per_layer_token_embd.weight of {width} numbers for each layer"
        )
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": keys.size("attention.sliding_window"),
        "final_logit_softcapping": keys.number("final_logit_softcapping"),
        **({} if table is None else {"vocab_size_per_layer_input": table.shape[0]}),
    }


def _gemma4_experts(keys: Keys, sizes: Mapping[str, Any]) -> dict[str, Any]:
    return _gemma4(keys, sizes) | {
        "enable_moe_block": True,
        "num_experts": keys.size("expert_count"),
        "top_k_experts": keys.size("expert_used_count"),
        "moe_intermediate_size": keys.size("expert_feed_forward_length"),
    }


GEMMA = GgufArchitecture("gemma", NORMS | ATTENTION | MLP, norms_hold_one_more=True, more=_gemma)
GEMMA2 = GgufArchitecture("gemma2", AROUND | ATTENTION | MLP, norms_hold_one_more=True, more=_gemma2)
GEMMA3 = GgufArchitecture(
    "gemma3_text", AROUND | ATTENTION | MLP | HEAD_NORMS, norms_hold_one_more=True, more=_gemma3
)
GEMMA4 = GgufArchitecture(
    "gemma4_text",
    AROUND | ATTENTION | MLP | HEAD_NORMS | _LAYER_INPUTS,
    lacks=_gemma4_lacks,
    whole={"layer_output_scale.weight": "layer_scalar"},
    ends=ENDS
    | {
        "per_layer_token_embd": "model.embed_tokens_per_layer",
        "per_layer_model_proj": "model.per_layer_model_projection",
        "per_layer_proj_norm": "model.per_layer_projection_norm",
    },
    sizes=_gemma4_sizes,
    shapes=_gemma4_shapes,
    rope=_gemma4_rope,
    more=_gemma4,
)
_GEMMA4_EXPERTS = replace(
    GEMMA4,
    layer={
        **GEMMA4.layer,
        **{"ffn_gate_inp": "router.proj", "pre_ffw_norm_2": "pre_feedforward_layernorm_2"},
        **{f"post_ffw_norm_{part}": f"post_feedforward_layernorm_{part}" for part in (1, 2)},
    },
    experts={stack: name.removeprefix("mlp.") for stack, name in EXPERTS.items()},
    whole={
        **GEMMA4.whole,
        **{"ffn_gate_inp.scale": "router.scale", "ffn_down_exps.scale": "router.per_expert_scale"},
    },
    more=_gemma4_experts,
)


def gemma4(keys: Keys) -> GgufArchitecture:
    """The family with experts beside each layer's MLP, or the one without."""
    return _GEMMA4_EXPERTS if keys.get("expert_count") else GEMMA4
