"""The table of drafting methods agrees with the drafters, and nothing else lists their names."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

import pytest
from typer.main import get_command

import slipstream
from slipstream.cli.train import app as train
from slipstream.config import SpeculativeConfig
from slipstream.draft.methods import (
    METHODS,
    OFF,
    SELF,
    DraftWeights,
    MethodSpec,
    TargetFeatures,
    full_name,
    kind_of_checkpoint,
    names_from,
    names_in,
    short_name,
    spec_of,
)
from slipstream.draft.registry import DRAFTERS
from slipstream.learn.learners.registry import LEARNERS

SOURCE = Path(slipstream.__file__).parent
OTHER_WORDS = frozenset({"off", "auto", "self", "remote", "suffix", "versions"})
"""Names that are ordinary words of other things too."""
RECORD_FIELDS = frozenset({"ngram"})
"""Fields of the neutral record of an export that are called as a method."""
EXEMPT = frozenset({"assets/embedded.py", "learn/learners/eagle.py", "learn/learners/registry.py"})
"""The embedded drafters, and a learner that is called as a method."""


def test_no_other_file_names_a_method() -> None:
    names = METHODS.keys() - OTHER_WORDS
    found: dict[str, set[str]] = {}
    for file in SOURCE.rglob("*.py"):
        place = file.relative_to(SOURCE).as_posix()
        if place.startswith("draft/") or place in EXEMPT:
            continue
        nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        words = {str(node.value) for node in nodes if isinstance(node, ast.Constant)}
        fields = RECORD_FIELDS if place.startswith("tools/export/") else set()
        if listed := words & names - fields:
            found[place] = listed
    assert found == {}


@pytest.mark.parametrize("spec", METHODS.values(), ids=lambda spec: spec.name)
def test_a_specification_agrees_with_its_drafter(spec: MethodSpec) -> None:
    cls = DRAFTERS.load(spec.name)
    options = {field.name: field for field in dataclasses.fields(cls.Options)}
    required = {name for name, field in options.items() if field.default is dataclasses.MISSING}
    assert spec.needs_model == ("model" in required)
    assert spec.inner == tuple(name for name in spec.inner if name in options)
    assert cls.traits.has_own_model == (spec.weights is DraftWeights.DRAFT_MODEL or spec is SELF)
    assert spec.is_head == (spec.features is not TargetFeatures.NONE)
    assert spec is OFF or spec.short_value in options or spec.short_value == "model"
    assert cls.traits.looks_up or not spec.is_lookup
    assert set(spec.learners) <= set(LEARNERS)
    assert METHODS.keys() >= set(spec.nearest)
    assert spec.help
    assert "summary" not in vars(cls)  # which is for drafters that are not built in


def test_every_trainer_is_a_verb() -> None:
    verbs = get_command(train).commands.keys() - {"regenerate"}  # type: ignore[attr-defined]
    assert {spec.trainer for spec in METHODS.values() if spec.trainer} <= verbs
    assert {METHODS[full_name(verb)].trainer for verb in verbs} <= verbs, "a verb is a method's name or alias"


def test_aliases_and_names_in_other_engines() -> None:
    assert full_name("draft") == "draft_model" == SpeculativeConfig.from_short("draft:PATH").method
    assert short_name("draft_model") == "draft"
    assert full_name("dspark") == short_name("dflash") == "dflash"
    assert full_name("package:Drafter") == short_name("package:Drafter") == "package:Drafter"
    assert spec_of("package:Drafter") is None
    assert names_in("vllm")["ngram"] == "ngram"
    assert names_from("vllm")["ngram_gpu"] == "ngram"
    assert names_from("vllm")["draft_model"] == "draft_model"  # of tli too, by another key


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"hydra_num_heads": 4}, "hydra"),
        ({"medusa_num_heads": 4}, "medusa"),
        ({"model_type": "medusa"}, "medusa"),
        ({"speculators_model_type": "eagle3"}, "eagle3"),
        ({"draft_vocab_size": 100}, "eagle3"),
        ({"speculators_model_type": "dspark"}, "dflash"),
        ({"dflash_config": {}, "draft_vocab_size": 100}, "dflash"),
        ({"architectures": ["Qwen3DSparkModel"]}, "dflash"),
        ({"architectures": ["MuseGlimmerAssistant"], "model_type": "muse_glimmer_assistant"}, "dflash"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "eagle3"),
        ({"speculators_model_type": "peagle"}, "peagle"),
        ({"architectures": ["LlamaForCausalLMEagle3"], "pard_token": 7}, "peagle"),
        ({"architectures": ["LlamaForCausalLM"], "pard_token": 7}, "pard"),
        ({"architectures": ["EagleLlamaForCausalLM"]}, "eagle"),
        ({"architectures": ["LlamaForCausalLM"]}, "draft_model"),
        ({}, "draft_model"),
    ],
)
def test_the_kind_of_a_checkpoint(config: dict[str, object], kind: str) -> None:
    assert kind_of_checkpoint(config) == kind
