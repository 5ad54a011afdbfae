"""Tiny models for GGUF files whose layers differ in kind: llama.cpp's family, Transformers', what their configurations
change, and the keys that say it."""

from __future__ import annotations

from typing import Any

HYBRIDS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {}
HYBRIDS["lfm2"] = (
    "lfm2",
    "lfm2",
    {
        "layer_types": ["conv", "full_attention", "conv"],
        **{
            "block_auto_adjust_ff_dim": False,
            "tie_word_embeddings": True,
            "norm_eps": 1e-6,
            "conv_L_cache": 4,
        },
    },
    {"attention.head_count_kv": [0, 2, 0], "shortconv.l_cache": 4, "rope.freq_base": 1e6},
)
HYBRIDS["qwen35"] = (
    "qwen35",
    "qwen3_5_text",
    {
        "head_dim": 32,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        **{"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_conv_kernel_dim": 3},
        **{"linear_key_head_dim": 32, "linear_value_head_dim": 16},
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
    },
    {
        **{"attention.key_length": 32, "attention.value_length": 32, "full_attention_interval": 2},
        **{"ssm.group_count": 2, "ssm.time_step_rank": 6, "ssm.state_size": 32, "ssm.inner_size": 96},
        **{"ssm.conv_kernel": 3, "rope.freq_base": 1e6, "rope.dimension_count": 16},
        "rope.dimension_sections": [3, 3, 2, 0],
    },
)
WITH_EXPERTS = {"moe_intermediate_size": 64, "num_experts": 5, "num_experts_per_tok": 2}
SHARED = WITH_EXPERTS | {"shared_expert_intermediate_size": 32}
SHARED_KEYS = {
    **{"expert_count": 5, "expert_used_count": 2, "expert_feed_forward_length": 64},
    "expert_shared_feed_forward_length": 32,
}
HYBRIDS["qwen35moe"] = (
    "qwen35moe",
    "qwen3_5_moe_text",
    HYBRIDS["qwen35"][2] | SHARED,
    HYBRIDS["qwen35"][3] | SHARED_KEYS | {"feed_forward_length": None},
)
HYBRIDS["qwen3next"] = (
    "qwen3next",
    "qwen3_next",
    HYBRIDS["qwen35"][2] | SHARED,
    HYBRIDS["qwen35"][3] | SHARED_KEYS | {"rope.dimension_sections": None},
)
MAMBA = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    **{"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 24, "mamba_d_conv": 3},
    **{"attention_multiplier": 0.25, "embedding_multiplier": 3.0, "residual_multiplier": 0.5},
    **{"logits_scaling": 2.0, "tie_word_embeddings": True},
}
MAMBA_KEYS = {
    **{"ssm.conv_kernel": 3, "ssm.state_size": 24, "ssm.group_count": 2, "ssm.inner_size": 128},
    **{"ssm.time_step_rank": 8, "attention.head_count_kv": [0, 2, 0], "rope.freq_base": 1e4},
    **{"attention.scale": 0.25, "embedding_scale": 3.0, "residual_scale": 0.5, "logit_scale": 2.0},
}
HYBRIDS["granitehybrid"] = (
    "granitehybrid",
    "granitemoehybrid",
    MAMBA | {"num_local_experts": 0, "shared_intermediate_size": 96},
    MAMBA_KEYS | {"expert_count": 0, "rope.dimension_count": 16, "rope.scaling.finetuned": False},
)
HYBRIDS["granitehybrid with experts"] = (
    "granitehybrid",
    "granitemoehybrid",
    MAMBA
    | {"num_local_experts": 5, "num_experts_per_tok": 2, "shared_intermediate_size": 32}
    | {"position_embedding_type": "rope", "mamba_conv_bias": False, "attention_multiplier": 0.25},
    MAMBA_KEYS
    | {"expert_count": 5, "expert_used_count": 2, "expert_shared_feed_forward_length": 32}
    | {"attention.scale": None},  # then it is that of the heads' width
)
HYBRIDS["llama4"] = (
    "llama4",
    "llama4_text",
    {
        **{"num_hidden_layers": 4, "intermediate_size": 64, "intermediate_size_mlp": 96, "head_dim": 32},
        **{"num_local_experts": 5, "num_experts_per_tok": 2, "interleave_moe_layer_step": 2},
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    },
    {
        **{"feed_forward_length": 96, "expert_feed_forward_length": 64, "interleave_moe_layer_step": 2},
        **{"expert_count": 5, "expert_used_count": 2, "rope.freq_base": 5e5},
        **{"attention.key_length": 32, "attention.value_length": 32, "rope.dimension_count": 32},
    },
)
