"""The embedded pair by its name, in Python as on the command line."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream import LLM, SamplingParams
from slipstream.assets import EMBEDDED_DRAFT, EMBEDDED_EAGLE3, EMBEDDED_TARGET
from slipstream.assets.embedded import portable
from slipstream.config import EngineConfig, SpeculativeConfig

DRAFT = {"method": "draft_model", "model": "embedded"}


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (DRAFT, {"method": "draft_model", "model": EMBEDDED_DRAFT}),
        ({"model": "embedded"}, {"method": "draft_model", "model": EMBEDDED_DRAFT}),
        ({"method": "eagle3", "model": "embedded"}, {"method": "eagle3", "model": EMBEDDED_EAGLE3}),
        ({"method": "slem", "model": "embedded"}, {"method": "slem", "model": EMBEDDED_DRAFT}),
        (
            {"method": "cascade", "model": "embedded", "draft": {"method": "tli", "model": "embedded"}},
            {
                "method": "cascade",
                "model": EMBEDDED_DRAFT,
                "draft": {"method": "tli", "model": EMBEDDED_DRAFT},
            },
        ),
        (
            {"method": "auto", "drafters": [{"method": "suffix"}, DRAFT]},
            {
                "method": "auto",
                "drafters": [{"method": "suffix"}, {"method": "draft_model", "model": EMBEDDED_DRAFT}],
            },
        ),
        (
            {"method": "ngram", "reasoning": {"model": "embedded"}},
            {"method": "ngram", "reasoning": {"name": "embedded", "model": EMBEDDED_DRAFT}},
        ),
        ({"method": "eagle", "model": "embedded"}, {"method": "eagle", "model": "embedded"}),
    ],
)
def test_a_drafter_that_is_called_embedded_has_its_folder(
    written: dict[str, Any], read: dict[str, Any]
) -> None:
    config = SpeculativeConfig.from_mapping(written).as_mapping()
    assert {key: config[key] for key in read} == read
    assert EMBEDDED_DRAFT not in str(portable(config))
    assert SpeculativeConfig.from_mapping(portable(config)).as_mapping() == config


def test_the_embedded_target_is_a_model_by_its_name(shared_engines: None) -> None:
    assert EngineConfig("embedded") == EngineConfig(EMBEDDED_TARGET)
    llm = LLM("embedded", speculative_config=DRAFT)
    assert llm.engine.config.model == EMBEDDED_TARGET
    [output] = llm.generate("Write a SQL query.", SamplingParams(temperature=0, max_tokens=8))
    assert output.metrics.num_draft_tokens > 0
