"""llama.cpp's families with layers of plain MLPs before those of experts, and experts that every token takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipstream.errors import ModelError
from slipstream.models.files.gguf_family import (
    ATTENTION,
    BEFORE_BOTH,
    EXPERTS,
    HEAD_NORMS,
    LATENT_PARTS,
    MLP,
    NORMS,
    OUTPUT,
    USUAL_KEYS,
    GgufArchitecture,
    Keys,
    partly_rotated,
)
from slipstream.models.files.gguf_rope import rope_parameters

_ROUTER = {"ffn_gate_inp": "mlp.gate"}
_SHARED = {f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")}
_SOFTMAX, _SIGMOID = 1, 2
"""Functions of a router's outputs, by their numbers in files."""


def _mixture(keys: Keys) -> dict[str, Any]:
    """What the configurations of these families say of their experts, under the names of DeepSeek's."""
    return {
        "n_routed_experts": keys.size("expert_count"),
        "num_experts_per_tok": keys.size("expert_used_count"),
        "n_shared_experts": keys.count("expert_shared_count", 0),
        "moe_intermediate_size": keys.size("expert_feed_forward_length"),
        "first_k_dense_replace": keys.count("leading_dense_block_count", 0),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
        "norm_topk_prob": keys.choice("expert_weights_norm", False),
        "n_group": max(keys.count("expert_group_count", 1), 1),
        "topk_group": max(keys.count("expert_group_used_count", 1), 1),
    }


def _lacks(keys: Keys, layer: int) -> set[str]:
    """Experts in the first layers, a plain MLP in the others."""
    step = keys.size("interleave_moe_layer_step", 1)
    if layer < keys.count("leading_dense_block_count", 0) or (layer + 1) % step:
        return {*_ROUTER, *_SHARED, *EXPERTS}
    return {*MLP, *(() if keys.count("expert_shared_count", 0) else _SHARED)}


def _glm4_lacks(keys: Keys, layer: int) -> set[str]:
    return _lacks(keys, layer) | set(() if keys.has("attn_q_norm.weight") else HEAD_NORMS)


