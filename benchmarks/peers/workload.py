"""The prompts for all peers: held-out prompts as token ids, encoded once by the target's tokenizer.

By task, or as texts of given lengths: conversations one after the other, the last of which waits for its answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, cast

from benchmarks.peers.catalog import Model
from benchmarks.peers.conditions import ALONE, Condition
from benchmarks.peers.results import BATCH
from slipstream.assets import EMBEDDED_TARGET, sample_prompts

BATCH_SIZE = 8


@dataclass(frozen=True)
class Question:
    """One call: a single prompt of a task, or a batch."""

    task: str
    index: int
    prompts: list[list[int]]
    condition: Condition = ALONE

    @property
    def num_prompt_tokens(self) -> int:
        """Return the number of tokens of the longest prompt."""
        return max(len(prompt) for prompt in self.prompts)


def questions(model: Model) -> list[Question]:
    """The texts of `model.contexts`; without any, prompts by task.

    By task they are `prompts_per_task` prompts of each of seven tasks; the batch, if the model has one, holds eight.
    """
    if model.contexts:
        return [
            Question(context_task(length, condition), index, [text(length, index)], condition)
            for length in model.contexts  # shorter ones first: what they need of memory is seen
            for index in range(model.prompts_per_task)
            for condition in model.conditions
        ]
    by_task: dict[str, list[list[int]]] = {}
    for number, row in enumerate(_samples()):
        prompts = by_task.setdefault(row["task"], [])
        if len(prompts) < max(2, model.prompts_per_task):
            prompts.append(list(_encoded(number, True)))
    single = [
        Question(task, index, [by_task[task][index]])
        for index in range(model.prompts_per_task)
        for task in sorted(by_task)
    ]
    if not model.batch:
        return single
    together = [by_task[task][index] for index in range(2) for task in sorted(by_task)][:BATCH_SIZE]
    return [*single, Question(BATCH, 0, together)]


def context_task(length: int, condition: Condition) -> str:
    """What a sample of such a prompt calls its task: `1536`, or `1536, 1 busy beside it`."""
    return f"{length}" + (f", {condition.name}" if condition.name else "")


def text(length: int, index: int) -> list[int]:
    """Exactly `length` tokens, another text for each index: sample conversations, cut at the front.

    The last one is waiting for its answer. Longer texts than all the samples together begin again.
    """
    pieces = [_encoded(index, True)]
    missing = length - len(pieces[0])
    while missing > 0:
        index -= 1
        pieces.append(_encoded(index, False))
        missing -= len(pieces[-1])
    tokens = [token for piece in reversed(pieces) for token in piece]
    return tokens[-length:]


@cache
def _encoded(number: int, wait: bool) -> tuple[int, ...]:
    """A sample conversation as the chat template writes it; `wait` opens the answer."""
    rows = _samples()
    messages = rows[number % len(rows)]["messages"]
    ids = _tokenizer().apply_chat_template(messages, add_generation_prompt=wait, return_dict=False)
    return tuple(cast(list[int], ids))


@cache
def _samples() -> list[dict[str, Any]]:
    return sample_prompts()


@cache
def _tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(EMBEDDED_TARGET)


def context_length(model: Model, asked: list[Question]) -> int:
    """Room for the longest prompt and its answer, in steps of 128, with some to spare for drafts."""
    longest = max(question.num_prompt_tokens for question in asked)
    return -(-(longest + model.max_tokens + 32) // 128) * 128
