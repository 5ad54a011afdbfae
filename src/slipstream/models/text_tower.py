"""The language model inside a checkpoint that reads images or sound too: its configuration, and its weights' names.

Slipstream decodes text. Given text alone, such a model computes what its language model computes. Only the language
model is loaded; the encoders' weights are not read.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from slipstream.models.huggingface import CONFIG_MAPPING

T = TypeVar("T")

_KNOWN = frozenset(
    {
        *("aria", "aya_vision", "cohere2_vision", "deepseek_vl", "deepseek_vl_hybrid", "emu3"),
        *("emu3_text_model", "exaone4_5", "fast_vlm", "fuyu", "gemma3", "gemma3n", "gemma4"),
        *("gemma4_unified", "glm46v", "glm4v", "glm4v_moe", "glm_ocr", "glmasr", "glmga", "got_ocr2"),
        *("granite4_vision", "granite_docling", "granite_speech", "hunyuan_vl", "hyperclovax_vision_v2"),
        *("idefics2", "idefics3", "internvl", "janus", "kimi_k25", "lfm2_vl", "lighton_ocr", "llama4"),
        *("llava", "llava_next", "llava_next_video", "llava_onevision", "minicpm_ocr", "minicpmv4_6"),
        *("minicpmv4_7", "mistral3", "moss_transcribe_diarize", "ovis2", "paddleocr_vl", "perception_lm"),
        *("pp_chart2table", "qianfan_ocr", "qwen2_5_omni", "qwen2_5_omni_thinker", "qwen2_5_vl"),
        *("qwen2_audio", "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_asr", "qwen3_omni_moe"),
        *("qwen3_omni_moe_thinker", "qwen3_vl", "qwen3_vl_moe", "smolvlm", "vibevoice_asr"),
        *("video_llama_3", "video_llava", "vipllava", "voxtral"),
    }
)
"""Families whose language model, given text alone, computes what a causal language model of Transformers computes."""

_WHATEVER_IT_SAYS: dict[str, dict[str, Any]] = {
    "aya_vision": {"logit_scale": 1.0},
    "cohere2_vision": {"logit_scale": 1.0},
    "glm4v_text": {"attention_bias": True},
    "glm_ocr_text": {"attention_bias": False},
    "qwen3_vl_moe_text": {"norm_topk_prob": True},
}
"""By the type of the whole or of its language model, settings that it has whatever its configuration says of them."""

_PLAIN = {
    "emu3_text_model": "llama",
    "glm4v_moe_text": "glm4_moe",
    "glm4v_text": "glm4",
    "glm_ocr_text": "glm4",
    "granite4_vision_text": "granite",
    "granite_docling_text": "granite",
    "hunyuan_vl_text": "hunyuan_v1_dense",
    "paddleocr_vl_text": "llama",
    "qwen2_5_omni_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen3_omni_moe_text": "qwen3_moe",
    "qwen3_vl_moe_text": "qwen3_moe",
    "qwen3_vl_text": "qwen3",
}
"""Language models that have a type of their own, and what they are for text. The rotary embedding of many has three
positions: time, height and width. For text all three are equal, which is the plain family's rotation."""

KEY_MAPPING = {
    r"^thinker\.": "",
    r"^(?:model\.)?(?:language_model|text_model)\.lm_head\.": "lm_head.",
    r"^(?:model\.)?(?:language_model|text_model)\.(?:model\.)?": "model.",
    r"^model\.(?:blocks|encoder\.layers)\.": "model.layers.",
}
"""Patterns of weight names in such checkpoints, old and new, to the names in the language model alone; each is
replaced in turn."""

_INHERITED = ("dtype", "tie_word_embeddings", "eos_token_id", "bos_token_id", "quantization_config")
"""Settings of the outer configuration that hold for the language model too."""


@dataclass(frozen=True, slots=True)
class TextTower:
    """The language model's configuration, which `AutoModelForCausalLM` loads it with."""

    config: Any
    family: str
    """`model_type` of the whole checkpoint."""

    @staticmethod
    def of_language_model(named: Mapping[str, T], model: Any) -> dict[str, T]:
        """What `named` has for weights or layers of the language model, which `model` is (it may be without numbers).

        `named` has the checkpoint's names or the language model's, and the result has the language model's. All else
        is of encoders, of which the language model has no part.
        """
        parts = {_part(name) for name in model.state_dict()}
        own = {_renamed(name): value for name, value in named.items()}
        return {name: value for name, value in own.items() if _part(name) in parts}


def _renamed(name: str) -> str:
    """What a weight or a layer of such a checkpoint is called in the language model alone."""
    whole = f"{name}."
    for pattern, replacement in KEY_MAPPING.items():
        whole = re.sub(pattern, replacement, whole)
    return whole.removesuffix(".")


def _part(name: str) -> str:
    """The part of a model that a weight is in: "model.layers", "lm_head"."""
    first, *others = name.split(".")
    return f"{first}.{others[0]}" if first == "model" and others else first


def text_tower(config: Any) -> TextTower | None:
    """The language model of `config`; None where it has no encoder of images or sound, or its family is unknown."""
    family = config.model_type
    if family not in _KNOWN:
        return None
    text = copy.deepcopy(config.get_text_config(decoder=True))
    fixed = _WHATEVER_IT_SAYS.get(family, {}) | _WHATEVER_IT_SAYS.get(text.model_type, {})
    if text.model_type in _PLAIN:
        text = _plain(text, CONFIG_MAPPING[_PLAIN[text.model_type]])
    for name, value in fixed.items():
        setattr(text, name, value)
    for name in _INHERITED:
        value = getattr(config, name, None)
        if value is not None:
            setattr(text, name, list(value) if isinstance(value, tuple) else value)
    return TextTower(text, family)


def _plain(text: Any, plain: type) -> Any:
    """The same sizes as a configuration of the plain family."""
    own = {key: value for key, value in text.to_dict().items() if key not in ("model_type", "architectures")}
    own.setdefault("head_dim", text.hidden_size // text.num_attention_heads)
    rope = own.pop("rope_parameters", None) or {}
    rope = {key: value for key, value in rope.items() if not key.startswith("mrope")}
    rope.setdefault("partial_rotary_factor", 1.0)  # the plain family may have another default
    return plain(**own, rope_parameters=rope)
