"""Models in GGUF files whose layers differ: mixtures with shared experts, latent attention, convolutions, Gemma 4."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.errors import ModelError
from slipstream.models import load_model
from slipstream.models.files.gguf import open_gguf
from slipstream.models.files.gguf_architectures import ARCHITECTURES, read_config
from slipstream.models.outline import outline_model
from tests.kit.gguf_files import write, write_model
from tests.kit.gguf_hybrids import HYBRIDS
from tests.kit.logits import cached_logits, eager_logits, relative_error
from tests.kit.marks import needs_kernels
from tests.unit.models.test_gguf_models import ARCHS, FAMILIES, SIZES, tiny

pytest.importorskip("gguf", reason="the extra `export` is not installed")

IDS = [number * 7 % 96 for number in range(1, 41)]
logits = partial(eager_logits, token_ids=IDS)
packed_logits = partial(cached_logits, token_ids=IDS)

MIXTURE = {
    "moe_intermediate_size": 64,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
MIXTURE_KEYS = {
    "expert_feed_forward_length": 64,
    "expert_count": 6,
    "expert_used_count": 2,
    "expert_shared_count": 2,
    "leading_dense_block_count": 1,
    "expert_weights_scale": 1.5,
}
WIDTHS = {
    **{"qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 64, "kv_lora_rank": 32},
    **{"num_key_value_heads": 4},
}
LATENT_KEYS = {
    "attention.head_count_kv": 1,
    "attention.key_length": 48,
    "attention.value_length": 32,
    "attention.key_length_mla": 48,
    "attention.value_length_mla": 64,
    "attention.kv_lora_rank": 32,
    "rope.dimension_count": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 0.7,
    "mscale_all_dim": 0.7,
}
YARN_KEYS = {
    "rope.freq_base": 1e4,
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 32,
    "rope.scaling.yarn_beta_fast": 32.0,
    "rope.scaling.yarn_beta_slow": 1.0,
}
V3 = {"n_group": 2, "topk_group": 1, "norm_topk_prob": True, "q_lora_rank": 64, "rope_parameters": YARN}
GROUPS = {"expert_group_count": 2, "expert_group_used_count": 1}
GEMMA4 = {
    "num_hidden_layers": 6,
    "head_dim": 16,
    "global_head_dim": 32,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "sliding_window": 8,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 96,
    "tie_word_embeddings": True,
    "final_logit_softcapping": 30.0,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
GEMMA4_KEYS = {
    "attention.key_length": 32,
    "attention.value_length": 32,
    "attention.key_length_swa": 16,
    "attention.value_length_swa": 16,
    "attention.sliding_window": 8,
    "attention.sliding_window_pattern": [True, True, False] * 2,
    "embedding_length_per_layer_input": 8,
    "final_logit_softcapping": 30.0,
    "rope.freq_base": 1e6,
    "rope.freq_base_swa": 1e4,
    "rope.dimension_count": 32,
    "rope.dimension_count_swa": 16,
}
ROTATED = {"rope_freqs.weight": np.array([1.0] * 4 + [1e30] * 12, dtype=np.float32)}
"""A quarter of 32 numbers."""
CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "glm4moe": (
        "glm4moe",
        "glm4_moe",
        MIXTURE | {"head_dim": 32, "attention_bias": True, "use_qk_norm": True, "norm_topk_prob": True},
        MIXTURE_KEYS
        | {
            **{"attention.key_length": 32, "attention.value_length": 32, "rope.dimension_count": 16},
            **{"expert_gating_func": 2, "expert_weights_norm": True},
        },
    ),
    "glm4moe of groups": (
        "glm4moe",
        "glm4_moe",
        MIXTURE | {"head_dim": 16, "n_group": 2, "topk_group": 1, "norm_topk_prob": False},
        MIXTURE_KEYS | GROUPS | {"rope.dimension_count": 8},
    ),
    "deepseek v2 lite, as older files have it": (
        "deepseek2",
        "deepseek_v2",
        MIXTURE | WIDTHS | {"q_lora_rank": None},
        MIXTURE_KEYS
        | {
            **{"attention.head_count_kv": 4, "attention.key_length": 48, "attention.value_length": 64},
            **{"attention.kv_lora_rank": 32, "rope.dimension_count": 16},
        },
    ),
    "deepseek v2": (
        "deepseek2",
        "deepseek_v2",
        MIXTURE
        | WIDTHS
        | {
            **{"q_lora_rank": 64, "n_group": 2, "topk_group": 1, "topk_method": "group_limited_greedy"},
            **{"rope_parameters": YARN},
        },
        MIXTURE_KEYS
        | LATENT_KEYS
        | GROUPS
        | YARN_KEYS
        | {"attention.q_lora_rank": 64, "expert_gating_func": 1, "rope.scaling.yarn_log_multiplier": 0.07},
    ),
    "deepseek v3": (
        "deepseek2",
        "deepseek_v3",
        MIXTURE | WIDTHS | V3,
        MIXTURE_KEYS
        | LATENT_KEYS
        | GROUPS
        | YARN_KEYS
        | {
            **{"attention.q_lora_rank": 64, "expert_gating_func": 2, "expert_weights_norm": True},
            **{"rope.scaling.yarn_log_multiplier": 0.07},
        },
    ),
    "seed_oss": (
        "seed_oss",
        "seed_oss",
        {"head_dim": 32, "attention_bias": True, "attention_out_bias": False},
        {"attention.key_length": 32, "attention.value_length": 32, "rope.freq_base": 1e4},
    ),
    "ernie4_5": (
        "ernie4_5",
        "ernie4_5",
        {"head_dim": 32, "use_bias": False, "tie_word_embeddings": True},
        {"attention.key_length": 32, "attention.value_length": 32, "rope.freq_base": 5e5},
    ),
    "ernie4_5-moe": (
        "ernie4_5-moe",
        "ernie4_5_moe",
        {
            **{"moe_num_experts": 6, "moe_k": 2, "moe_num_shared_experts": 2, "moe_intermediate_size": 64},
            **{"moe_layer_start_index": 1, "moe_layer_interval": 1, "tie_word_embeddings": True},
        },
        MIXTURE_KEYS | {"interleave_moe_layer_step": 1, "rope.freq_base": 5e5},
    ),
    "mistral3": (
        "mistral3",
        "ministral3",
        {
            "head_dim": 32,
            "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
        },
        YARN_KEYS
        | {
            **{"attention.key_length": 32, "attention.value_length": 32, "attention.temperature_scale": 0.1},
            **{"rope.scaling.yarn_log_multiplier": 1.0},
        },
    ),
    "mistral3, before Ministral 3": ("mistral3", "mistral", {"sliding_window": None}, {}),
    "qwen3vl": ("qwen3vl", "qwen3", {"head_dim": 32}, FAMILIES["qwen3"][2] | {"n_deepstack_layers": 3}),
    "qwen3vlmoe": ("qwen3vlmoe", "qwen3_moe", *FAMILIES["qwen3moe"][1:]),
    "gemma4, the last layers reading others' keys": (
        "gemma4",
        "gemma4_text",
        GEMMA4 | {"num_kv_shared_layers": 3, "use_double_wide_mlp": True},
        GEMMA4_KEYS | {"attention.shared_kv_layers": 3, "feed_forward_length": [96] * 3 + [192] * 3},
    ),
    "gemma4, keys that are values": (
        "gemma4",
        "gemma4_text",
        GEMMA4
        | {
            **{"attention_k_eq_v": True, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0},
        },
        GEMMA4_KEYS | {"embedding_length_per_layer_input": 0, "attention.head_count_kv": [2, 2, 1] * 2},
    ),
}


EXPERTS = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}
CASES["gemma4 moe"] = (
    "gemma4",
    "gemma4_text",
    GEMMA4 | EXPERTS | {"hidden_size_per_layer_input": 0},
    GEMMA4_KEYS
    | {
        **{"embedding_length_per_layer_input": 0, "expert_count": 4, "expert_used_count": 2},
        **{"expert_feed_forward_length": 32},
    },
)
CASES["olmo2, with windows"] = (
    "olmo2",
    "olmo3",
    {
        **{"num_hidden_layers": 4, "sliding_window": 8},
        "rope_parameters": {
            "full_attention": {name: each for name, each in YARN.items() if "scale" not in name},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    YARN_KEYS
    | {"attention.sliding_window": 8, "attention.sliding_window_pattern": [True, True, True, False]},
)


CASES["glm4"] = (
    "glm4",
    "glm4",
    {"head_dim": 32, "attention_bias": True},
    {"attention.key_length": 32, "attention.value_length": 32, "rope.dimension_count": 16},
)
CASES["command-r"] = (
    "command-r",
    "cohere",
    {"logit_scale": 0.25, "tie_word_embeddings": True, "layer_norm_eps": 1e-5},
    {"logit_scale": 0.25, "attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 5e5},
)
CASES["cohere2"] = (
    "cohere2",
    "cohere2",
    CASES["command-r"][2] | {"num_hidden_layers": 4, "sliding_window": 8},
    CASES["command-r"][3] | {"attention.sliding_window": 8, "rope.freq_base": 1e4},
)


CASES |= HYBRIDS
RECURRENT = ("lfm2", "qwen35", "granitehybrid")
STORED_OTHERWISE = ("qwen35", "qwen35moe", "qwen3next", "granitehybrid", "granitehybrid with experts")
"""Decays are stored as their exponentials, and of Qwen's models norms as 1 + weight."""


