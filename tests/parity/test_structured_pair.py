"""Under a schema too, speculation changes speed and nothing else.

40 schemas on the embedded pair, answered in one batch beside unconstrained requests. Each text is the one without
speculation; each answer that ended says what its schema allows, by a reading of the schema that is not llguidance's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence as Seq
from typing import Any

import pytest
import torch

from slipstream import LLM, SamplingParams, StructuredOutput
from slipstream.assets import EMBEDDED_DRAFT, EMBEDDED_EAGLE3
from slipstream.sampling.grammars.grammar import Grammar

MAX_TOKENS = 40
DRAFT = {"method": "draft_model", "model": EMBEDDED_DRAFT}
SPECS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram"},
    "suffix": {"method": "suffix"},
    "suffix-tree": {"method": "suffix", "tree": True},
    "draft-chain": DRAFT,
    "draft-tree": {**DRAFT, "tree_top_k": 3, "num_draft_nodes": 10},
    "draft-fixed-tree": {**DRAFT, "tree_choices": [[0], [1], [0, 0], [1, 0], [0, 0, 0]]},
    "draft-rejection": {**DRAFT, "verifier": "rejection"},
    "draft-block": {**DRAFT, "verifier": "block"},
    "self": {"method": "self"},
    "token-recycling": {"method": "token_recycling"},
    "lookahead": {"method": "lookahead"},
    "jacobi": {"method": "jacobi"},
    "slem": {"method": "slem", "model": EMBEDDED_DRAFT},
    "tli": {"method": "tli", "model": EMBEDDED_DRAFT},
    "layers": {"method": "layer_skip", "skip_layers": [2, 3]},
    "cascade": {"method": "cascade", "model": EMBEDDED_DRAFT, "draft": {"method": "ngram"}},
    "ensemble": {
        "method": "ensemble",
        "members": [{"method": "suffix"}, {"method": "lookahead"}, {**DRAFT, "tree_top_k": 3}],
        "num_draft_nodes": 12,
    },
    "eagle3-tree": {"method": "eagle3", "model": EMBEDDED_EAGLE3},
}
LONG = ("suffix", "draft-fixed-tree", "draft-block", "lookahead", "jacobi", "slem", "layers", "ensemble")
"""What `make test-long` tries."""

TEXT, WHOLE, YES_NO = {"type": "string", "maxLength": 9}, {"type": "integer"}, {"type": "boolean"}


def record(required: Seq[str] | None = None, **properties: Any) -> dict[str, Any]:
    """An object of these properties and no others; all are required unless some are named."""
    names = list(properties) if required is None else list(required)
    return {
        "type": "object",
        "properties": properties,
        "required": names,
        "additionalProperties": False,
    }


def array(items: Any, **limits: int) -> dict[str, Any]:
    return {"type": "array", "items": items, **limits}


SCHEMAS: list[Any] = [
    YES_NO,
    WHOLE,
    {"type": "null"},
    {"type": "number"},
    {"type": "integer", "minimum": 10, "maximum": 99},
    {"type": "integer", "exclusiveMinimum": -5, "exclusiveMaximum": 5},
    {"type": "number", "minimum": 0, "maximum": 1},
    {"const": "exactly this"},
    {"const": {"a": [1, 2, {"b": None}]}},
    {"enum": ["red", "green", "blue"]},
    {"enum": ["one", 2, None, True, [3]]},
    TEXT,
    {"type": "string", "minLength": 3, "maxLength": 5},
    {"type": "string", "pattern": "^[a-f0-9]{8}$"},
    {"type": "string", "pattern": "^(Mr|Ms) [A-Z][a-z]{1,7}$"},
    {"type": "string", "enum": ["", "ä", "日本", "👍", 'say "hi"', "back\\slash", "a\nb"]},
    {"type": "string", "format": "date"},
    {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    {"type": ["boolean", "string"], "maxLength": 4},
    array(WHOLE, maxItems=3),
    array(YES_NO, minItems=2, maxItems=2),
    array({"enum": ["n", "e", "s", "w"]}, minItems=1, maxItems=6),
    array(array({"type": "integer", "minimum": 0, "maximum": 9}, maxItems=2), maxItems=3),
    {"type": "array", "prefixItems": [TEXT, YES_NO], "items": False, "minItems": 2},
    record(name=TEXT),
    record(name=TEXT, age={"type": "integer", "minimum": 0, "maximum": 120}),
    record(ok=YES_NO, reason={"enum": ["fast", "cheap", "good"]}),
    record(["id"], id={"type": "integer", "minimum": 1}, note=TEXT, done=YES_NO),
    record([], x=WHOLE, y=WHOLE),
    record(point=record(x={"type": "integer"}, y={"type": "integer"})),
    record(a=record(b=record(c=record(d=YES_NO)))),
    record(tags=array(TEXT, minItems=1, maxItems=3), size={"enum": ["S", "M", "L"]}),
    record(people=array(record(first=TEXT, old=YES_NO), minItems=1, maxItems=2)),
    record(value={"anyOf": [record(kind={"const": "n"}, n=WHOLE), record(kind={"const": "s"}, s=TEXT)]}),
    record(a_very_long_property_name_indeed={"const": "and its only value"}),
    {"type": "object", "additionalProperties": {"type": "integer"}},
    {"type": "object"},
    {},
    {
        "$defs": {"tree": record(["v"], v=YES_NO, l={"$ref": "#/$defs/tree"}, r={"$ref": "#/$defs/tree"})},
        "$ref": "#/$defs/tree",
    },
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 12}]},
]
PROMPTS = [
    "Describe it as JSON:",
    "The answer is",
    'For example {"name": "Anna", "ok": true} or',
    "[1, 2, 3]\n",
]


def agrees(value: Any, schema: Any, root: Any = None) -> bool:
    """Whether a decoded value is one that the schema allows; of the keywords used here."""
    root = schema if root is None else root
    if isinstance(schema, bool):
        return schema
    if "$ref" in schema:
        return agrees(value, root["$defs"][schema["$ref"].rpartition("/")[2]], root)
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    tests = [
        not kinds or any(_is(value, kind) for kind in kinds),
        "const" not in schema or value == schema["const"],
        "enum" not in schema or value in schema["enum"],
        "anyOf" not in schema or any(agrees(value, part, root) for part in schema["anyOf"]),
        all(agrees(value, part, root) for part in schema.get("allOf", [])),
    ]
    if _is(value, "number"):
        tests += [
            value >= schema.get("minimum", value),
            value <= schema.get("maximum", value),
            value > schema.get("exclusiveMinimum", value - 1),
            value < schema.get("exclusiveMaximum", value + 1),
        ]
    if isinstance(value, str):
        tests += [
            schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value)),
            re.search(schema.get("pattern", ""), value) is not None,
            schema.get("format") != "date" or re.fullmatch(r"\d{4}-\d\d-\d\d", value) is not None,
        ]
    if isinstance(value, list):
        first = schema.get("prefixItems", [])
        tests += [schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value))]
        tests += [agrees(item, part, root) for item, part in zip(value, first, strict=False)]
        tests += [agrees(item, schema.get("items", True), root) for item in value[len(first) :]]
    if isinstance(value, dict):
        properties, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        tests += [name in value for name in schema.get("required", [])]
        tests += [agrees(item, properties.get(name, others), root) for name, item in value.items()]
    return all(tests)


def _is(value: Any, kind: str) -> bool:
    if kind in ("integer", "number"):
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        return not isinstance(value, bool) and (whole or (kind == "number" and isinstance(value, float)))
    types = {"null": type(None), "boolean": bool, "string": str, "array": list, "object": dict}
    return isinstance(value, types[kind])


def jobs(mode: str) -> tuple[list[str], list[SamplingParams]]:
    """Every schema, every other one without whitespace, and four requests that are free."""
    temperature = 0.0 if mode == "greedy" else 0.9
    params = [
        SamplingParams(
            temperature=temperature,
            max_tokens=MAX_TOKENS,
            seed=number,
            structured=StructuredOutput(json_schema=schema, compact=number % 4 > 0),
            logit_bias={1: 2.0},
        )
        for number, schema in enumerate(SCHEMAS)
    ]
    params += [SamplingParams(temperature=temperature, max_tokens=12, seed=number) for number in range(4)]
    return [PROMPTS[number % len(PROMPTS)] for number in range(len(params))], params


def answers(llm: LLM, mode: str) -> list[Any]:
    prompts, params = jobs(mode)
    outputs = llm.generate(prompts, params)
    assert llm.engine.integrity() == []
    assert llm.engine.stats().num_draft_failures == 0
    return outputs


def said(outputs: list[Any]) -> list[tuple[list[int], str, Any]]:
    return [(out.outputs[0].token_ids, out.outputs[0].text, out.outputs[0].finish_reason) for out in outputs]


def num_valid(outputs: list[Any]) -> int:
    """How many constrained answers ended; each must agree with its schema."""
    ended = 0
    for output, schema in zip(outputs, SCHEMAS, strict=False):
        [made] = output.outputs
        if made.finish_reason == "stop":
            ended += 1
            assert agrees(json.loads(made.text), schema), (schema, made.text)
        else:
            assert len(made.token_ids) == MAX_TOKENS
    return ended


@pytest.fixture(scope="module")
def references() -> dict[str, list[tuple[list[int], str, Any]]]:
    llm = LLM(max_num_seqs=16)
    found = {}
    for mode in ("greedy", "seeded"):
        outputs = answers(llm, mode)
        assert num_valid(outputs) >= 28
        found[mode] = said(outputs)
    return found


def speculating(name: str) -> LLM:
    return LLM(speculative_config=SPECS[name], max_num_seqs=5 + 3 * (list(SPECS).index(name) % 5))


@pytest.mark.parametrize("mode", ["greedy", "seeded"])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] if name in LONG else []) for name in SPECS]
)
def test_texts_are_those_without_speculation(name: str, mode: str, references: dict[str, Any]) -> None:
    outputs = answers(speculating(name), mode)
    assert num_valid(outputs) >= 25
    if (
        mode == "greedy" or "verifier" not in SPECS[name]
    ):  # classical verifiers keep the distribution, not the draw
        assert said(outputs) == references[mode]
    metrics = [output.metrics for output in outputs[: len(SCHEMAS)]]
    accepted, steps = (
        sum(getattr(m, f"num_{what}") for m in metrics) for what in ("accepted_tokens", "steps")
    )
    assert accepted > 150
    assert steps < sum(m.num_output_tokens for m in metrics) - 100


@pytest.mark.parametrize("where", ["bonus rows", "inner nodes"])
def test_a_row_without_its_mask_is_found(
    where: str, references: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Grammar.allowed

    def faulty(self: Grammar, output: Seq[int], paths: Seq[Seq[int]], width: int) -> torch.Tensor:
        allowed = right(self, output, paths, width)
        deepest = max(map(len, paths))
        for row, path in enumerate(paths):
            if len(path) > 0 and (len(path) == deepest) == (where == "bonus rows"):
                allowed[row] = True
        return allowed

    monkeypatch.setattr(Grammar, "allowed", faulty)
    prompts, params = jobs("seeded")
    assert said(speculating("draft-chain").generate(prompts, params)) != references["seeded"]


def test_the_reading_of_schemas_has_teeth() -> None:
    refused = [
        (1.5, WHOLE),
        ("abcdef", SCHEMAS[12]),
        ([True], SCHEMAS[20]),
        ({}, SCHEMAS[24]),
        (3, {"enum": [4]}),
    ]
    refused += [({"name": "A", "b": 1}, SCHEMAS[24]), (True, WHOLE), ({"v": 1}, SCHEMAS[38]), (5, SCHEMAS[5])]
    assert not any(agrees(value, schema) for value, schema in refused)
    assert agrees({"v": True, "l": {"v": False}}, SCHEMAS[38])
    assert agrees("ab", SCHEMAS[11])
