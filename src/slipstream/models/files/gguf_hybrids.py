"""llama.cpp's families in which some layers convolve, or keep a state, instead of attending."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import ModelError
from slipstream.models.files.gguf_family import (
    ATTENTION,
    BEFORE_BOTH,
    ENDS,
    HEAD_NORMS,
    MLP,
    GgufArchitecture,
    Keys,
    partly_rotated,
)

_CONVOLUTION = {f"shortconv.{part}": f"conv.{part}" for part in ("conv", "in_proj", "out_proj")}
_ATTENTION = {
    **{f"attn_{part}": f"self_attn.{part}_proj" for part in ("q", "k", "v")},
    **{f"attn_{part}_norm": f"self_attn.{part}_layernorm" for part in ("q", "k")},
    "attn_output": "self_attn.out_proj",
}


def _lfm2_sizes(keys: Keys) -> dict[str, Any]:
    """A layer that convolves has no heads of keys."""
    num_layers, heads = keys.size("block_count"), keys.get("attention.head_count_kv")
    found = set(heads) - {0} if isinstance(heads, list) else set()
    if not isinstance(heads, list) or len(heads) != num_layers or len(found) != 1:
        raise ModelError(
            f"{keys.file.path!r} does not say which of its {num_layers} layers attend, with which heads"
        )
    number = found.pop()
    if type(number) is not int or number < 0:
        raise ModelError(f"{keys.file.path!r}: {number!r:.40} heads of keys and values")
    return {
        "num_key_value_heads": number,
        "head_dim": keys.size("embedding_length") // keys.size("attention.head_count"),
        "layer_types": ["full_attention" if each else "conv" for each in heads],
        "conv_L_cache": keys.size("shortconv.l_cache"),
        "block_auto_adjust_ff_dim": False,
    }


def _lfm2_lacks(keys: Keys, layer: int) -> dict[str, str]:
    return _ATTENTION if not keys.get("attention.head_count_kv")[layer] else _CONVOLUTION


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


def _qwen35_sizes(keys: Keys) -> dict[str, Any]:
    """Every so many layers attend, and the others keep a state, with heads of their own."""
    interval = keys.size("full_attention_interval", 4)
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
            "linear_attention" if (layer + 1) % interval else "full_attention"
            for layer in range(keys.size("block_count"))
        ],
    }


def _qwen35_lacks(keys: Keys, layer: int) -> set[str]:
    interval = keys.size("full_attention_interval", 4)
    return {*ATTENTION, *HEAD_NORMS} if (layer + 1) % interval else {*_DELTA}


def _qwen35_shapes(keys: Keys, sizes: Mapping[str, Any], layer: int) -> dict[str, tuple[int, ...]]:
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


def _qwen35_numbers(part: str, tensor: Tensor) -> Tensor:
    if part == "ssm_a":
        return (-tensor.float()).log()
    return tensor[:, None] if part == "ssm_conv1d" else tensor


QWEN35 = GgufArchitecture(
    "qwen3_5_text",
    BEFORE_BOTH | ATTENTION | HEAD_NORMS | MLP | _DELTA,
    norms_hold_one_more=True,
    lacks=_qwen35_lacks,
    whole={"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"},
    sizes=_qwen35_sizes,
    shapes=_qwen35_shapes,
    rows=_qwen35_rows,
    numbers=_qwen35_numbers,
    columns=lambda part, config: (
        _value_heads(config, config.linear_value_head_dim) if part == "ssm_out" else None
    ),
    more=_qwen35,
)
