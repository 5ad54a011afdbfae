"""A head that ships for a fetched model is found on the command line, and must be asked for."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from slipstream.assets.embedded import SMOLLM2_DRAFTERS
from slipstream.cli.flags.speculation import SpeculationFlags, speculative_config
from slipstream.cli.main import app


@pytest.mark.parametrize(
    ("spec", "method"), [(None, "off"), ("off", "off"), ("eagle3", "eagle3"), ("auto", "auto")]
)
def test_a_head_must_be_asked_for(spec: str | None, method: str, smollm2: str) -> None:
    config = speculative_config(SpeculationFlags(spec=spec), smollm2)
    assert config.method == method
    own = {
        "model": SMOLLM2_DRAFTERS["eagle3"],
        "num_speculative_tokens": 2,
        "tree_top_k": 1,
        "num_draft_nodes": None,
    }
    both = {"drafters": [{"method": "suffix"}, {"method": "eagle3", **own}]}
    assert config.options == {"eagle3": own, "auto": both}.get(method, {})


@pytest.mark.parametrize(
    "flags",
    [
        SpeculationFlags(spec="eagle3:smollm2"),
        SpeculationFlags(speculative_config='{"method": "eagle3"}'),
        SpeculationFlags(speculative_config='{"method": "eagle3", "model": "smollm2"}'),
    ],
    ids=str,
)
def test_its_own_head_is_the_same_however_it_is_named(flags: SpeculationFlags, smollm2: str) -> None:
    assert speculative_config(flags, smollm2) == speculative_config(SpeculationFlags(spec="eagle3"), smollm2)


def test_given_keys_of_its_own_head_count(smollm2: str) -> None:
    flags = SpeculationFlags(speculative_config='{"method": "eagle3", "tree_top_k": 4}')
    options = speculative_config(flags, smollm2).options
    assert (options["tree_top_k"], options["num_speculative_tokens"]) == (4, 2)


def test_generate_says_that_there_is_a_head_and_drafts_with_it(smollm2: str) -> None:
    asked = [
        "generate",
        "Why is the sky blue?",
        "--model",
        smollm2,
        "--temperature",
        "0",
        "--max-tokens",
        "16",
    ]
    found = {}
    for spec in ([], ["--spec", "eagle3"]):
        result = CliRunner().invoke(app, [*asked, "--json", *spec])
        assert result.exit_code == 0, result.output
        assert ("ships with Slipstream: --spec eagle3 drafts with it" in result.stderr) == (not spec)
        found[bool(spec)] = json.loads(result.stdout)
    texts = [each["requests"][0]["outputs"][0]["text"] for each in found.values()]
    assert texts[0] == texts[1]
    assert found[True]["speculation"]["method"] == "eagle3"
    assert found[True]["requests"][0]["outputs"][0]["metrics"]["num_accepted_tokens"] > 0
