"""The prompts for all peers: held-out prompts by task as token ids, encoded once by the target's tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from benchmarks.peers.catalog import Model
from benchmarks.peers.results import BATCH
from slipstream.assets import EMBEDDED_TARGET, sample_prompts

BATCH_SIZE = 8


@dataclass(frozen=True)
class Question:
    """One call: a single prompt of a task, or a batch."""

    task: str
    index: int
    prompts: list[list[int]]


def questions(model: Model) -> list[Question]:
    """`prompts_per_task` prompts of each of the seven tasks; the batch, if the model has one, holds eight of them."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_TARGET)
    by_task: dict[str, list[list[int]]] = {}
    for row in sample_prompts():
        prompts = by_task.setdefault(row["task"], [])
        if len(prompts) < max(2, model.prompts_per_task):
            ids = tokenizer.apply_chat_template(
                row["messages"], add_generation_prompt=True, return_dict=False
            )
            prompts.append(list(cast(list[int], ids)))
    single = [
        Question(task, index, [by_task[task][index]])
        for index in range(model.prompts_per_task)
        for task in sorted(by_task)
    ]
    if not model.batch:
        return single
    together = [by_task[task][index] for index in range(2) for task in sorted(by_task)][:BATCH_SIZE]
    return [*single, Question(BATCH, 0, together)]


def context_length(model: Model, asked: list[Question]) -> int:
    """Room for the longest prompt and its answer, in steps of 128, with some to spare for drafts."""
    longest = max(len(prompt) for question in asked for prompt in question.prompts)
    return -(-(longest + model.max_tokens + 32) // 128) * 128
