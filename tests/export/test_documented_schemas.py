"""What is written for SGLang and TensorRT-LLM keeps to what they document."""

from __future__ import annotations

import json

import pytest
import yaml
from documented_schemas import sglang_faults, tensorrt_faults
from export_cases import records
from hypothesis import given, settings

from slipstream.tools.export import ENGINES, ExportError
from slipstream.tools.export.record import SpeculativeRecord

EXAMPLES = settings(max_examples=50, derandomize=True)


@given(record=records())
@EXAMPLES
def test_sglang(record: SpeculativeRecord) -> None:
    try:
        setting = ENGINES["sglang"].to_engine(record)
    except ExportError:
        return
    files = {file.name: json.loads(file.text) for file in setting.files}
    assert sglang_faults(setting.argv[3:], files) == []


@given(record=records())
@EXAMPLES
def test_tensorrt_llm(record: SpeculativeRecord) -> None:
    try:
        setting = ENGINES["tensorrt-llm"].to_engine(record)
    except ExportError:
        return
    for file in setting.files:
        whole = yaml.safe_load(file.text)
        assert tensorrt_faults(whole["speculative_config"]) == []
        needs = whole["speculative_config"]["decoding_type"] in ("DraftTarget", "NGram")
        assert whole.get("disable_overlap_scheduler", False) == needs


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        ("--speculative-algorithm EAGLE3 --speculative-num-steps 4", "its three numbers are given together"),
        ("--speculative-algorithm HYDRA", "--speculative-algorithm HYDRA"),
        ("--speculative-depth", "unknown flag --speculative-depth"),
        (
            "--speculative-algorithm EAGLE3 --speculative-draft-model-path h --speculative-num-steps 4 "
            "--speculative-eagle-topk 1 --speculative-num-draft-tokens 4",
            "a chain has steps + 1 draft tokens",
        ),
    ],
)
def test_the_schema_of_sglang_finds_faults(words: str, fault: str) -> None:
    assert sglang_faults(words.split(), {}) == [fault]


@pytest.mark.parametrize(
    ("config", "fault"),
    [
        ({"decoding_type": "Medusa"}, "unknown decoding_type Medusa"),
        ({"decoding_type": "SA", "max_draft_len": 4, "depth": 4}, "unknown field depth"),
        ({"decoding_type": "Eagle3", "max_draft_len": 4}, "no draft model"),
        (
            {"decoding_type": "SA", "max_draft_len": 4, "draft_len_schedule": {1: 2}},
            "the smallest key, 1, must have max_draft_len",
        ),
    ],
)
def test_the_schema_of_tensorrt_finds_faults(config: dict[str, object], fault: str) -> None:
    assert tensorrt_faults(config) == [fault]
