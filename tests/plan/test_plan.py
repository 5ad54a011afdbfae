"""What is planned from configurations is what an engine then holds."""

from __future__ import annotations

import itertools
import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import LLM
from slipstream.assets import EMBEDDED_DRAFT, EMBEDDED_EAGLE3, EMBEDDED_TARGET
from slipstream.config import EngineConfig, SpeculativeConfig
from slipstream.engine import memory
from slipstream.engine.description import describe
from slipstream.engine.factory import make_engine
from slipstream.errors import ConfigError, ModelError
from slipstream.models.cpu.pages import SLICE_WEIGHTS
from slipstream.plan import process
from slipstream.plan.changes import fitting_changes, setting_changes
from slipstream.plan.deployment import PartKind
from slipstream.plan.fitting import largest_batch, longest_context
from slipstream.plan.planner import Planner
from slipstream.plan.process import ProcessMemory
from slipstream.profiling.pass_times import profile_key
from tests.kit.block_heads import block_head

PROCESS = ProcessMemory(400 * 2**20, 410 * 2**20)
DRAFT: dict[str, Any] = {"method": "draft_model", "model": EMBEDDED_DRAFT}
DRAFTERS: dict[str, dict[str, Any]] = {
    "off": {"method": "off"},
    "ngram": {"method": "ngram"},
    "suffix": {"method": "suffix", "tree": True},
    "token_recycling": {"method": "token_recycling"},
    "siblings": {"method": "siblings"},
    "lookahead": {"method": "lookahead"},
    "jacobi": {"method": "jacobi"},
    "draft": DRAFT,
    "draft tree": {**DRAFT, "tree_top_k": 3, "num_draft_nodes": 12, "quantization": "int8"},
    "self": {"method": "self"},
    "layer_skip": {"method": "layer_skip", "exit_layer": 2},
    "eagle3": {"method": "eagle3", "model": EMBEDDED_EAGLE3},
    **{f"dflash, {kind}": {"method": "dflash", "model": kind} for kind in ("mask", "mixed", "rnn", "pruned")},
    "cascade": {"method": "cascade", "model": EMBEDDED_DRAFT, "draft": {"method": "ngram"}},
    "cascade of the target": {"method": "cascade", "draft": DRAFT},
    "cascade of layers": {"method": "cascade", "exit_layer": 2, "draft": {"method": "suffix"}},
    "auto": {"method": "auto", "drafters": [DRAFT, {"method": "suffix"}]},
    "ensemble": {
        "method": "ensemble",
        "members": [{"method": "ngram"}, {"method": "eagle3", "model": EMBEDDED_EAGLE3}],
    },
    "steps": {"method": "off", "reasoning": {"model": EMBEDDED_DRAFT}},
    "steps beside the same draft": {**DRAFT, "reasoning": {"model": EMBEDDED_DRAFT}},
    "steps beside another draft": {
        "method": "eagle3",
        "model": EMBEDDED_EAGLE3,
        "reasoning": {"model": EMBEDDED_DRAFT},
    },
}


def given(name: str) -> dict[str, Any]:
    """The configuration of a drafter, with a head that is written when it is needed."""
    spec = DRAFTERS[name]
    return {**spec, "model": block_head(spec["model"])} if spec["method"] == "dflash" else spec


def planner(spec: dict[str, Any] | None = None, model: str = EMBEDDED_TARGET, **engine: Any) -> Planner:
    """With a process of a known size."""
    return Planner(
        EngineConfig(model, **engine), SpeculativeConfig.from_mapping(spec or {"method": "off"}), PROCESS
    )