def made(case: str, file: Path, kinds: dict[str, str] | None = None) -> Any:
    """A tiny model, also in `file`, with the numbers of blocks of `kinds`."""
    arch, model_type, changes, keys = CASES[case]
    model = tiny(model_type, changes)
    generator = torch.Generator().manual_seed(5)
    for name, buffer in model.named_buffers():
        if name.endswith(("e_score_correction_bias", "layer_scalar")):
            buffer.add_(torch.rand(buffer.shape, generator=generator) * 0.3)
    more = ROTATED if arch == "gemma4" else None
    with torch.no_grad():
        write_model(file, arch, model, keys, kinds, more)
    return model


@pytest.mark.parametrize("case", CASES)
def test_a_file_has_the_logits_of_its_model(case: str, tmp_path: Path) -> None:
    model = made(case, tmp_path / "x.gguf")
    read = load_model(str(tmp_path / "x.gguf"), pack=False, canary=False).model
    assert type(read) is type(model)
    if case in STORED_OTHERWISE:
        torch.testing.assert_close(logits(read), logits(model), rtol=1e-5, atol=1e-5)
    else:
        assert torch.equal(logits(read), logits(model))


MIXTURES = ("moe", "deepseek", "qwen3next", "experts", "llama4")
DENSE = [case for case in CASES if not any(part in case for part in MIXTURES) and case not in RECURRENT]


