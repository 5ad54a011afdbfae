"""The target in fewer bits as its own draft: left out or refused where the copy would read as much as the target."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream import LLM
from slipstream.assets import EMBEDDED_TARGET
from slipstream.config import EngineConfig, SpeculativeConfig
from slipstream.draft.model.self_model import no_gain
from slipstream.draft.registry import create_drafter, footprints
from slipstream.errors import ConfigError
from slipstream.models.outline import outline_model
from slipstream.models.unloaded import shared_outlines
from slipstream.plan.planner import Planner
from slipstream.plan.process import ProcessMemory
from slipstream.tools.advise.candidates import own_draft
from slipstream.tools.export.checkpoints.gguf_models import finish, model_writer
from tests.kit.gguf_files import requantised

pytest.importorskip("gguf", reason="the extra `export` is not installed")

SMALL = {"kv_cache_bytes": 2**23, "max_num_seqs": 2, "max_model_len": 64}
COPIES: list[dict[str, Any]] = [
    {"method": "self"},
    {"method": "self", "quantization": "int4"},
    {"method": "layer_skip", "skip_layers": [], "quantization": "int8"},
    {"method": "cascade", "draft": {"method": "ngram"}},
]


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The embedded target in llama.cpp's blocks of 8 bits."""
    folder = tmp_path_factory.mktemp("quantised")
    finish(model_writer(EMBEDDED_TARGET, folder / "plain.gguf"))
    return str(requantised(folder / "target.gguf", folder / "plain.gguf", "Q8_0"))


@pytest.fixture(scope="module")
def auto(quantised: str) -> LLM:
    return LLM(quantised, speculative_config={"method": "auto"}, **SMALL)


def test_auto_holds_no_second_copy_of_a_quantised_file(auto: LLM) -> None:
    assert auto.engine.drafter.names == ["suffix"]  # type: ignore[attr-defined]
    assert auto.engine.memory_plan.draft_bytes == 0
    assert auto.engine.drafter.drafting_models() == []


def test_info_says_why_the_target_cannot_draft_for_itself(auto: LLM) -> None:
    _, own = footprints(auto.engine.drafter.context)["self"]
    assert own.missing == (
        "cannot gain speed: its file holds the target's weights quantised (Q8_0), and a copy keeps them so"
    )


@pytest.mark.parametrize("options", COPIES, ids=lambda one: "-".join(map(str, one.values()))[:20])
def test_a_copy_that_is_asked_for_is_refused_by_name(auto: LLM, quantised: str, options: Any) -> None:
    message = f"{options['method']} cannot draft more cheaply than the target"
    with pytest.raises(ConfigError, match=message):
        create_drafter(SpeculativeConfig.from_mapping(options), auto.engine.drafter.context)
    with pytest.raises(ConfigError, match=message):
        plan(quantised, options)


def test_advice_does_not_consider_it(quantised: str) -> None:
    assert own_draft(None, "cpu", quantised) is None
    assert own_draft(None, "cpu", EMBEDDED_TARGET) is not None


def test_only_the_weights_that_a_file_holds_quantised_stay_as_they_are(quantised: str) -> None:
    """Formats of the others count as far as there are others."""
    assert no_gain("int8", outline_model(EMBEDDED_TARGET)) == ""
    assert (
        no_gain("int8", outline_model(EMBEDDED_TARGET, quantization="int8")) == "the target is int8 already"
    )
    assert "and a copy keeps them so" in no_gain("int4", outline_model(quantised))


@pytest.mark.parametrize("method", ["self", "auto"])
def test_info_and_plan_say_the_same_bytes(method: str) -> None:
    llm = LLM(speculative_config={"method": "off"}, **SMALL)
    _, told = footprints(llm.engine.drafter.context)[method]
    [model] = plan(EMBEDDED_TARGET, {"method": method}).draft.models
    assert told.weight_bytes == model.held.total_bytes
    if method == "self":
        assert told.traits.kv_bytes_per_token == model.kv_bytes_per_token


def test_a_draft_model_as_large_as_the_target_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    draft = {"method": "draft_model", "model": EMBEDDED_TARGET}
    LLM(speculative_config=draft, **SMALL)
    [warning] = [each.getMessage() for each in caplog.records if "cannot gain speed" in each.getMessage()]
    assert "16.7 MiB of weights and the target 16.7 MiB" in warning


def plan(model: str, options: dict[str, Any]) -> Planner:
    with shared_outlines():
        engine = EngineConfig(model=model)
        return Planner(engine, SpeculativeConfig.from_mapping(options), ProcessMemory(0, 0))
