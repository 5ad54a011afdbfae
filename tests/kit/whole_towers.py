"""Tiny whole models that read images or sound, made of their families' default configurations."""

from __future__ import annotations

from typing import Any

from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
)

from tests.kit.small_llama import sizes

VOCAB = 128
_EXPERTS = {"num_experts": 4, "n_routed_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
_TEXT: dict[str, Any] = {
    **sizes(32, 2, 4, 2, vocab=VOCAB, inner=48, context=128, bos=1, eos=None, pad=0),
    **_EXPERTS,
    **{"head_dim": 8, "sliding_window": 4, "moe_intermediate_size": 24, "first_k_dense_replace": 1},
    **{"n_group": 1, "topk_group": 1, "n_shared_experts": 1, "moe_num_shared_experts": 1},
    **{"q_lora_rank": 16, "kv_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8},
}
_ENCODER: dict[str, int] = {
    **sizes(32, 1, 2, 2, inner=48, vocab=64, head_dim=16),
    **{
        "embed_dim": 32,
        "num_heads": 2,
        "depth": 1,
        "num_layers": 1,
        "width": 32,
        "mlp_dim": 48,
        "d_model": 32,
    },
    **{"encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 48, "base_channels": 32},
    **{"image_size": 16, "patch_size": 8, "out_hidden_size": 32, "projection_dim": 32, "output_dim": 16},
    **{"num_mel_bins": 8, "max_source_positions": 16, "downsample_hidden_size": 8, "n_window": 4},
}


def _rope(*sections: int, **others: float) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 1e4, **others}
    return {"rope_parameters": {**rope, "mrope_section": list(sections)}}


_LINEAR: dict[str, Any] = {
    **_rope(1, 1, 0, partial_rotary_factor=0.5),
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8},
    **{"linear_value_head_dim": 8, "shared_expert_intermediate_size": 24},
}
OF_TEXT: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("glm46v", "glm4v_moe", "glm_ocr", "glmga"), _rope(1, 1, 0, partial_rotary_factor=0.5)),
    **dict.fromkeys(("glm4v", "paddleocr_vl", "qwen2_5_omni_thinker"), _rope(1, 1, 2)),
    "hunyuan_vl": {**_rope(1, 1, 2), "head_dim": 8},
    **dict.fromkeys(("minicpm_ocr", "minicpmv4_6", "qwen3_5", "qwen3_5_moe"), _LINEAR),
    "lfm2_vl": {"layer_types": ["conv", "full_attention"], "block_multiple_of": 16},
    "gemma3n": {
        "activation_sparsity_pattern": [0.5, 0.0],
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 4,
        "num_kv_shared_layers": 0,
        "vocab_size_per_layer_input": VOCAB,
    },
    "kimi_k25": {"num_key_value_heads": 4, "head_dim": 4},
}
"""Settings of a family's language model besides its sizes."""
OF_WHOLE: dict[str, dict[str, Any]] = {
    "emu3": {"vocabulary_map": {"<image>": 5}},
    "granite4_vision": {
        "deepstack_layer_map": [[0, 0]],
        "spatial_target_layers": [0, 0, 1, 1],
        "downsample_rate": "1/4",
        "vision_config": {"image_size": 64, "hidden_size": 64},
    },
}
"""Settings of the whole."""


def whole_tower(family: str) -> Any:
    """The whole model, with first numbers."""
    make = CONFIG_MAPPING[family]
    default = make()
    text = default.get_text_config(decoder=True)
    parts = {name: part for name, part in vars(default).items() if hasattr(part, "to_dict")}
    name = next(name for name, part in parts.items() if part is text)
    settings: dict[str, Any] = {
        each: {**_shrunk(part, _ENCODER), "model_type": part.model_type}
        for each, part in parts.items()
        if "text" not in each
    }
    settings[name] = text_settings(family)
    for key, value in OF_WHOLE.get(family, {}).items():
        settings[key] = {**settings[key], **value} if key in parts else value
    config = make(**settings)
    whole = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    mapping = whole if make in whole else MODEL_FOR_MULTIMODAL_LM_MAPPING
    return mapping[make](config).eval()


def text_settings(family: str) -> dict[str, Any]:
    """The configuration of a family's language model."""
    text = CONFIG_MAPPING[family]().get_text_config(decoder=True)
    settings = {**_shrunk(text, _TEXT), "model_type": text.model_type, "bos_token_id": 1}
    settings |= {"eos_token_id": None, "pad_token_id": 0}
    if getattr(text, "layer_types", None):
        settings["layer_types"] = (list(dict.fromkeys(text.layer_types)) * 2)[:2]
    return settings | OF_TEXT.get(family, {})


def _shrunk(config: Any, small: dict[str, Any]) -> dict[str, Any]:
    """Those of `small` that a configuration has numbers for."""
    have = config.to_dict()
    return {key: value for key, value in small.items() if type(have.get(key)) is int}