@pytest.fixture(scope="module")
def target() -> LLM:
    return LLM(max_model_len=96, max_num_seqs=3)


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_plan_is_what_an_engine_holds(target: LLM, name: str) -> None:
    spec = given(name)
    plan = planner(spec).at(3, 96)
    options = {
        "max_num_seqs": plan.batch,
        "max_model_len": plan.context,
        "kv_cache_bytes": plan.kv_cache_bytes,
        "allow_lossy": "reasoning" in spec,
    }
    engine = make_engine(None, spec, options, like=target.engine)
    held, draft = engine.memory_plan, planner(spec).draft
    assert held.num_slots == plan.num_slots
    assert held.kv_bytes_per_token == plan.kv_bytes_per_token
    assert draft.traits.max_nodes == engine.drafter.traits.max_nodes
    assert draft.traits.feature_layers == engine.drafter.traits.feature_layers
    assert draft.traits.tables == engine.drafter.traits.tables
    own = draft.head_bytes + sum(model.held.total_bytes for model in draft.models)
    assert own == pytest.approx(held.draft_bytes, rel=0.02, abs=1000)
    sizes = {part.name: part.num_bytes for part in plan.parts}
    assert sizes["weights, float16"] + sizes["other weights"] == held.target_bytes
    assert sizes["logits"] == held.logit_bytes
    assert sizes["drafter's tables"] == held.table_bytes


@pytest.mark.parametrize("name", DRAFTERS)
def test_an_engine_is_described_without_its_weights_as_it_is_with_them(target: LLM, name: str) -> None:
    spec = given(name)
    options = {
        "max_num_seqs": 3,
        "max_model_len": 96,
        "kv_cache_bytes": 2**22,
        "allow_lossy": "reasoning" in spec,
    }
    engine = make_engine(None, spec, options, like=target.engine)
    described = describe(engine.config, engine.speculative)
    held, planned = engine.memory_plan, described.memory_plan
    assert planned.draft_bytes == pytest.approx(held.draft_bytes, rel=0.02, abs=1000)
    assert replace(planned, draft_bytes=0) == replace(held, draft_bytes=0)
    assert described.end_token_ids == engine.end_token_ids == {1}
    assert described.tokenizer.get_vocab() == engine.tokenizer.get_vocab()
    assert (described.draft_model is not None) == (
        name in ("draft", "draft tree", "self", "steps beside the same draft")
    )
    if described.draft_model is not None:
        assert engine.draft_model is not None
        assert profile_key(described.draft_model) == profile_key(engine.draft_model)
    assert described.drafters[engine.speculative.method][1] == described.draft


def test_what_models_will_hold_is_not_taken_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda device: 2**26)
    config = EngineConfig(EMBEDDED_TARGET)
    described = describe(config, SpeculativeConfig.from_mapping(DRAFT))
    plan = described.memory_plan
    free = 2**26 - plan.target_bytes - plan.draft_bytes
    assert plan.num_slots == int(free * config.kv_memory_fraction) // plan.kv_bytes_per_token


def test_the_engines_own_plan_counts_the_passes(target: LLM) -> None:
    plan = target.engine.memory_plan
    sizes = {part.name: part.num_bytes for part in planner().at(3, 96).parts}
    assert plan.activation_bytes == sizes["activations"] > 0
    assert "passes" in str(plan)


def test_more_never_takes_less() -> None:
    planned = planner(DRAFT)
    peaks = [planned.at(batch, 256).peak_bytes for batch in (1, 2, 8, 32)]
    assert peaks == sorted(peaks)
    assert peaks[0] < peaks[-1]
    lengths = [planned.at(4, context).peak_bytes for context in (1, 100, 1000, 2048)]
    assert lengths == sorted(lengths)
    plan = planned.at(4, 100)
    assert plan.peak_bytes == max(plan.running_bytes, plan.loading_bytes)
    assert sum(plan.of_kind(kind) for kind in {part.kind for part in plan.parts}) == plan.running_bytes


def test_without_the_native_kernels_a_quantised_target_needs_its_unpacked_weights_at_the_start() -> None:
    small, plain = (
        planner(quantization=fmt, dtype="float32", cpu_kernels="torch").at(1, 64) for fmt in ("int8", None)
    )
    assert small.running_bytes < plain.running_bytes - 20 * 2**20
    assert small.loading_bytes > small.running_bytes
    assert small.loading_bytes > plain.running_bytes - 16 * 2**20


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere weights are read whole")
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_weights_that_are_read_as_they_are_stored_are_never_held_unpacked(quantization: str | None) -> None:
    wide = planner(quantization=quantization, dtype="float32").at(1, 64)
    kept = planner(quantization=quantization).at(1, 64)
    assert wide.loading_bytes < wide.running_bytes
    assert wide.stages[0] == kept.stages[0]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere weights are read whole")