@needs_kernels
@pytest.mark.parametrize("case", [*DENSE, "gemma4 moe"])
def test_a_quantised_file_stays_packed(case: str, tmp_path: Path) -> None:
    model = made(case, tmp_path / "x.gguf", MOST if "gemma4" in case and case in DENSE else {"": "Q8_0"})
    lm = load_model(str(tmp_path / "x.gguf"))
    few = 3 if case == "gemma4 moe" else None  # further on, rounded rows choose other experts
    assert relative_error(packed_logits(lm)[:few], logits(model)[:few]) < 0.04
    planned = outline_model(str(tmp_path / "x.gguf"))
    assert (planned.kernels, planned.weight_type) == (lm.kernels, lm.weight_type)
    assert planned.held.total_bytes == lm.weight_bytes


MOST = {
    f"blk.{layer}.{part}.weight": "Q8_0" for layer in range(6) for part in ("attn_q", "ffn_gate", "ffn_up")
}
"""What of a tiny Gemma 4 has rows of whole blocks."""


@pytest.mark.parametrize("case", [case for case in CASES if case not in DENSE])
def test_others_are_widened_to_the_files_numbers(case: str, tmp_path: Path) -> None:
    model = made(case, tmp_path / "x.gguf", {"": "Q8_0"})
    if case in RECURRENT:
        load_model(str(tmp_path / "x.gguf"))
    elif case != "qwen3vlmoe" and "gemma" not in case:  # whose experts stay packed
        with pytest.raises(ModelError, match="experts of this"):
            load_model(str(tmp_path / "x.gguf"))
    wide = load_model(str(tmp_path / "x.gguf"), dtype="float32", pack=False).model
    for name, tensor in model.state_dict().items():
        found = wide.state_dict()[name]
        if case in STORED_OTHERWISE and name.endswith(("norm.weight", "A_log")):
            torch.testing.assert_close(found, tensor)
        else:
            assert torch.equal(found, tensor), name


