"""vLLM's keys for an engine and for speculation: mapped, dropped with a notice, or refused with what to do instead."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.config import EngineConfig, SpeculativeConfig, options_from
from slipstream.draft.registry import validate
from slipstream.engine import memory
from slipstream.engine.memory import plan_memory
from slipstream.errors import CapacityError, ConfigError
from slipstream.vllm_names import ANYTHING, ENGINE, METHODS_ELSEWHERE, SPECULATIVE, own_engine_keys

VLLM_ENGINE_DEFAULTS: dict[str, Any] = {
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "data_parallel_size": 1,
    "enforce_eager": False,
    "swap_space": 4,
    "cpu_offload_gb": 0,
    "block_size": 16,
    "max_seq_len_to_capture": 8192,
    "max_logprobs": 20,
    "disable_log_stats": True,
    "disable_custom_all_reduce": False,
    "tokenizer_mode": "auto",
    "skip_tokenizer_init": False,
    "load_format": "auto",
    "hf_overrides": {},
    "task": "auto",
    "compilation_config": None,
    "limit_mm_per_prompt": None,
    "enable_lora": False,
    "scheduling_policy": "fcfs",
    "enable_chunked_prefill": True,
    "structured_outputs_config": {"backend": "auto"},
}


def test_vllms_defaults_ask_for_nothing(caplog: pytest.LogCaptureFixture) -> None:
    assert own_engine_keys(VLLM_ENGINE_DEFAULTS) == {}
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert all(name in record.message for name in VLLM_ENGINE_DEFAULTS)
    caplog.clear()
    assert own_engine_keys({"dtype": "float32"}) == {"dtype": "float32"}
    assert not caplog.records


def test_keys_that_mean_the_same_are_mapped() -> None:
    given = {
        "dtype": torch.bfloat16,
        "kv_cache_memory_bytes": 5,
        "max_num_seqs": None,
        "enable_prefix_caching": None,
        "max_model_len": -1,
        "gpu_memory_utilization": 0.5,
        "generation_config": "vllm",
    }
    assert own_engine_keys(given) == {
        "dtype": "bfloat16",
        "kv_cache_bytes": 5,
        "max_model_len": None,
        "gpu_memory_utilization": 0.5,
        "generation_config": "vllm",
    }
    assert own_engine_keys({"dtype": "half"}) == {"dtype": "float16"}
    with pytest.raises(ConfigError, match="differ; omit one"):
        own_engine_keys({"kv_cache_memory_bytes": 5, "kv_cache_bytes": 6})


@pytest.mark.parametrize("name", sorted(ENGINE))
def test_every_other_value_is_refused_with_what_to_do(name: str) -> None:
    assert name not in EngineConfig.__dataclass_fields__
    assert own_engine_keys({name: None}) == {}
    for value in ENGINE[name].neutral:
        if value is ANYTHING:
            assert own_engine_keys({name: "whatever"}) == {}
            return
        assert own_engine_keys({name: value}) == {}
    with pytest.raises(ConfigError) as error:
        own_engine_keys({name: "something else"})
    assert str(error.value).startswith(
        f"engine key {name}='something else' is vLLM's and is not available here; "
    )
    assert "\n" not in str(error.value)


def test_true_is_not_one() -> None:
    with pytest.raises(ConfigError, match="one process on one device"):
        own_engine_keys({"tensor_parallel_size": True})
    with pytest.raises(ConfigError, match="tensor_parallel_size=2"):
        own_engine_keys({"tensor_parallel_size": 2})


def test_keys_that_nobody_knows_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"'max_model_length'; did you mean 'max_model_len'"):
        options_from(EngineConfig, {"model": "m", **own_engine_keys({"max_model_length": 5})}, "engine")


# --- memory ---------------------------------------------------------------------------------------------------


class Model:
    """As much of one as the plan reads."""

    context_length = 10_000
    kv_bytes_per_token = 1_000
    states = ()
    encoded_bytes = 0
    kv_unit = 64
    weight_bytes = 40_000_000
    device = torch.device("cpu")
    quantization = None
    weight_type = "float32"
    cache_dtype = torch.float32


def slots(monkeypatch: pytest.MonkeyPatch, free: int, **options: Any) -> int:
    monkeypatch.setattr(memory, "available_bytes", lambda device: free)
    monkeypatch.setattr(memory, "total_bytes", lambda device: 100_000_000)
    config = EngineConfig("m", max_model_len=2_000, **options)
    return plan_memory(config, Model(), 10_000_000, 0, 4).num_slots  # type: ignore[arg-type]


def test_utilization_is_of_all_memory_and_includes_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    assert slots(monkeypatch, 50_000_000, gpu_memory_utilization=0.7) == 20_000
    assert slots(monkeypatch, 50_000_000, gpu_memory_utilization=0.6, kv_memory_fraction=1.0) == 10_000
    assert slots(monkeypatch, 5_000_000, gpu_memory_utilization=0.9) == 5_000  # no more than is free
    assert slots(monkeypatch, 50_000_000, gpu_memory_utilization=0.7, kv_cache_bytes=3_000_000) == 3_000
    assert slots(monkeypatch, 50_000_000, kv_memory_fraction=0.2) == 10_000
    with pytest.raises(
        CapacityError, match=r"gpu_memory_utilization 0\.5 is .*weights alone take .*; raise it"
    ):
        slots(monkeypatch, 50_000_000, gpu_memory_utilization=0.5)
    with pytest.raises(ConfigError, match="gpu_memory_utilization must be in"):
        slots(monkeypatch, 50_000_000, gpu_memory_utilization=1.5)


# --- speculation ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "method"),
    [
        ("ngram", "ngram"),
        ("[ngram]", "ngram"),
        ("suffix", "suffix"),
        ("some/EAGLE-LLaMA3.1-Instruct-8B", "eagle"),
        ("some/EAGLE3-LLaMA3.1-Instruct-8B", "eagle3"),
        ("some/Qwen3-8B_eagle3", "eagle3"),
        ("some/medusa-vicuna", "medusa"),
        ("some/gemma-4-E2B-it-assistant", "mtp"),
        ("some/gemma-4-E2B-it", "draft_model"),
        ("some/Llama-3.2-1B", "draft_model"),
        (Path("some/Llama-3.2-1B"), "draft_model"),
    ],
)
def test_the_method_is_told_by_the_name(model: str, method: str) -> None:
    assert SpeculativeConfig.from_mapping({"model": model, "num_speculative_tokens": 3}).method == method


@pytest.mark.parametrize(
    ("config", "method"),
    [
        ({"model_type": "medusa"}, "medusa"),
        ({"model_type": "hydra"}, "hydra"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "eagle3"),
        ({"architectures": ["LlamaForCausalLMEagle"]}, "eagle"),
        ({"speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"]}, "eagle3"),
        ({"model_type": "deepseek_mtp"}, "mtp"),
        ({"model_type": "gemma4_assistant"}, "mtp"),
        ({"model_type": "gemma4_unified_assistant"}, "mtp"),
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, "draft_model"),
        ([], "draft_model"),
    ],
)
def test_the_method_is_told_by_the_folder(tmp_path: Path, config: Any, method: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert SpeculativeConfig.from_mapping({"model": str(tmp_path)}).method == method


def test_without_a_method_there_must_be_a_model() -> None:
    for given in ({}, {"num_speculative_tokens": 3}, {"method": None, "model": None}):
        with pytest.raises(ConfigError, match='needs "method", or a "model" that implies it'):
            SpeculativeConfig.from_mapping(given)


def test_speculation_as_vllms_examples_write_it() -> None:
    written = {
        "method": "ngram",
        "model": "ngram",
        "num_speculative_tokens": 2,
        "prompt_lookup_max": 5,
        "prompt_lookup_min": 2,
        "draft_tensor_parallel_size": 1,
        "rejection_sample_method": "standard",
        "quantization": None,
    }
    config = SpeculativeConfig.from_mapping(written)
    assert config.verifier == "coupled"
    options = validate(config)[1]
    assert (options.num_speculative_tokens, options.prompt_lookup_min, options.prompt_lookup_max) == (2, 2, 5)
    drafted = {
        "method": "draft_model",
        "model": "some/draft",
        "num_speculative_tokens": 3,
        "enforce_eager": True,
        "max_model_len": 2048,
        "parallel_drafting": False,
        "disable_padded_drafter_batch": False,
    }
    assert validate(SpeculativeConfig.from_mapping(drafted))[1].model == "some/draft"
    assert SpeculativeConfig.from_mapping(drafted | {"use_heterogeneous_vocab": True}).method == "tli"
    assert SpeculativeConfig.from_mapping(drafted | {"rejection_sample_method": "block"}).verifier == "block"
    assert SpeculativeConfig.from_mapping({"method": "ngram_gpu"}).method == "ngram"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"draft_tensor_parallel_size": 2}, "one process on one device"),
        ({"rejection_sample_method": "synthetic"}, "only accepted where"),
        ({"rejection_sample_method": "block", "verifier": "rejection"}, "differ; omit one"),
        ({"num_speculative_tokens_per_batch_size": [[1, 8, 3]]}, '"method": "auto"'),
        ({"disable_by_batch_size": 4}, '"method": "auto"'),
        ({"model": "some/draft"}, "this drafter has no model"),
        ({"prompt_lookup": 3}, "unknown ngram key 'prompt_lookup'; did you mean"),
    ],
)
def test_speculation_that_cannot_be_had(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        validate(SpeculativeConfig.from_mapping({"method": "ngram", **given}))


@pytest.mark.parametrize("method", sorted(METHODS_ELSEWHERE))
def test_methods_that_are_not_here(method: str) -> None:
    with pytest.raises(ConfigError, match=f"drafter '{method}' is vLLM's and is not available here; "):
        validate(SpeculativeConfig(method))


def test_a_drafters_own_option_is_not_taken_for_vllms() -> None:
    assert "quantization" in SPECULATIVE
    config = SpeculativeConfig("draft_model", options={"model": "m", "quantization": "int8"})
    assert validate(config)[1].quantization == "int8"
