"""Mixed requests with their lone runs: what each answer must be, whatever happens to replicas."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from slipstream import LLM, RequestOutput, SamplingParams
from slipstream.assets import sample_prompts
from slipstream.engine.outputs import Update
from slipstream.text.prompts import encode_chat

ROOM: dict[str, Any] = {"kv_cache_bytes": 96 * 2**20, "max_num_seqs": 8, "num_threads": 1}
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 10}, "old": {"type": "boolean"}},
    "required": ["name", "old"],
    "additionalProperties": False,
}
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0, "max_tokens": 48},
    {"temperature": 0.9, "top_p": 0.95, "max_tokens": 48},
    {"temperature": 1.0, "max_tokens": 40, "n": 2},
    {"temperature": 0.8, "max_tokens": 40, "logprobs": 2},
    {"temperature": 1.0, "max_tokens": 48, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    {"temperature": 0.9, "max_tokens": 64, "stop": ["er", "the c"], "min_tokens": 16},
    {"temperature": 0.9, "max_tokens": 64, "structured": {"json_schema": _SCHEMA}},
    {"temperature": 0.7, "max_tokens": 150, "ignore_eos": True},
]


@dataclass(frozen=True)
class Case:
    """A request and what one engine alone answers to it."""

    prompt: Seq[int]
    params: SamplingParams
    tenant: str
    wanted: RequestOutput


def cases(number: int) -> list[Case]:
    """So many different requests: prompts, kinds and seeds go round at different paces."""
    llm = LLM(**(ROOM | {"max_num_seqs": 32, "num_threads": None}))
    prompts = [encode_chat(llm.engine.tokenizer, row["messages"]) for row in sample_prompts()]
    prompts = [prompt for prompt in prompts if len(prompt) < 400]
    asked = [
        (prompts[n % len(prompts)], SamplingParams(seed=n, **KINDS[n % len(KINDS)])) for n in range(number)
    ]
    outputs = llm.generate([prompt for prompt, _ in asked], [params for _, params in asked])
    return [
        Case(prompt, params, f"tenant-{n % 5}", output)
        for n, ((prompt, params), output) in enumerate(zip(asked, outputs, strict=True))
    ]


def differences(case: Case, updates: Seq[Update]) -> list[str]:
    """What of a stream is not the lone run's, a few words each."""
    faults: list[str] = []
    outputs = [update.output for update in updates if update.output is not None]
    if len(outputs) != 1 or updates[-1].output is None:
        return [f"{len(outputs)} ends"]
    for answer, alone in zip(outputs[0].outputs, case.wanted.outputs, strict=True):
        for name in ("token_ids", "text", "finish_reason", "stop_reason", "seed", "token_logprobs"):
            if getattr(answer, name) != getattr(alone, name):
                faults.append(f"answer {answer.index}: other {name}")
        own = [update for update in updates if update.index == answer.index]
        if [token for update in own for token in update.token_ids] != alone.token_ids:
            faults.append(f"answer {answer.index}: other streamed tokens")
        if "".join(update.text for update in own) != alone.text:
            faults.append(f"answer {answer.index}: other streamed text")
        if answer.metrics.num_output_tokens != len(alone.token_ids):
            faults.append(f"answer {answer.index}: other usage")
    return faults
