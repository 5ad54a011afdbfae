"""What the soak asks, and what the answers must be: those of a lone engine with speculation off."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from slipstream import LLM, SamplingParams
from slipstream.assets import sample_prompts
from slipstream.engine.outputs import CompletionOutput
from slipstream.text.prompts import encode_chat

STOPS = (" the", ".", "\n", "e", "SELECT", "}", ", ", " a")
SCHEMAS: tuple[dict[str, Any], ...] = (
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "count": {"type": "integer"}},
        "required": ["name", "count"],
        "additionalProperties": False,
    },
    {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1, "maxItems": 3},
    {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]},
)


@dataclass(frozen=True, slots=True)
class Case:
    """One request, apart from how it is delivered."""

    path: str
    """Below `/v1`."""
    body: dict[str, Any]
    prompts: list[list[int]]
    """Token ids, as the server must make them of the body."""
    params: SamplingParams
    """As the body asks."""

    @property
    def num_answers(self) -> int:
        return len(self.prompts) * self.params.n

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))


@dataclass(frozen=True, slots=True)
class Answered:
    """A case with the answers that are right, choice by choice."""

    case: Case
    answers: list[CompletionOutput]

    @property
    def num_output_tokens(self) -> int:
        return sum(len(answer.token_ids) for answer in self.answers)


@dataclass(frozen=True, slots=True)
class Rules:
    """What the server of the soak takes."""

    max_tokens: int
    """The longest answer that is asked for."""
    max_model_len: int
    with_schemas: bool


def lone_engine() -> LLM:
    """One request at a time, speculation off, nothing reused."""
    return LLM(kv_cache_bytes=32 * 2**20, enable_prefix_caching=False)


def make_cases(num: int, seed: int, llm: LLM, rules: Rules) -> list[Answered]:
    """`num` different requests over the sample prompts, with their lone answers."""
    rng = random.Random(seed)
    rows = sample_prompts()
    cases: list[Answered] = []
    while len(cases) < num:
        case = _case(rng, rows, llm, rules)
        assert case.params.max_tokens is not None
        if max(map(len, case.prompts)) + case.params.max_tokens > rules.max_model_len:
            continue
        outputs = [llm.generate(prompt, case.params)[0] for prompt in case.prompts]
        cases.append(Answered(case, [answer for output in outputs for answer in output.outputs]))
    return cases


def _case(rng: random.Random, rows: Seq[dict[str, Any]], llm: LLM, rules: Rules) -> Case:
    same = _same_in_both(rng, rules.max_tokens)
    body: dict[str, Any] = dict(same)
    params: dict[str, Any] = dict(same)
    row = rng.choice(rows)
    tokenizer = llm.engine.tokenizer
    if rng.random() < 0.7:
        path = "chat/completions"
        body["messages"] = row["messages"]
        prompts = [encode_chat(tokenizer, row["messages"])]
        if rng.random() < 0.15:
            params["logprobs"] = body["top_logprobs"] = rng.randrange(4)
            body["logprobs"] = True
    else:
        path = "completions"
        texts = [rng.choice(rows)["messages"][-1]["content"] for _ in range(rng.choice((1, 1, 1, 2)))]
        prompts = [list(tokenizer(text).input_ids) for text in texts]
        given: Any = texts if rng.random() < 0.5 else prompts
        body["prompt"] = given[0] if len(given) == 1 else given
        if rng.random() < 0.15:
            params["logprobs"] = body["logprobs"] = rng.randrange(4)
    if rules.with_schemas and rng.random() < 0.1:
        schema = rng.choice(SCHEMAS)
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
        params["structured"] = {"json_schema": schema}
        for key in ("stop", "min_tokens", "ignore_eos", "stop_token_ids"):
            body.pop(key, None)
            params.pop(key, None)
    if rng.random() < 0.1:
        body["speculation"] = rng.choice(({"enabled": False}, {"max_tokens": 2}, {"max_tokens": 1}))
    if rng.random() < 0.3:
        body["user"] = f"user-{rng.randrange(4)}"
    return Case(path, body, prompts, SamplingParams.from_mapping(params))


def _same_in_both(rng: random.Random, max_tokens: int) -> dict[str, Any]:
    """Parameters that a body and `SamplingParams` call the same."""
    temperature = rng.choice((0.0, 0.0, 0.0, 0.3, 0.7, 1.0, 1.5))
    same: dict[str, Any] = {
        "temperature": temperature,
        "seed": rng.randrange(2**40),
        "max_tokens": rng.randint(1, max_tokens),
    }
    optional: tuple[tuple[float, dict[str, Any]], ...] = (
        (0.12, {"n": 2}),
        (0.2, {"stop": rng.sample(STOPS, rng.randint(1, 2))}),
        (0.1, {"top_p": rng.choice((0.5, 0.9))}),
        (0.1, {"top_k": rng.choice((1, 5, 50))}),
        (0.05, {"min_p": 0.05}),
        (0.06, {"repetition_penalty": 1.2}),
        (0.06, {"presence_penalty": 0.5, "frequency_penalty": 0.5}),
        (0.05, {"logit_bias": {str(rng.randrange(100, 1000)): 5.0}}),
        (0.08, {"min_tokens": min(3, same["max_tokens"])}),
        (0.1, {"ignore_eos": True}),
        (0.05, {"stop_token_ids": [rng.randrange(100, 1000) for _ in range(20)]}),
        (0.03, {"bad_words": [" the", "SELECT"]}),
        (0.05, {"include_stop_str_in_output": True}),
    )
    for probability, parameters in optional:
        if rng.random() < probability:
            same |= parameters
    return same
