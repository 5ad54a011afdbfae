"""The recorded verdicts of the engines' own parsers, and what the benchmark gives them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.export_parsers import RESULT, VERSIONS, WRONG, cases

GUIDE = Path(__file__).parents[2] / "docs/guides/export.md"
NAMES = {
    "vllm": "vLLM",
    "openvino": "OpenVINO GenAI",
    "transformers": "Transformers",
    "llama-cpp": "llama.cpp",
}


@pytest.mark.parametrize("engine", WRONG)
def test_the_same_settings_are_written_today(engine: str) -> None:
    recorded = json.loads(RESULT.read_text())["engines"].get(engine)
    if recorded is None:
        pytest.skip(f"not recorded for {engine}")
    given, refused = cases(engine, VERSIONS.get(engine))
    assert recorded["records"].keys() == given.keys()
    assert recorded["refused by slipstream"].keys() == refused.keys()
    assert all(verdict["accepted"] for verdict in recorded["records"].values())
    assert recorded["wrong"].keys() == WRONG[engine].keys()
    assert not any(verdict["accepted"] for verdict in recorded["wrong"].values())


def test_the_guide_names_what_was_recorded() -> None:
    guide = " ".join(GUIDE.read_text().split())
    for engine, recorded in json.loads(RESULT.read_text())["engines"].items():
        short = ".".join(recorded["version"].split("-")[0].split(".")[:3])
        assert f"{NAMES[engine]} {short}" in guide