def _glm4_moe(keys: Keys, sizes: Mapping[str, Any]) -> dict[str, Any]:
    function = keys.count("expert_gating_func", _SIGMOID)
    if function not in (0, _SIGMOID):
        raise ModelError(
            f"{keys.file.path!r}: its routers' function is number {function}; read is {_SIGMOID} (sigmoid)"
        )
    return _mixture(keys) | {
        "attention_bias": keys.has("attn_q.bias"),
        "use_qk_norm": keys.has("attn_q_norm.weight"),
        "num_nextn_predict_layers": 0,
        "rope_parameters": partly_rotated(keys, sizes, sizes["head_dim"] // 2),
    }


GLM4_MOE = GgufArchitecture(
    "glm4_moe",
    BEFORE_BOTH | ATTENTION | HEAD_NORMS | MLP | _ROUTER | _SHARED,
    experts=EXPERTS,
    lacks=_glm4_lacks,
    whole={"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"},
    more=_glm4_moe,
)


def _latent_sizes(keys: Keys) -> dict[str, Any]:
    """DeepSeek's heads: a part that is made of a latent vector, and one that is rotated."""
    heads, rotated = keys.size("attention.head_count"), keys.size("rope.dimension_count")
    key, value = (
        keys.size(
            f"attention.{part}_length_mla"
            if f"attention.{part}_length_mla" in keys
            else f"attention.{part}_length"
        )
        for part in ("key", "value")
    )
    if key <= rotated:
        raise ModelError(f"{keys.file.path!r}: {rotated} numbers of each head are rotated, and it has {key}")
    return {
        "num_key_value_heads": heads,
        "head_dim": rotated,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key - rotated,
        "v_head_dim": value,
        "kv_lora_rank": keys.size("attention.kv_lora_rank"),
        "q_lora_rank": keys.size("attention.q_lora_rank") if "attention.q_lora_rank" in keys else None,
    }


def _latent_lacks(keys: Keys, layer: int) -> set[str]:
    """Queries are made of a latent vector too, or are not, and its matrix of keys and values is whole, or in parts."""
    queries = {"attn_q"} if "attention.q_lora_rank" in keys else {"attn_q_a", "attn_q_b", "attn_q_a_norm"}
    return _lacks(keys, layer) | queries | set(["attn_kv_b"] if keys.has("attn_k_b.weight") else LATENT_PARTS)


def _latent_shapes(keys: Keys, sizes: Mapping[str, Any], layer: int) -> dict[str, tuple[int, ...]]:
    heads, hidden, latent = (sizes[name] for name in ("num_attention_heads", "hidden_size", "kv_lora_rank"))
    plain, rotated, value = (sizes[f"{name}_head_dim"] for name in ("qk_nope", "qk_rope", "v"))
    queries = heads * (plain + rotated)
    return {
        "attn_q": (queries, hidden),
        "attn_q_a": (sizes["q_lora_rank"] or 0, hidden),
        "attn_q_b": (queries, sizes["q_lora_rank"] or 0),
        "attn_kv_a_mqa": (latent + rotated, hidden),
        "attn_kv_b": (heads * (plain + value), latent),
        "attn_k_b": (heads, latent, plain),
        "attn_v_b": (heads, value, latent),
        "attn_output": (hidden, heads * value),
    }


def _latent_rope(keys: Keys, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """As usual; with YaRN, by a factor of the scores that is in a key of its own."""
    found = rope_parameters(keys.file, sizes["head_dim"])
    if found["rope_type"] != "yarn":
        return found
    factor = keys.number("rope.scaling.yarn_log_multiplier")
    if factor is None:
        raise ModelError(
            f"{keys.file.path!r} has rotary positions of kind 'yarn' without {keys.file.architecture}"
            ".rope.scaling.yarn_log_multiplier, which says how scores are scaled: convert the model again"
        )
    found.pop("attention_factor", None)
    scale = float(f"{10 * factor:.6g}")
    return found | {"mscale": scale, "mscale_all_dim": scale}


def _deepseek2(keys: Keys, sizes: Mapping[str, Any]) -> dict[str, Any]:
    mixture = _mixture(keys)
    if mixture["norm_topk_prob"]:
        raise ModelError(
            f"{keys.file.path!r}: shares of experts by softmax that are made to add up to 1 (expert_weights_norm), "
            "which Transformers' deepseek_v2 has not"
        )
    method = "group_limited_greedy" if mixture["n_group"] > 1 else "greedy"
    return mixture | {"topk_method": method}


def _deepseek3(keys: Keys, sizes: Mapping[str, Any]) -> dict[str, Any]:
    return _mixture(keys) | {"num_nextn_predict_layers": 0}


_LATENT: dict[str, Any] = {
    "layer": NORMS
    | OUTPUT
    | {
        **{"attn_q": "self_attn.q_proj", "attn_q_a": "self_attn.q_a_proj", "attn_q_b": "self_attn.q_b_proj"},
        **{"attn_q_a_norm": "self_attn.q_a_layernorm", "attn_kv_a_norm": "self_attn.kv_a_layernorm"},
        **{"attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa", "attn_kv_b": "self_attn.kv_b_proj"},
        **dict.fromkeys(LATENT_PARTS, "self_attn.kv_b_proj"),
    }
    | MLP
    | _ROUTER
    | _SHARED,
    "experts": EXPERTS,
    "lacks": _latent_lacks,
    "sizes": _latent_sizes,
    "shapes": _latent_shapes,
    "rope": _latent_rope,
}
DEEPSEEK_V2 = GgufArchitecture("deepseek_v2", **_LATENT, more=_deepseek2)
DEEPSEEK_V3 = GgufArchitecture(
    "deepseek_v3",
    **_LATENT,
    whole={"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"},
    more=_deepseek3,
)


def deepseek(keys: Keys) -> GgufArchitecture:
    """Which of DeepSeek's families a file is of: the later one's routers have sigmoids."""
    if keys.number("attention.temperature_scale", 0.0):
        raise ModelError(
            f"{keys.file.path!r} holds a model of DeepSeek's kind whose scores grow along the text "
            "(attention.temperature_scale), which Transformers' has not"
        )
    return DEEPSEEK_V3 if keys.count("expert_gating_func", _SOFTMAX) == _SIGMOID else DEEPSEEK_V2


def _ernie_moe(keys: Keys, sizes: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "use_bias": keys.has("attn_q.bias"),
        "moe_num_experts": keys.size("expert_count"),
        "moe_k": keys.size("expert_used_count"),
        "moe_num_shared_experts": keys.count("expert_shared_count", 0),
        "moe_intermediate_size": keys.size("expert_feed_forward_length"),
        "moe_layer_start_index": keys.count("leading_dense_block_count", 0),
        "moe_layer_end_index": sizes["num_hidden_layers"] - 1,
        "moe_layer_interval": keys.size("interleave_moe_layer_step"),
    }


ERNIE_MOE = GgufArchitecture(
    "ernie4_5_moe",
    NORMS | ATTENTION | MLP | _ROUTER | _SHARED,
    experts=EXPERTS,
    lacks=_lacks,
    whole={"exp_probs_b.bias": "mlp.gate.moe_statics.e_score_correction_bias"},
    numbers=lambda part, tensor: (
        tensor[None] if part == "exp_probs_b" else tensor
    ),  # a group of routers has a row
    more=_ernie_moe,
)


def qwen_experts(keys: Keys, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Experts in every layer, and shares that add up to 1, as in Qwen's families since the third."""
    return {
        "num_experts": keys.size("expert_count"),
        "num_experts_per_tok": keys.size("expert_used_count"),
        "moe_intermediate_size": keys.size("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


_LLAMA4_CHUNK, _LLAMA4_INTERVAL = 8192, 4
"""llama.cpp's own constants: tokens of a chunk, and of so many layers the last one attends to all, without rotation."""
_WITHOUT_HEAD_NORMS = 128
"""Experts of the one size of Llama 4 whose queries and keys are not divided by their root mean square."""


def _has_experts(keys: Keys, layer: int) -> bool:
    return (layer + 1) % keys.size("interleave_moe_layer_step") == 0


def _llama4_shapes(keys: Keys, sizes: Mapping[str, Any], layer: int) -> dict[str, tuple[int, ...]]:
    """The expert that every token takes is as large as the others."""
    hidden, inner = sizes["hidden_size"], keys.size("expert_feed_forward_length")
    return {
        **{"ffn_gate_shexp": (inner, hidden), "ffn_up_shexp": (inner, hidden)},
        "ffn_down_shexp": (hidden, inner),
    }


def _llama4(keys: Keys, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """How scores grow along the text no key says: Transformers' own numbers are llama.cpp's."""
    number, layers = keys.size("expert_count"), range(sizes["num_hidden_layers"])
    whole = sizes["head_dim"]
    if keys.size("rope.dimension_count", whole) != whole:
        raise ModelError(
            f"{keys.file.path!r} rotates a part of a head's {whole} numbers; Llama 4 rotates all"
        )
    rotated = [int((layer + 1) % _LLAMA4_INTERVAL != 0) for layer in layers]
    return {
        "intermediate_size": keys.size("expert_feed_forward_length"),
        "intermediate_size_mlp": sizes["intermediate_size"],
        "num_local_experts": number,
        "num_experts_per_tok": keys.size("expert_used_count"),
        "interleave_moe_layer_step": keys.size("interleave_moe_layer_step"),
        "moe_layers": [layer for layer in layers if _has_experts(keys, layer)],
        "use_qk_norm": number != _WITHOUT_HEAD_NORMS,
        "no_rope_layers": rotated,
        "layer_types": ["chunked_attention" if each else "full_attention" for each in rotated],
        "attention_chunk_size": _LLAMA4_CHUNK,
    }


_LLAMA4_MLP = {f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")}
_LLAMA4_SHARED = {
    "ffn_gate_inp": "feed_forward.router",
    **{f"ffn_{part}_shexp": f"feed_forward.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
}
_LLAMA4_EXPERTS = {
    f"ffn_{part}_exps": f"feed_forward.experts.{{}}.{part}_proj" for part in ("gate", "up", "down")
}
LLAMA4 = GgufArchitecture(
    "llama4_text",
    NORMS | ATTENTION | _LLAMA4_MLP | _LLAMA4_SHARED,
    experts=_LLAMA4_EXPERTS,
    keys=USUAL_KEYS | {"expert_feed_forward_length", "interleave_moe_layer_step"},
    lacks=lambda keys, layer: (
        _LLAMA4_MLP if _has_experts(keys, layer) else {**_LLAMA4_SHARED, **_LLAMA4_EXPERTS}
    ),
    shapes=_llama4_shapes,
    more=_llama4,
)