def test_all_families_that_are_read_are_tested() -> None:
    assert {*FAMILIES, *(arch for arch, *_ in CASES.values())} == {*ARCHITECTURES, *ARCHS}


def refused(tmp_path: Path, case: str, keys: dict[str, Any], drop: str = "", **tensors: Any) -> str:
    """What is said of a file with other keys, without tensors that `drop` ends the names of, and with others."""
    made(case, tmp_path / "x.gguf")
    content = open_gguf(str(tmp_path / "x.gguf"))
    arch = content.architecture
    own = {name: value for name, value in content.fields.items() if name.startswith(f"{arch}.")}
    own |= {f"{arch}.{key}": value for key, value in keys.items()}
    plain = {name: each.numbers().numpy() for name, each in content.tensors.items()}
    kept = {name: each for name, each in plain.items() if not drop or not name.endswith(drop)}
    own = {name: value for name, value in own.items() if value is not None}
    write(tmp_path / "y.gguf", arch, own, kept | tensors)
    with pytest.raises(ModelError) as caught:
        load_model(str(tmp_path / "y.gguf"))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_files_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    say = partial(refused, tmp_path)
    assert "function is number 1; read is 2 (sigmoid)" in say("glm4moe", {"expert_gating_func": 1})
    assert "lacks weights: model.layers.1.mlp.gate.e_score" in say("glm4moe", {}, "blk.1.exp_probs_b.bias")
    assert "lacks weights: model.layers.1.self_attn.kv_b_proj.weight (blk.1.attn_v_b" in say(
        "deepseek v3", {}, "blk.1.attn_v_b.weight"
    )
    assert "attn_q_b.weight is 192 x 64, and the keys say 128 x 64" in say(
        "deepseek v3", {"attention.key_length_mla": 32}
    )
    assert "without deepseek2.rope.scaling.yarn_log_multiplier" in say(
        "deepseek v3", {"rope.scaling.yarn_log_multiplier": None}
    )
    assert "expert_weights_norm" in say("deepseek v2", {"expert_weights_norm": True})
    assert "16 numbers of each head are rotated, and it has 16" in say(
        "deepseek v3", {"attention.key_length_mla": 16}
    )
    assert "a Ministral 3 has yarn" in say("mistral3", {"rope.scaling.type": "linear"})
    assert "a GLM that reads images" in say("glm4", {"rope.dimension_sections": [8, 8, 0, 0]})
    assert "which of its 3 layers attend" in say("lfm2", {"attention.head_count_kv": 2})
    assert "shortconv.conv.weight is 64 x 4, and the keys say 64 x 3" in say("lfm2", {"shortconv.l_cache": 3})
    own = "gemma4, keys that are values"
    assert "which of its 6 layers have a window" in say(own, {"attention.sliding_window_pattern": [True]})
    assert "not those of a Gemma 4" in say(own, {"attention.head_count_kv": [1, 2, 1] * 2})
    assert "(rope_freqs)" in say(own, {}, **{"rope_freqs.weight": np.linspace(1, 3, 16, dtype=np.float32)})
    assert "a seed_oss model with experts" in say("seed_oss", {"expert_count": 4, "expert_used_count": 2})
    assert "lacks weights: model.layers.1.experts.0.gate_proj" in say(
        "gemma4 moe", {}, "blk.1.ffn_gate_up_exps.weight"
    )
    assert "whose scores grow along the text" in say("deepseek v3", {"attention.temperature_scale": 0.1})


def test_what_gemma4_says_of_its_layers_is_read(tmp_path: Path) -> None:
    made("gemma4, the last layers reading others' keys", tmp_path / "x.gguf")
    config = read_config(open_gguf(str(tmp_path / "x.gguf")))
    assert config.layer_types == GEMMA4["layer_types"]
    assert config.rope_parameters == GEMMA4["rope_parameters"]
    assert (config.num_kv_shared_layers, config.use_double_wide_mlp) == (3, True)
    assert SIZES["intermediate_size"] == config.intermediate_size
