"""Recorded passes are planned, leave less for the cache, and are refused where they have no room."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MixtralConfig

from slipstream import LLM, SamplingParams
from slipstream.assets import EMBEDDED_DRAFT, EMBEDDED_EAGLE3, EMBEDDED_TARGET
from slipstream.config import EngineConfig, SpeculativeConfig
from slipstream.engine import memory
from slipstream.engine.description import describe
from slipstream.engine.factory import make_engine
from slipstream.errors import CapacityError, ConfigError
from slipstream.models.outline import outline_model
from slipstream.plan.changes import setting_changes
from slipstream.plan.planner import Planner
from slipstream.plan.process import ProcessMemory
from slipstream.plan.sizes import format_bytes
from slipstream.testing.recorded_graph import RecordedExecutor

RECORDED: dict[str, Any] = {
    "attention_backend": "slipstream.testing.recorded_graph:TritonOnCpu",
    "executor": "slipstream.testing.recorded_graph:RecordedExecutor",
    "cpu_kernels": "torch",
}

SPECS: dict[str, dict[str, Any]] = {
    "off": {"method": "off"},
    "draft": {"method": "draft_model", "model": EMBEDDED_DRAFT},
    "eagle3": {"method": "eagle3", "model": EMBEDDED_EAGLE3},
}


def planner(spec: dict[str, Any] | None = None, **engine: Any) -> Planner:
    """With a process that takes nothing."""
    speculative = SpeculativeConfig.from_mapping(spec or {"method": "off"})
    return Planner(EngineConfig(EMBEDDED_TARGET, **engine), speculative, ProcessMemory(0, 0))


@pytest.mark.parametrize("name", SPECS)
def test_recorded_passes_are_planned_as_an_engine_plans_them(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned, small = planner(SPECS[name], **RECORDED), {"max_model_len": 96, "max_num_seqs": 3}
    plan = planned.at(3, 96)
    sizes = {part.name: part.num_bytes for part in plan.parts}
    engine = make_engine(None, SPECS[name], {**small, **RECORDED, "kv_cache_bytes": plan.kv_cache_bytes})
    held = engine.memory_plan
    assert held.recorded_bytes == sizes["recorded passes"] + sizes["recorded draft passes"] > 0
    assert (sizes["recorded draft passes"] > 0) == (name == "draft")
    assert f", recorded passes {format_bytes(held.recorded_bytes)}" in str(held)
    assert describe(engine.config, engine.speculative).memory_plan.recorded_bytes == held.recorded_bytes
    scratch = RecordedExecutor.num_scratch_slots
    per_token = planned.target.kv_bytes_per_token + planned.feature_bytes_per_token
    of_drafts = sum(model.kv_bytes_per_token for model in planned.draft.models)
    assert engine.stats().cache_bytes == (plan.num_slots + scratch) * per_token
    monkeypatch.setattr(RecordedExecutor, "num_scratch_slots", 0)
    without = planned.at(3, 96)
    passes = sum(part.num_bytes for part in without.parts if part.name.startswith("recorded"))
    assert held.recorded_bytes - passes == scratch * (per_token + of_drafts)


def test_what_is_recorded_is_within_what_was_planned() -> None:
    llm = LLM(speculative_config={"method": "ngram"}, max_model_len=600, max_num_seqs=3, **RECORDED)
    for length in (3, 40, 150, 500):
        llm.generate(
            [[5 + n % 90 for n in range(length)]] * 3, SamplingParams(max_tokens=20, ignore_eos=True)
        )
    executor = llm.engine.model.executor
    assert isinstance(executor, RecordedExecutor)
    [recorded] = executor.recorded.values()
    assert len(recorded) > 4
    held = sum(graph.buffer.nbytes for graph in recorded.values())
    held += sum(tensor.nbytes for tensor in executor.outputs.values())
    assert 0 < held < llm.engine.memory_plan.recorded_bytes


def test_no_passes_are_recorded_for_an_eager_executor() -> None:
    on_gpu = {part.name: part.num_bytes for part in planner(device="cuda").at(2, 128).parts}
    eager = {part.name: part.num_bytes for part in planner(device="cuda", executor="eager").at(2, 128).parts}
    assert on_gpu["recorded passes"] > eager["recorded passes"] == 0
    assert "passes that are not recorded" in [
        change.name for change in setting_changes(planner(device="cuda"))
    ]
    assert all("--executor" not in change.flags for change in setting_changes(planner()))


@pytest.mark.parametrize("options", [{}, {"quantization": "int8"}, {"cpu_kernels": "torch"}])
def test_an_executor_that_was_chosen_is_the_one_that_is_planned(options: dict[str, Any]) -> None:
    small = {"max_num_seqs": 3, "max_model_len": 96, "kv_cache_bytes": 2**22, "executor": "eager"}
    engine = make_engine(None, {"method": "off"}, {**small, **options})
    described = describe(engine.config, engine.speculative)
    assert described.memory_plan == engine.memory_plan
    assert described.model.kernels == engine.model.kernels


def test_an_executor_that_cannot_run_is_refused_in_a_plan_too() -> None:
    with pytest.raises(ConfigError, match="'cuda_graph' cannot run llama: our Triton kernels run on a CUDA"):
        planner(executor="cuda_graph")
    with pytest.raises(
        ConfigError, match="'cpu_kernels' cannot run llama: the native kernels run on a CPU, and"
    ):
        planner(device="cuda", executor="cpu_kernels")
    with pytest.raises(ConfigError, match="'native' cannot run llama: the native kernels run on a CPU, and"):
        planner(device="cuda", attention_backend="native")


def test_a_draft_device_need_not_be_there_but_must_be_one() -> None:
    draft = {"method": "draft_model", "model": EMBEDDED_DRAFT}
    assert planner({**draft, "draft_device": "cuda:1"}).draft.models[0].device == torch.device("cuda:1")
    with pytest.raises(ConfigError, match="unknown device 'gpu'"):
        planner({**draft, "draft_device": "gpu"})


@pytest.mark.parametrize(("executor", "formats"), [("auto", True), ("cuda_graph", False)])
def test_smaller_weights_are_offered_where_a_gpus_decoder_holds_them(executor: str, formats: bool) -> None:
    on_gpu = planner(device="cuda", executor=executor)
    changes = {change.flags: change.engine for change in setting_changes(on_gpu)}
    assert ("--quantization int8" in changes) == ("--quantization int4" in changes) == formats
    assert "--dtype bfloat16" not in changes  # it computes in 16 bits already
    if formats:
        smaller = planner(device="cuda", **changes["--quantization int4"])
        assert smaller.at(2, 128).peak_bytes < on_gpu.at(2, 128).peak_bytes


def test_experts_that_a_gpus_decoder_does_not_hold_in_a_format_are_refused(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 4}
    MixtralConfig(**sizes, **heads, architectures=["MixtralForCausalLM"]).save_pretrained(tmp_path)
    model = str(tmp_path / "config.json")
    assert outline_model(model, device="cuda").executor_type.name == "cuda_kernels"
    with pytest.raises(ConfigError, match="'int8' is for the CPU and for models that"):
        outline_model(model, device="cuda", quantization="int8")


@pytest.mark.parametrize("kv_cache_bytes", [None, 64 * 2**20])
def test_recorded_passes_leave_less_for_the_cache(
    kv_cache_bytes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"kv_cache_bytes": kv_cache_bytes, "max_model_len": 2048, **RECORDED}
    config, spec = EngineConfig(EMBEDDED_TARGET, **options), SpeculativeConfig("off")
    plan = describe(config, spec).memory_plan
    weights = plan.target_bytes
    for_cache = 2 * (kv_cache_bytes or 64 * 2**20)
    monkeypatch.setattr(memory, "available_bytes", lambda device: weights + plan.recorded_bytes + for_cache)
    planned = describe(config, spec).memory_plan
    share = config.kv_memory_fraction if kv_cache_bytes is None else 0.5
    assert 0.99 * share * for_cache < planned.kv_bytes <= share * for_cache
    monkeypatch.setattr(memory, "available_bytes", lambda device: weights + plan.recorded_bytes // 2)
    with pytest.raises(CapacityError, match=r"beside recorded passes of .*executor eager none") as caught:
        describe(config, spec)
    assert "\n" not in str(caught.value)
    monkeypatch.setattr(memory, "available_bytes", lambda device: weights + for_cache)
    assert describe(replace(config, executor="eager"), spec).memory_plan.recorded_bytes == 0


def test_too_little_memory_of_a_gpu_is_said_before_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "slipstream.engine.factory.load_target", lambda config: pytest.fail("weights are read")
    )
    monkeypatch.setattr("slipstream.engine.description.resolve_device", torch.device)
    monkeypatch.setattr(memory, "available_bytes", lambda device: 2**20)
    with pytest.raises(CapacityError, match="too few for a request"):
        make_engine(None, None, {"device": "cuda"})


def test_what_else_keeps_an_engine_from_a_gpu_is_left_to_loading() -> None:
    with pytest.raises(ConfigError, match="PyTorch sees no GPU"):
        make_engine(None, None, {"device": "cuda"})
