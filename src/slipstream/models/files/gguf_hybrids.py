"""llama.cpp's families in which some layers convolve, or keep a state by the delta rule, instead of attending."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import ModelError
from slipstream.models.files.gguf_family import (
    ATTENTION,
    BEFORE_BOTH,
    ENDS,
    EXPERTS,
    HEAD_NORMS,
    MLP,
    USUAL_KEYS,
    GgufArchitecture,
    Keys,
    partly_rotated,
)
from slipstream.models.files.gguf_mixtures import qwen_experts

_CONVOLUTION = {f"shortconv.{part}": f"conv.{part}" for part in ("conv", "in_proj", "out_proj")}
_ATTENTION = {
    **{f"attn_{part}": f"self_attn.{part}_proj" for part in ("q", "k", "v")},
    **{f"attn_{part}_norm": f"self_attn.{part}_layernorm" for part in ("q", "k")},
    "attn_output": "self_attn.out_proj",
}


def heads_of_layers(keys: Keys) -> tuple[list[bool], int]:
    """Which layers attend, and with how many heads of keys and values; a layer that does not has none."""
    num_layers, heads = keys.size("block_count"), keys.get("attention.head_count_kv")
    found = set(heads) - {0} if isinstance(heads, list) else set()
    if not isinstance(heads, list) or len(heads) != num_layers or len(found) != 1:
        raise ModelError(
            f"{keys.file.path!r} does not say which of its {num_layers} layers attend, with which heads"
        )
    number = found.pop()
    if type(number) is not int or number < 0:
        raise ModelError(f"{keys.file.path!r}: {number!r:.40} heads of keys and values")
    return [each != 0 for each in heads], number


def _lfm2_sizes(keys: Keys) -> dict[str, Any]:
    attends, number = heads_of_layers(keys)
    return {
        "num_key_value_heads": number,
        "head_dim": keys.size("embedding_length") // keys.size("attention.head_count"),
        "layer_types": ["full_attention" if each else "conv" for each in attends],
        "conv_L_cache": keys.size("shortconv.l_cache"),
        "block_auto_adjust_ff_dim": False,
    }


def _lfm2_lacks(keys: Keys, layer: int) -> dict[str, str]:
    return _CONVOLUTION if heads_of_layers(keys)[0][layer] else _ATTENTION


LFM2 = GgufArchitecture(
    "lfm2",
    {"attn_norm": "operator_norm", "ffn_norm": "ffn_norm"}
    | _ATTENTION
    | _CONVOLUTION
    | {"ffn_gate": "feed_forward.w1", "ffn_up": "feed_forward.w3", "ffn_down": "feed_forward.w2"},
    lacks=_lfm2_lacks,
    ends=ENDS | dict.fromkeys(("token_embd_norm", "output_norm"), "model.embedding_norm"),
    norm_epsilon="norm_eps",
    sizes=_lfm2_sizes,
    numbers=lambda part, tensor: tensor[:, None] if part == "conv" else tensor,  # a channel's, by itself
    shapes=lambda keys, sizes, layer: {
        "shortconv.conv": (sizes["hidden_size"], sizes["conv_L_cache"]),
        "shortconv.in_proj": (3 * sizes["hidden_size"], sizes["hidden_size"]),
        "shortconv.out_proj": (sizes["hidden_size"], sizes["hidden_size"]),
    },
)


_DELTA = {
    **{"attn_qkv": "linear_attn.in_proj_qkv", "attn_gate": "linear_attn.in_proj_z"},
    **{"ssm_alpha": "linear_attn.in_proj_a", "ssm_beta": "linear_attn.in_proj_b"},
    **{f"ssm_{part}": f"linear_attn.{name}" for part, name in (("conv1d", "conv1d"), ("norm", "norm"))},
    "ssm_out": "linear_attn.out_proj",
}


_DECAYS = {"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"}


def _attends(keys: Keys, layer: int) -> bool:
    """Whether a layer attends: every so many do, where a file does not say it of each. The others keep a state."""
    recurrent = keys.get("attention.recurrent_layers")
    if recurrent is None:
        return (layer + 1) % keys.size("full_attention_interval", 4) == 0
    if not isinstance(recurrent, list) or len(recurrent) < keys.size("block_count"):
        raise ModelError(f"{keys.file.path!r} does not say of all its layers which are recurrent")
    return not recurrent[layer]


def _delta_sizes(keys: Keys) -> dict[str, Any]:
    """Layers that keep a state have heads of their own."""
    num_keys, num_values = keys.size("ssm.group_count"), keys.size("ssm.time_step_rank")
    inner = keys.size("ssm.inner_size")
    if num_values % num_keys or inner % num_values:
        raise ModelError(
            f"{keys.file.path!r}: {num_keys} heads of keys, {num_values} of values and {inner} numbers in these do not "
            "fit together"
        )
    return {
        "linear_num_key_heads": num_keys,
        "linear_num_value_heads": num_values,
        "linear_key_head_dim": keys.size("ssm.state_size"),
        "linear_value_head_dim": inner // num_values,
        "linear_conv_kernel_dim": keys.size("ssm.conv_kernel"),
        "layer_types": [
            "full_attention" if _attends(keys, layer) else "linear_attention"
            for layer in range(keys.size("block_count"))
        ],
    }


def _qwen35_lacks(keys: Keys, layer: int) -> set[str]:
    return {*_DELTA} if _attends(keys, layer) else {*ATTENTION, *HEAD_NORMS}


def _delta_shapes(keys: Keys, sizes: Mapping[str, Any], layer: int) -> dict[str, tuple[int, ...]]:
    hidden, number = sizes["hidden_size"], sizes["linear_num_value_heads"]
    inner = number * sizes["linear_value_head_dim"]
    mixed = 2 * sizes["linear_num_key_heads"] * sizes["linear_key_head_dim"] + inner
    return {
        "attn_q": (
            2 * sizes["num_attention_heads"] * sizes["head_dim"],
            hidden,
        ),  # with a gate for each number
        "attn_qkv": (mixed, hidden),
        "attn_gate": (inner, hidden),
        "ssm_conv1d": (mixed, sizes["linear_conv_kernel_dim"]),
        "ssm_alpha": (number, hidden),
        "ssm_beta": (number, hidden),
        "ssm_in": (mixed + inner, hidden),
        "ssm_ba": (2 * number, hidden),
        "ssm_out": (hidden, inner),
    }


def _qwen35(keys: Keys, sizes: Mapping[str, Any]) -> dict[str, Any]:
    return {"rope_parameters": partly_rotated(keys, sizes, sizes["head_dim"] // 4)}


def _value_heads(config: Any, width: int) -> Tensor:
    """int64 [heads of values * width]: where a file keeps what is of each, in turns of the heads of keys."""
    groups, number = config.linear_num_key_heads, config.linear_num_value_heads
    heads = torch.arange(number).view(number // groups, groups).T.reshape(-1, 1)
    return (heads * width + torch.arange(width)).flatten()


def _qwen35_rows(part: str, config: Any) -> Tensor | None:
    """See `GgufArchitecture.rows`."""
    if part in ("ssm_a", "ssm_dt", "ssm_alpha", "ssm_beta"):
        return _value_heads(config, 1)
    values = _value_heads(config, config.linear_value_head_dim)
    if part == "attn_gate":
        return values
    first = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    return torch.cat([torch.arange(first), first + values]) if part in ("attn_qkv", "ssm_conv1d") else None


def _delta_numbers(part: str, tensor: Tensor) -> Tensor:
    if part == "ssm_a":
        return (-tensor.float()).log()
    if part == "ffn_gate_inp_shexp":
        return tensor.view(1, -1)  # llama.cpp writes it with one dimension or with two
    return tensor[:, None] if part == "ssm_conv1d" else tensor


QWEN35 = GgufArchitecture(
    "qwen3_5_text",
    BEFORE_BOTH | ATTENTION | HEAD_NORMS | MLP | _DELTA,
    norms_hold_one_more=True,
    lacks=_qwen35_lacks,
    whole=_DECAYS,
    sizes=_delta_sizes,
    shapes=_delta_shapes,
    rows=_qwen35_rows,
    numbers=_delta_numbers,
    columns=lambda part, config: (
        _value_heads(config, config.linear_value_head_dim) if part == "ssm_out" else None
    ),
    more=_qwen35,
)


_SHARED_EXPERT = {
    **{f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
    **{"ffn_gate_inp": "mlp.gate", "ffn_gate_inp_shexp": "mlp.shared_expert_gate"},
}
_MIXTURE_KEYS = USUAL_KEYS | {
    *(f"ssm.{part}" for part in ("conv_kernel", "state_size", "group_count", "time_step_rank", "inner_size")),
    *("full_attention_interval", "attention.recurrent_layers", "rope.dimension_sections"),
    *("expert_feed_forward_length", "expert_shared_feed_forward_length", "nextn_predict_layers"),
}


def _shared_size(keys: Keys) -> int:
    """Inner numbers of the expert that every token takes."""
    return keys.size("expert_shared_feed_forward_length", keys.get("feed_forward_length"))


def _mixture_sizes(keys: Keys) -> dict[str, Any]:
    """No layer has a plain MLP, so its size may be missing."""
    inner = keys.size("expert_feed_forward_length")
    return _delta_sizes(keys) | {"intermediate_size": keys.size("feed_forward_length", inner)}


def _mixture_shapes(keys: Keys, sizes: Mapping[str, Any], layer: int) -> dict[str, tuple[int, ...]]:
    hidden, shared = sizes["hidden_size"], _shared_size(keys)
    return _delta_shapes(keys, sizes, layer) | {
        **{"ffn_gate_shexp": (shared, hidden), "ffn_up_shexp": (shared, hidden)},
        "ffn_down_shexp": (hidden, shared),
    }


def _mixture(keys: Keys, sizes: Mapping[str, Any]) -> dict[str, Any]:
    shared = {"shared_expert_intermediate_size": _shared_size(keys)}
    return _qwen35(keys, sizes) | qwen_experts(keys, sizes) | shared


QWEN35_MOE = replace(
    QWEN35,
    model_type="qwen3_5_moe_text",
    layer=BEFORE_BOTH | ATTENTION | HEAD_NORMS | _DELTA | _SHARED_EXPERT,
    experts=EXPERTS,
    keys=_MIXTURE_KEYS,
    sizes=_mixture_sizes,
    shapes=_mixture_shapes,
    more=_mixture,
)


_QKVZ = "linear_attn.in_proj_qkvz"
_NEXT_DELTA = {
    **{"attn_qkv": _QKVZ, "attn_gate": _QKVZ, "ssm_in": _QKVZ, "ssm_ba": "linear_attn.in_proj_ba"},
    **{part: _DELTA[part] for part in ("ssm_conv1d", "ssm_norm", "ssm_out")},
}


def _next_lacks(keys: Keys, layer: int) -> set[str]:
    """The oldest files have one matrix, in Transformers' order, in the place of queries to values and gates."""
    if _attends(keys, layer):
        return {*_NEXT_DELTA}
    is_old = f"blk.{layer}.ssm_in.weight" in keys.file.tensors
    return {*ATTENTION, *HEAD_NORMS, *(("attn_qkv", "attn_gate") if is_old else ("ssm_in",))}


def _next_rows(part: str, config: Any) -> Tensor | None:
    """See `GgufArchitecture.rows`: the model has what is of each head of keys together, a file each kind together."""
    if part != "in_proj_qkvz":
        return None
    groups, number = config.linear_num_key_heads, config.linear_num_value_heads
    values = number // groups * config.linear_value_head_dim
    found, first = [], 0
    for width in (config.linear_key_head_dim, config.linear_key_head_dim, values, values):
        found.append(first + torch.arange(groups * width).view(groups, width))
        first += groups * width
    return torch.cat(found, 1).flatten()


QWEN3_NEXT = replace(
    QWEN35_MOE,
    model_type="qwen3_next",
    layer=BEFORE_BOTH | ATTENTION | HEAD_NORMS | _NEXT_DELTA | _SHARED_EXPERT,
    lacks=_next_lacks,
    joins={_QKVZ: ("attn_qkv", "attn_gate")},
    rows=_next_rows,
    columns=lambda part, config: None,
)
