"""Selects the prompts of a run from a workload, by task and turn, each with the length of its answer."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import chain, zip_longest

from slipstream.assets.workload.reading import Question, Workload
from slipstream.errors import RequestError
from slipstream.text.jsonl import Message

Count = Callable[[str], int]
"""Number of tokens of a text."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: `text`, or `messages` that end with the user's."""

    task: str
    where: str
    max_tokens: int
    text: str | None = None
    messages: tuple[Message, ...] = ()


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths of answers: `max_tokens`, or None for the lengths in the data."""

    max_tokens: int | None
    count: Count | None = None
    """Counts the tokens of a reference answer; None without a tokenizer."""

    def of(self, question: Question, turn: int) -> int:
        """Tokens of the answer to `turn`, from 0; raises `RequestError` where the data has no length."""
        if self.max_tokens is not None:
            return self.max_tokens
        if question.output_tokens is not None:
            return question.output_tokens
        if turn >= len(question.references) or not question.references[turn].strip():
            raise RequestError(
                f"{question.where} has neither output_tokens nor a reference answer for turn {turn + 1}; "
                "give --max-tokens a number"
            )
        if self.count is None:
            raise RequestError(
                f"{question.where}: counting the tokens of a reference answer needs --tokenizer; "
                "or give --max-tokens a number"
            )
        return max(1, self.count(question.references[turn]))


@dataclass(frozen=True, slots=True)
class Chosen:
    """The prompts of a run, tasks interleaved."""

    prompts: list[Prompt]
    num_too_long: int
    """Number of prompts dropped because they do not fit into the context with their answers."""


def choose(
    workload: Workload,
    per_task: int | None,
    lengths: Lengths,
    fits: Callable[[Prompt], bool],
    answer: Callable[[Prompt], str],
) -> Chosen:
    """The first `per_task` questions of each task (None: all) whose first turn fits, every turn a prompt.

    A later turn needs the answers to the earlier ones. They are generated once, by `answer`, before anything is timed,
    so that every configuration gets the same prompts. Raises `RequestError` where no prompt fits.
    """
    by_task: dict[str, list[list[Prompt]]] = {}
    num_too_long = 0
    for question in workload.questions:
        chosen = by_task.setdefault(question.task, [])
        if per_task is not None and len(chosen) >= per_task:
            continue
        turns, complete = _turns(question, lengths, fits, answer)
        num_too_long += not complete
        if turns:
            chosen.append(turns)
    prompts = [[prompt for turns in chosen for prompt in turns] for chosen in by_task.values()]
    mixed = [prompt for prompt in chain.from_iterable(zip_longest(*prompts)) if prompt is not None]
    if not mixed:
        raise RequestError(
            f"none of the {num_too_long} prompts of {workload.source} fits into the context with its answer; "
            "give shorter prompts or a smaller --max-tokens"
        )
    return Chosen(mixed, num_too_long)


def _turns(
    question: Question, lengths: Lengths, fits: Callable[[Prompt], bool], answer: Callable[[Prompt], str]
) -> tuple[list[Prompt], bool]:
    """(the question's turns that fit, whether all fit)."""
    first = Prompt(question.task, question.where, lengths.of(question, 0), question.text, question.messages)
    if not fits(first):
        return [], False
    prompts = [first]
    for number, text in enumerate(question.later_turns, start=1):
        last = prompts[-1]
        exchange = ({"role": "assistant", "content": answer(last)}, {"role": "user", "content": text})
        where = f"{question.where}, turn {number + 1}"
        prompt = Prompt(
            question.task, where, lengths.of(question, number), messages=(*last.messages, *exchange)
        )
        if not fits(prompt):
            return prompts, False
        prompts.append(prompt)
    return prompts, True


def task_names(prompts: Seq[Prompt]) -> list[str]:
    """The tasks in the order of the prompts, without duplicates."""
    return list(dict.fromkeys(prompt.task for prompt in prompts))
