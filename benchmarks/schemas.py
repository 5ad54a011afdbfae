"""Answers under JSON schemas: all valid, and the same with speculation as without.

    python -m benchmarks.schemas                  # 500 schemas
    python -m benchmarks.schemas --schemas 20     # a quick look

On the embedded pair, each schema once at temperature 0 and once at 1, speculation off, by suffixes and by the draft
model. The judge of validity is the package `jsonschema`, which has nothing in common with llguidance. Schemas are
drawn from a seed and bounded in length and depth, so that answers end; those that `max_tokens` cuts are counted
apart. Nothing is timed, so the machine may be busy.
"""

from __future__ import annotations

import argparse
import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema

from benchmarks.kept import Kept
from slipstream import LLM, SamplingParams, StructuredOutput
from slipstream.assets import EMBEDDED_DRAFT, sample_prompts
from slipstream.core.metrics.request import RequestMetrics
from slipstream.core.types import FinishReason
from slipstream.engine.outputs import RequestOutput
from slipstream.errors import RequestError
from slipstream.profiling.provenance import provenance
from slipstream.sampling.grammars.compiler import check_followed
from slipstream.text.prompts import encode_chat

RESULT = Path(__file__).parent.parent / "docs/benchmarks/schemas.json"

SPECULATION: dict[str, dict[str, Any] | None] = {
    "off": None,
    "suffix": {"method": "suffix"},
    "draft_model": {"method": "draft_model", "model": EMBEDDED_DRAFT, "num_speculative_tokens": 4},
}
TEMPERATURES = (0.0, 1.0)
WORDS = ("name", "size", "city", "date", "tags", "price", "kind", "note", "owner", "items", "open", "rank")
FORMATS = ("date", "ipv4", "uuid")
PATTERNS = (r"^[A-Z]{2}[0-9]{3}$", r"^(red|green|blue)$", r"^[a-z]+(-[a-z]+)?$")
PREVIEW_FAILURES = 5


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--schemas", type=int, default=500)
    parser.add_argument("--max-tokens", type=int, default=700)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    schemas, num_refused = followed_schemas(options.schemas, options.seed)
    off = LLM(max_num_seqs=16)
    rows = sample_prompts()
    prompts = [
        encode_chat(off.engine.tokenizer, rows[number % len(rows)]["messages"])
        for number in range(len(schemas))
    ]
    cells: list[dict[str, Any]] = []
    kept = Kept(RESULT, vars(options))
    for temperature in TEMPERATURES:
        params = [
            SamplingParams(
                temperature=temperature,
                max_tokens=options.max_tokens,
                seed=number,
                structured=StructuredOutput(json_schema=schema, compact=number % 2 == 1),
            )
            for number, schema in enumerate(schemas)
        ]
        own: list[list[int]] = []
        for name, speculation in SPECULATION.items():
            answered = kept.cell(
                f"{name}, temperature {temperature}",
                partial(answer, speculation, off, prompts, params, schemas, own),
            )
            own = own or answered["token_ids"]
            cells.append({"speculation": name, "temperature": temperature, **answered["judged"]})
            print(json.dumps(cells[-1]), flush=True)
    result = {
        "provenance": provenance(),
        "num_schemas": len(schemas),
        "num_refused_by_llguidance": num_refused,
        "seed": options.seed,
        "max_tokens": options.max_tokens,
        "speculation": {
            name: given and {**given, **({"model": "the embedded draft"} if "model" in given else {})}
            for name, given in SPECULATION.items()
        },
        "results": cells,
    }
    kept.finish(result)


def answer(
    speculation: dict[str, Any] | None,
    off: LLM,
    prompts: list[list[int]],
    params: list[SamplingParams],
    schemas: list[dict[str, Any]],
    own: list[list[int]],
) -> dict[str, Any]:
    """The judgement of all answers; and their tokens, where they are speculation off's own."""
    llm = off if speculation is None else LLM(speculative_config=speculation, max_num_seqs=16)
    outputs = llm.generate(prompts, params)
    token_ids = [] if own else [output.outputs[0].token_ids for output in outputs]
    return {"judged": judged(schemas, outputs, own or token_ids), "token_ids": token_ids}