@pytest.mark.parametrize("quantization", [None, "int8", "bfloat16"])
def test_weights_that_stay_in_their_file_are_never_held_whole(quantization: str | None) -> None:
    """But those of another 16-bit type are made of all of them at once."""
    planned = planner(quantization=quantization)
    target = planned.target
    whole = PROCESS.loading_bytes + target.unpacked_bytes
    if quantization == "bfloat16":
        assert planned.at(1, 64).loading_bytes > whole
    else:
        limit = PROCESS.loading_bytes + target.held.total_bytes + 6 * SLICE_WEIGHTS
        assert planned.at(1, 64).loading_bytes <= limit


def test_what_is_said_to_fit_is_the_most_that_fits() -> None:
    planned, memory = planner(DRAFT, kv_cache_dtype="float32"), 600 * 2**20
    context = longest_context(planned, 8, memory)
    assert context is not None
    assert planned.at(8, context).peak_bytes <= memory < planned.at(8, context + 1).peak_bytes
    batch = largest_batch(planned, 512, memory)
    assert batch is not None
    assert planned.at(batch, 512).peak_bytes <= memory < planned.at(batch + 1, 512).peak_bytes
    assert longest_context(planned, 1, 100 * 2**20) is None
    assert longest_context(planned, 1, 2**40) == 2048


@pytest.mark.long
def test_every_change_fits_when_it_is_planned_again() -> None:
    planned, memory = planner(DRAFT, kv_cache_dtype="float32"), 700 * 2**20
    changes = fitting_changes(planned, 32, 2048, memory)
    assert len(changes) == 3
    assert [change.weight for change in changes] == sorted(change.weight for change in changes)
    for change in changes:
        config, spec, batch, context = planned.config, planned.speculative, 32, 2048
        for one in change.changes:
            config, spec = replace(config, **one.engine), one.speculative or spec
            batch, context = one.batch or batch, one.context or context
        again = Planner(config, spec, PROCESS).at(batch, context)
        assert again.peak_bytes == change.plan.peak_bytes <= memory
        assert change.cost
        assert change.flags.startswith("--")
    assert fitting_changes(planned, 1, 64, 2**20) == []


@pytest.mark.parametrize("reasoning", [None, {"model": EMBEDDED_DRAFT}], ids=["exact", "steps"])
def test_the_flags_of_a_change_ask_for_what_was_planned(reasoning: dict[str, Any] | None) -> None:
    planned = planner({"method": "draft_model", "model": EMBEDDED_TARGET, "reasoning": reasoning})
    memory = planned.at(8, 1024).peak_bytes - 20 * 2**20
    changes = [one for change in fitting_changes(planned, 8, 1024, memory) for one in change.changes]
    drafters = [change for change in changes if change.speculative is not None]
    assert "suffix" in {change.speculative.method for change in drafters if change.speculative}
    for change in drafters:
        assert change.speculative is not None
        words = dict(itertools.pairwise(shlex.split(change.flags)))
        if change.speculative == SpeculativeConfig("off"):
            assert words == {"--spec": "off"}
        else:
            told = SpeculativeConfig.from_mapping(json.loads(words["--speculative-config"]))
            assert told == change.speculative


@pytest.mark.parametrize(
    ("cache", "offered"),
    [("float32", ["float16", "int8"]), ("auto", ["int8"]), ("bfloat16", ["int8"]), ("int8", [])],
)
def test_a_narrower_cache_is_offered_and_called_lossy(cache: str, offered: list[str]) -> None:
    planned = planner(kv_cache_dtype=cache)
    changes = {change.name: change for change in setting_changes(planned)}
    names = [name.rpartition(" ")[2] for name in changes if name.startswith("keys and values in")]
    assert names == offered
    for name in offered:
        change = changes[f"keys and values in {name}"]
        assert change.flags == f"--kv-cache-dtype {name}"
        assert "lossy next to" in change.cost
        again = Planner(replace(planned.config, **change.engine), planned.speculative, PROCESS)
        assert again.target.cache_dtype == getattr(torch, name)
        assert again.kv_bytes_per_token < planned.kv_bytes_per_token


