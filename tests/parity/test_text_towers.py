"""The language models of checkpoints that read images: the same logits for text as the whole model's."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from tiny_models import VOCAB, randomise

from slipstream.errors import ModelError, UnsupportedModelError
from slipstream.kv.pool import KVPool
from slipstream.models import RowGroup, load_model, load_tokenizer
from slipstream.train.target import FrozenTarget
from tests.kit.small_llama import sizes
from tests.kit.whole_towers import text_settings, whole_tower

TEXT = [(17 * i * i + 5 * i + 3) % VOCAB for i in range(24)]
_TEXT: dict[str, Any] = sizes(32, 2, 4, 2, vocab=VOCAB, inner=48, context=128, bos=1, eos=None, pad=0)
_EYES: dict[str, Any] = sizes(32, 1, 2, inner=48, image_size=16, patch_size=8)
_QWEN_EYES: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 32,
}


_GEMMA4: dict[str, Any] = {
    **_TEXT,
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention"],
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 0,
}


def _rope(*sections: int) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(sections)}


FAMILIES: dict[str, Callable[[], Any]] = {
    "gemma3": lambda: tf.Gemma3ForConditionalGeneration(
        tf.Gemma3Config(
            text_config={
                **_TEXT,
                "head_dim": 8,
                "sliding_window": 4,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            vision_config=_EYES,
            mm_tokens_per_image=1,
        )
    ),
    "gemma4": lambda: tf.Gemma4ForConditionalGeneration(
        tf.Gemma4Config(
            text_config=_GEMMA4,
            vision_config={**_EYES, "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 16},
            audio_config=None,
        )
    ),
    "gemma4_unified": lambda: tf.Gemma4UnifiedForConditionalGeneration(
        tf.Gemma4UnifiedConfig(
            text_config=_GEMMA4,
            vision_config={"mm_embed_dim": 32, "mm_posemb_size": 16, "output_proj_dims": 32, "patch_size": 4},
        )
    ),
    "mistral3": lambda: tf.Mistral3ForConditionalGeneration(
        tf.Mistral3Config(
            text_config={**_TEXT, "model_type": "mistral", "head_dim": 8},
            vision_config={**_EYES, "model_type": "pixtral", "head_dim": 16},
        )
    ),
    "qwen2_vl": lambda: tf.Qwen2VLForConditionalGeneration(
        tf.Qwen2VLConfig(
            text_config={**_TEXT, "rope_parameters": _rope(1, 1, 2)},
            vision_config={"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2},
        )
    ),
    "qwen2_5_vl": lambda: tf.Qwen2_5_VLForConditionalGeneration(
        tf.Qwen2_5_VLConfig(
            text_config={**_TEXT, "rope_parameters": _rope(1, 1, 2)},
            vision_config={**_QWEN_EYES, "fullatt_block_indexes": [0]},
        )
    ),
    "qwen3_vl": lambda: tf.Qwen3VLForConditionalGeneration(
        tf.Qwen3VLConfig(
            text_config={**_TEXT, "head_dim": 8, "rope_parameters": _rope(2, 1, 1)},
            vision_config={**_QWEN_EYES, "deepstack_visual_indexes": [0]},
        )
    ),
    "llama4": lambda: tf.Llama4ForConditionalGeneration(
        tf.Llama4Config(
            text_config={
                **{**_TEXT, "intermediate_size_mlp": 48, "num_local_experts": 2, "no_rope_layers": [1, 0]},
                **{"attention_chunk_size": 8, "floor_scale": 5},
            },
            vision_config={
                **_EYES,
                "vision_output_dim": 32,
                "projector_input_dim": 32,
                "projector_output_dim": 32,
            },
        )
    ),
    "llava": lambda: tf.LlavaForConditionalGeneration(
        tf.LlavaConfig(
            text_config={**_TEXT, "model_type": "llama"},
            vision_config={**_EYES, "model_type": "clip_vision_model"},
        )
    ),
    "llava_next": lambda: tf.LlavaNextForConditionalGeneration(
        tf.LlavaNextConfig(
            text_config={**_TEXT, "model_type": "mistral"},
            vision_config={**_EYES, "model_type": "clip_vision_model"},
        )
    ),
    "internvl": lambda: tf.InternVLForConditionalGeneration(
        tf.InternVLConfig(
            text_config={**_TEXT, "model_type": "qwen2"},
            vision_config={**_EYES, "image_size": [16, 16], "patch_size": [8, 8]},
        )
    ),
    "idefics3": lambda: tf.Idefics3ForConditionalGeneration(
        tf.Idefics3Config(text_config={**_TEXT, "model_type": "llama"}, vision_config=_EYES)
    ),
    "smolvlm": lambda: tf.SmolVLMForConditionalGeneration(
        tf.SmolVLMConfig(text_config={**_TEXT, "model_type": "llama"}, vision_config=_EYES)
    ),
    **{
        family: partial(whole_tower, family)
        for family in (
            *("aria", "aya_vision", "cohere2_vision", "deepseek_vl", "deepseek_vl_hybrid"),
            *("emu3", "exaone4_5", "fuyu", "glm46v", "glm4v", "glm4v_moe", "glm_ocr", "glmasr"),
            *("glmga", "got_ocr2", "granite4_vision", "granite_docling", "hunyuan_vl"),
            *("hyperclovax_vision_v2", "idefics2", "janus", "kimi_k25", "lfm2_vl", "lighton_ocr"),
            *("llava_next_video", "llava_onevision", "minicpm_ocr", "minicpmv4_6"),
            *("moss_transcribe_diarize", "ovis2", "paddleocr_vl", "pp_chart2table"),
            *("qianfan_ocr", "qwen2_5_omni_thinker", "qwen2_audio", "qwen3_5", "qwen3_5_moe"),
            *("qwen3_asr", "qwen3_omni_moe_thinker", "qwen3_vl_moe", "video_llama_3"),
            *("video_llava", "vipllava", "voxtral"),
        )
    },
}


def saved(family: str, folder: Path) -> Any:
    model = FAMILIES[family]().eval()
    randomise(model)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_text_has_the_whole_models_logits(family: str, tmp_path: Path) -> None:
    whole = saved(family, tmp_path)
    with torch.inference_mode():
        expected = whole(input_ids=torch.tensor([TEXT])).logits[0]
    lm = load_model(str(tmp_path))
    pool, slots = lm.trial_cache(len(TEXT))
    chunks = [
        RowGroup(slots, begin, TEXT[begin : begin + 8], range(8), owner=0) for begin in range(0, len(TEXT), 8)
    ]
    ours = torch.cat([lm.forward([chunk], pool).logits for chunk in chunks])
    assert (ours - expected).abs().max() < 1e-4 * expected.std()
    assert lm.num_parameters < sum(parameter.numel() for parameter in whole.parameters())


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_old_and_new_names_of_weights(prefix: str, tmp_path: Path) -> None:
    saved("llava", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    renamed = {name.replace("language_model.model.", prefix): weight for name, weight in weights.items()}
    if prefix.startswith("model."):
        renamed = {
            name.replace("language_model.lm_head", "lm_head"): weight for name, weight in renamed.items()
        }
    save_file(renamed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert load_model(str(tmp_path)).family == "llama"


def test_weights_of_the_language_model_are_all_there_and_no_others(tmp_path: Path) -> None:
    saved("qwen2_5_vl", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    odd = {**weights, "model.layers.7.mlp.up_proj.weight": torch.zeros(48, 32)}
    save_file(odd, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"has unknown weights: model\.layers\.7"):
        load_model(str(tmp_path))
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks weights: model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(str(tmp_path))


@pytest.mark.parametrize("family", ["gemma3", "qwen2_5_vl"])
def test_training_reads_the_language_model(family: str, tmp_path: Path) -> None:
    saved(family, tmp_path)
    target = FrozenTarget(str(tmp_path), torch.device("cpu"), torch.float32)
    assert (target.num_layers, target.hidden_size, target.vocab_size) == (2, 32, VOCAB)
    weights = load_file(tmp_path / "model.safetensors")
    name = next(name for name in weights if name.endswith("layers.1.mlp.up_proj.weight"))
    save_file({**weights, name: torch.zeros(1)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="has misshapen weights"):  # never drawn at random
        FrozenTarget(str(tmp_path), torch.device("cpu"), torch.float32)


@pytest.mark.parametrize(
    "family", ["fast_vlm", "gemma3n", "granite_speech", "perception_lm", "vibevoice_asr"]
)
def test_a_language_model_among_encoders_that_are_not_made_here(family: str, tmp_path: Path) -> None:
    """They are large, or of a package that is not needed for text; only the names of their weights count."""
    settings = text_settings(family)
    text = tf.CONFIG_MAPPING[settings["model_type"]](**settings)
    alone = tf.AutoModelForCausalLM.from_config(text).eval()
    randomise(alone)
    names = alone.state_dict()
    weights = {name.replace("model.", "model.language_model.", 1): names[name].clone() for name in names}
    for encoder in ("vision_tower.conv", "embed_vision.norm", "audio_tower.conv", "projector.layers.0.norm"):
        weights[f"model.{encoder}.weight"] = torch.ones(2)
    if text.tie_word_embeddings:
        del weights["lm_head.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    outer = {
        "model_type": family,
        "tie_word_embeddings": text.tie_word_embeddings,
        "text_config": text.to_dict(),
    }
    (tmp_path / "config.json").write_text(json.dumps(outer))
    lm = load_model(str(tmp_path))
    with torch.inference_mode():
        expected = alone(input_ids=torch.tensor([TEXT]), use_cache=False).logits[0]
    pool = KVPool(lm.shapes, len(TEXT), lm.dtype, lm.device)
    ours = lm.forward([RowGroup(pool.slots, 0, TEXT, range(len(TEXT)))], pool).logits
    assert (ours - expected).abs().max() < 1e-4 * expected.std()


@pytest.mark.parametrize("family", ["qwen2_5_omni", "qwen3_omni_moe"])
def test_the_thinker_of_a_model_that_speaks(family: str, tmp_path: Path) -> None:
    """Its text is written by one of several language models in the checkpoint."""
    whole = saved(f"{family}_thinker", tmp_path)
    weights = {
        f"thinker.{name}": tensor.clone()
        for name, tensor in load_file(tmp_path / "model.safetensors").items()
    }
    weights["talker.model.layers.0.self_attn.q_proj.weight"] = torch.ones(2)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    thinker = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family, "thinker_config": thinker}))
    lm = load_model(str(tmp_path))
    with torch.inference_mode():
        expected = whole(input_ids=torch.tensor([TEXT])).logits[0]
    pool = KVPool(lm.shapes, len(TEXT), lm.dtype, lm.device)
    ours = lm.forward([RowGroup(pool.slots, 0, TEXT, range(len(TEXT)))], pool).logits
    assert (ours - expected).abs().max() < 1e-4 * expected.std()


def test_a_model_whose_sizes_are_in_a_part_of_its_configuration(tmp_path: Path) -> None:
    text = {**_TEXT, "model_type": "persimmon", "num_key_value_heads": 4}
    config = tf.FuyuConfig(text_config=text, hidden_size=32, image_size=16, patch_size=8, num_hidden_layers=2)
    model = tf.FuyuForCausalLM(config).eval()
    randomise(model)
    model.save_pretrained(tmp_path)
    lm = load_model(str(tmp_path))
    assert (lm.hidden_size, lm.num_layers, lm.vocab_size) == (32, 2, VOCAB)


def test_a_family_that_cannot_be_taken_apart_is_refused_by_its_language_models_name(tmp_path: Path) -> None:
    tf.Blip2Config(text_config={"model_type": "opt"}).save_pretrained(tmp_path)
    reason = "blip-2 cannot be decoded: its language model is a opt, but it is not known how to take that out"
    with pytest.raises(UnsupportedModelError, match=reason):
        load_model(str(tmp_path))


def test_a_template_in_a_file_of_its_own_is_found(
    tmp_path: Path, byte_tokenizer: tf.PreTrainedTokenizerFast
) -> None:
    byte_tokenizer.save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path)).chat_template is None
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages[0].content }}"}))
    assert load_tokenizer(str(tmp_path)).chat_template == "{{ messages[0].content }}"
    (tmp_path / "chat_template.json").write_text("[]")
    with pytest.raises(ModelError, match=r"cannot read '.*chat_template.json'"):
        load_tokenizer(str(tmp_path))


@pytest.fixture
def byte_tokenizer() -> tf.PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models

    return tf.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    )