def judged(
    schemas: list[dict[str, Any]], outputs: list[RequestOutput], own: list[list[int]]
) -> dict[str, Any]:
    """How many answers ended, are valid, and are what the engine says without speculation."""
    ended = valid = equal = 0
    failures: list[dict[str, Any]] = []
    for schema, output, token_ids in zip(schemas, outputs, own, strict=True):
        answer = output.outputs[0]
        equal += answer.token_ids == token_ids
        if answer.finish_reason != FinishReason.STOP:
            continue
        ended += 1
        try:
            jsonschema.Draft202012Validator(schema).validate(json.loads(answer.text))
            valid += 1
        except (ValueError, jsonschema.ValidationError) as error:
            failures.append({"schema": schema, "text": answer.text, "error": str(error).splitlines()[0]})
    metrics = RequestMetrics.merged([output.metrics for output in outputs])
    return {
        "num_ended": ended,
        "num_valid": valid,
        "num_cut_by_length": len(outputs) - ended,
        "num_equal_to_off": equal,
        "num_tokens": sum(len(output.outputs[0].token_ids) for output in outputs),
        "tau": round(metrics.acceptance_length, 4),
        "failures": failures[:PREVIEW_FAILURES],
    }


def followed_schemas(num: int, seed: int) -> tuple[list[dict[str, Any]], int]:
    """Different schemas that llguidance follows, and how many of those drawn it refused."""
    draw = random.Random(seed)
    found: dict[str, dict[str, Any]] = {}
    refused = 0
    while len(found) < num:
        schema = drawn_object(draw, depth=draw.choice((0, 1, 2)))
        try:
            check_followed(StructuredOutput(json_schema=schema))
        except RequestError:
            refused += 1
            continue
        found.setdefault(json.dumps(schema, sort_keys=True), schema)
    return list(found.values()), refused


def drawn_object(draw: random.Random, depth: int) -> dict[str, Any]:
    """A closed object of one to five properties."""
    names = draw.sample(WORDS, draw.randint(1, 5))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: drawn(draw, depth) for name in names},
        "required": names if draw.random() < 0.6 else draw.sample(names, draw.randint(0, len(names))),
        "additionalProperties": False,
    }
    if draw.random() < 0.15:
        schema["$defs"] = {"shared": drawn_leaf(draw)}
        schema["properties"][names[0]] = {"$ref": "#/$defs/shared"}
    return schema


def drawn(draw: random.Random, depth: int) -> dict[str, Any]:
    """A value that may hold others, `depth` levels deep."""
    kind = draw.random()
    if depth == 0 or kind < 0.45:
        return drawn_leaf(draw)
    if kind < 0.65:
        return drawn_object(draw, depth - 1)
    if kind < 0.85:
        least = draw.randint(0, 2)
        bounds = {"minItems": least, "maxItems": least + draw.randint(0, 2)}
        return {"type": "array", "items": drawn(draw, depth - 1), **bounds}
    if kind < 0.92:
        items = [drawn_leaf(draw) for _ in range(draw.randint(1, 3))]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
    return {"anyOf": [drawn(draw, depth - 1), drawn_leaf(draw)]}


def drawn_leaf(draw: random.Random) -> dict[str, Any]:
    """A value that holds no other."""
    low = draw.randint(-50, 50)
    leaves: list[dict[str, Any]] = [
        {"type": "string", "maxLength": draw.randint(1, 20)},
        {"type": "string", "minLength": 2, "maxLength": draw.randint(2, 12)},
        {"type": "string", "pattern": draw.choice(PATTERNS), "maxLength": 20},
        {"type": "string", "format": draw.choice(FORMATS)},
        {"enum": draw.sample(["low", "mid", "high", 1, 2.5, None, True, "ä€"], draw.randint(1, 4))},
        {"const": draw.choice(["fixed", 0, False, None, ["a", 1]])},
        {"type": "integer", "minimum": low, "maximum": low + draw.randint(0, 1000)},
        {"type": "number", "multipleOf": 0.5, "minimum": low, "maximum": low + draw.randint(1, 9)},
        {"type": "integer", "multipleOf": draw.choice((2, 5, 10)), "minimum": 0, "maximum": 100},
        {"type": "boolean"},
        {"type": "null"},
        {"type": ["boolean", "null"]},
    ]
    return draw.choice(leaves)


if __name__ == "__main__":
    main()