def test_a_long_batch_that_does_not_fit_is_told_of_narrower_caches() -> None:
    planned = planner(kv_cache_dtype="float32")
    plan = planned.at(32, 2048)
    cache = plan.of_kind(PartKind.CACHE)
    found = fitting_changes(planned, 32, 2048, plan.peak_bytes - cache // 3)
    assert "keys and values in float16" in [change.name for change in found]
    assert all(change.plan.peak_bytes <= plan.peak_bytes - cache // 3 for change in found)


def test_where_pytorch_attends_no_narrower_cache_is_offered() -> None:
    changes = setting_changes(planner(cpu_kernels="torch"))
    assert not [change for change in changes if "kv_cache_dtype" in change.engine]


def test_a_cheap_change_comes_before_one_that_refuses_requests() -> None:
    spec = {"method": "suffix"}  # a million tokens of past answers
    planned = planner(spec)
    memory = planned.at(4, 512).peak_bytes - 30 * 2**20
    first = fitting_changes(planned, 4, 512, memory)[0]
    assert "past answers" in first.name
    assert "the text stays" in first.cost


def test_a_bare_configuration_is_enough(tmp_path: Path) -> None:
    folder = planner().at(2, 128)
    bare = planner(model=str(Path(EMBEDDED_TARGET) / "config.json")).at(2, 128)
    assert bare.parts == folder.parts


def test_a_device_need_not_be_there() -> None:
    plan = planner(device="cuda").at(2, 128)
    sizes = {part.name: part.num_bytes for part in plan.parts}
    assert sizes["other weights"] + sizes["embedding"] == 2 * 8_749_120  # as in the checkpoint, in 16 bits


@pytest.mark.parametrize("options", [{"device": "cuda"}, {"dtype": "bfloat16", "cpu_kernels": "torch"}])
def test_a_head_beside_a_target_that_is_not_packed(options: dict[str, str]) -> None:
    spec = {"method": "eagle3", "model": EMBEDDED_EAGLE3}
    small, usual = planner(spec, **options).draft, planner(spec, dtype="float32").draft
    assert usual.head_stored_bytes == small.head_stored_bytes
    assert 0.45 < small.head_bytes / usual.head_bytes < 0.55


def test_the_process_is_measured_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path))
    assert not process.is_kept()
    calls = []

    def run(command: list[str], **_: Any) -> Any:
        calls.append(command)
        return type(
            "Done", (), {"returncode": 0, "stdout": json.dumps({"loading_bytes": 1, "running_bytes": 2})}
        )

    monkeypatch.setattr(process.subprocess, "run", run)
    assert process.process_memory() == process.process_memory() == ProcessMemory(1, 2)
    assert len(calls) == 1
    assert process.is_kept()


def test_where_the_process_cannot_be_measured_a_usual_figure_is_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path))
    failed = type("Done", (), {"returncode": 1, "stderr": "no room"})
    monkeypatch.setattr(process.subprocess, "run", lambda *_, **__: failed)
    assert process.process_memory() is process.USUAL
    assert "no room" in caplog.text


def test_a_head_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"has no weights: none of model\.safetensors"):
        planner({"method": "eagle3", "model": str(tmp_path)})
    with pytest.raises(ModelError, match="neither a folder nor a head on the hub"):
        planner({"method": "medusa", "model": "nobody/nothing"})


def test_a_head_that_cannot_be_the_targets_is_refused(tmp_path: Path) -> None:
    spec = {"method": "medusa", "model": str(tmp_path)}
    (tmp_path / "config.json").write_text('{"hidden_size": 64, "vocab_size": 100}')
    torch.save({"0.0.linear.weight": [1, 2]}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(ModelError, match="is not a mapping of names to tensors"):
        planner(spec)
    torch.save({"0.0.linear.weight": torch.zeros(64, 64)}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(ModelError, match="64"):
        planner(spec)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="not a JSON object"):
        planner(spec)


def test_an_eagle_head_of_another_version_is_refused() -> None:
    with pytest.raises(ConfigError, match="is an EAGLE-3 head; use method 'eagle3'"):
        planner({"method": "eagle", "model": EMBEDDED_EAGLE3})


def test_a_context_beyond_the_models_is_refused() -> None:
    with pytest.raises(ConfigError, match="beyond the model's 2048"):
        planner().at(1, 2049)
    with pytest.raises(ConfigError, match="batch must be a whole number of at least 1"):
        planner().at(0, 10)
