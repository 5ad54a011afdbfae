"""The int8 target as its own draft: its options, its refusals, and what it costs in memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream import LLM, SamplingParams
from slipstream.assets import EMBEDDED_TARGET
from slipstream.config import SpeculativeConfig
from slipstream.draft.model.self_model import SelfOptions
from slipstream.draft.registry import validate
from slipstream.errors import ConfigError


def test_the_short_form_names_the_quantization() -> None:
    assert validate(SpeculativeConfig.from_short("self:int8"))[1] == SelfOptions(quantization="int8")
    assert validate(SpeculativeConfig.from_short("self"))[1] == SelfOptions()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantization": "int3"}, "unknown self quantization 'int3'"),
        (
            {"model": "draft"},
            "self model='draft' is vLLM's and is not available here; this drafter has no model",
        ),
        ({"num_speculative_tokens": 0}, "self num_speculative_tokens must be a whole number of at least 1"),
        ({"num_draft_nodes": 4}, "self num_draft_nodes is for trees"),
        ({"draft_sample_method": "magic"}, "unknown draft_sample_method 'magic'"),
    ],
)
def test_wrong_options_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(SpeculativeConfig("self", options=options))


def test_a_quantised_target_has_no_cheaper_self() -> None:
    with pytest.raises(ConfigError, match="the target is int8 already"):
        LLM(speculative_config={"method": "self"}, quantization="int8")


def test_nearly_every_draft_token_is_accepted_and_the_memory_is_half_of_the_targets() -> None:
    llm = LLM(speculative_config={"method": "self", "num_speculative_tokens": 4})
    (output,) = llm.generate(
        ["The quick brown fox"], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    )
    assert output.metrics.acceptance_rate > 0.8
    target = llm.engine.model.weight_bytes
    draft = llm.engine.drafter.memory_bytes() - llm.engine.drafter.cache.memory_bytes()  # type: ignore[attr-defined]
    assert 0.4 * target < draft < 0.6 * target


def test_the_targets_tokenizer_may_lie_elsewhere(tmp_path: Path) -> None:
    for file in Path(EMBEDDED_TARGET).iterdir():
        if file.name in ("config.json", "model.safetensors"):
            (tmp_path / file.name).symlink_to(file)
    llm = LLM(str(tmp_path), tokenizer=EMBEDDED_TARGET, speculative_config={"method": "self"})
    assert llm.engine.drafter.tokenizer is llm.engine.tokenizer  # type: ignore[attr-defined]
