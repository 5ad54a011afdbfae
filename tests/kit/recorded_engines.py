"""Engines whose passes are recorded on a CPU, what they answer, and how often a step of theirs waits."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from slipstream import LLM, SamplingParams
from slipstream.assets import sample_prompts
from slipstream.testing.wait_audit import WaitAudit

RECORDED: dict[str, Any] = {
    "attention_backend": "slipstream.testing.recorded_graph:TritonOnCpu",
    "executor": "slipstream.testing.recorded_graph:RecordedExecutor",
    "cpu_kernels": "torch",
    "max_model_len": 512,
    "max_num_batched_tokens": 128,
}
CONVERSATIONS = [row["messages"] for row in sample_prompts()[:8]]
PARAMS: dict[str, Any] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.8},
    "filtered": {"temperature": 0.9, "top_p": 0.9, "top_k": 40},
    "penalised": {"temperature": 0.0, "repetition_penalty": 1.2},
}


def params(kind: str, number: int) -> list[SamplingParams]:
    """One for each conversation; `mixed` takes turns."""
    kinds = list(PARAMS) if kind == "mixed" else [kind]
    return [
        SamplingParams(max_tokens=12, seed=n, ignore_eos=True, **PARAMS[kinds[n % len(kinds)]])
        for n in range(number)
    ]


def answers(llm: LLM, kind: str, number: int = 4) -> list[list[int]]:
    given = params(kind, number)
    if llm.engine.model.vocab_size < 1000:  # a tiny model
        outputs = llm.generate([[3 * n + 5 * place for place in range(1, 9)] for n in range(number)], given)
    else:
        outputs = llm.chat(CONVERSATIONS[:number], given)
    assert llm.engine.integrity() == []
    return [output.outputs[0].token_ids for output in outputs]


@cache
def expected(kind: str, model: str | None = None) -> list[list[int]]:
    """The texts of the same operators, not recorded."""
    length = RECORDED["max_model_len"] if model is None else None
    own = {"executor": "eager", "attention_backend": "packed", "max_model_len": length}
    return answers(LLM(model, **RECORDED | own), kind)


def check_waits(
    llm: LLM, kind: str, number: int, monkeypatch: pytest.MonkeyPatch, most_copies: int
) -> list[list[int]]:  # fmt: skip
    """Answer twice: the steps of the second time wait at most once each, and bring numbers to the device `most_copies`
    times. The answers."""
    engine, audit, num_steps = llm.engine, WaitAudit(), 0
    step = engine.step

    def audited() -> Any:
        nonlocal num_steps
        num_steps += 1
        with audit:
            return step()

    answers(llm, kind, number)  # what is recorded now waits
    monkeypatch.setattr(engine, "step", audited)
    found = answers(llm, kind, number)
    assert sum(audit.waits.values()) <= num_steps, audit.waits
    assert sum(audit.uploads.values()) == 0, audit.uploads
    prompts = 2 * number  # drafters catch up with them in passes of their own
    assert sum(audit.copies.values()) <= most_copies * num_steps + prompts, audit.copies
    return found
