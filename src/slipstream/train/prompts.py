"""Prompts for regenerating answers: conversations without their answers, selected by task."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.errors import ConfigError, RequestError
from slipstream.text.jsonl import Message, check_messages, read_rows

_KINDS = ("prompt", "messages", "turns")
_OTHER_KINDS = ("text", "question", "instruction")
"""Looked for in lines that have none of the former."""


@dataclass(frozen=True, slots=True)
class PromptScript:
    """A conversation without the assistant's messages."""

    number: int
    """Its line in the file, from 1; identifies it in the output."""
    task: str
    turns: tuple[tuple[Message, ...], ...]
    """The messages before each answer; never empty."""
    source: str | None = None
    """The line's own `source`."""


def read_scripts(file: Path, key: str | None = None) -> list[PromptScript]:
    """The conversations of JSON lines, and optionally their `task` and `source`.

    A line has one of `prompt`, `text`, `question` or `instruction` (what the user says; an `instruction` may come with
    an `input`), `turns` (a list of that) or `messages` (a conversation). `key` names another place for any of the
    three. Recorded answers are dropped. Raises `RequestError`, which names the line, for an invalid one.
    """
    scripts = [_script(row, where, key) for where, row in read_rows(file)]
    if not scripts:
        raise RequestError(f"{file} has no prompts; write one JSON object a line")
    return scripts


def choose(
    scripts: Seq[PromptScript], num_prompts: int | None, mix: Mapping[str, float], seed: int
) -> list[PromptScript]:
    """Draw scripts without replacement, in random order; the same for the same seed.

    `mix` maps task to weight and excludes tasks that it does not name; if empty, all tasks weigh the same. The share of
    an exhausted task goes to the others. `num_prompts` None takes all. Raises `ConfigError` for an unknown task.
    """
    rng = np.random.default_rng(seed)
    by_task: dict[str, list[PromptScript]] = {}
    for script in scripts:
        by_task.setdefault(script.task, []).append(script)
    for task in mix:
        if task not in by_task:
            raise ConfigError(f"there is no task {task!r} in the data; it has {', '.join(sorted(by_task))}")
    weights = {task: mix.get(task, 0.0) if mix else 1.0 for task in sorted(by_task)}
    stock = {task: len(by_task[task]) for task, weight in weights.items() if weight > 0}
    shares = _shares(stock, weights, sum(stock.values()) if num_prompts is None else num_prompts)
    chosen = [
        by_task[task][index]
        for task, share in shares.items()
        for index in rng.permutation(len(by_task[task]))[:share]
    ]
    return [chosen[index] for index in rng.permutation(len(chosen))]


def _shares(stock: Mapping[str, int], weights: Mapping[str, float], total: int) -> dict[str, int]:
    """Task to its number of prompts, in proportion to the weights, at most its stock and `total` in all."""
    shares = Counter(dict.fromkeys(stock, 0))
    for _ in range(min(total, sum(stock.values()))):
        open_tasks = [task for task in stock if shares[task] < stock[task]]
        shares[min(open_tasks, key=lambda task: (shares[task] + 1) / weights[task])] += 1
    return dict(shares)


def _script(row: dict[str, Any], where: str, key: str | None) -> PromptScript:
    kind = _kind_of(row, where, key)
    said = row[kind]
    if kind == "messages" or (isinstance(said, list) and said and isinstance(said[0], dict)):
        turns = _turns(check_messages(said, where))
    else:
        texts = said if isinstance(said, list) else [said]
        if (kind == "turns" and texts is not said) or not all(
            isinstance(text, str) and text.strip() for text in texts
        ):
            raise RequestError(f"{where}: {kind} must be text that is not empty, got {said!r}")
        if kind == "instruction" and isinstance(more := row.get("input"), str) and more.strip():
            texts = [*texts[:-1], f"{texts[-1]}\n\n{more}"]  # as in Alpaca's data
        turns = [[{"role": "user", "content": text}] for text in texts]
    if not turns:
        raise RequestError(f"{where} has no message to answer")
    task, source = row.get("task", row.get("category", "all")), row.get("source")
    if not isinstance(task, str):
        raise RequestError(f"{where}: task must be a text, got {task!r}")
    number = int(where.rsplit(" ", 1)[1])
    return PromptScript(
        number, task, tuple(tuple(turn) for turn in turns), None if source is None else str(source)
    )


def _kind_of(row: dict[str, Any], where: str, key: str | None) -> str:
    """The key under which a line holds what is to be answered."""
    if key is not None:
        if key not in row:
            raise RequestError(f"{where} has no {key!r}; it has {', '.join(row) or 'nothing'}")
        return key
    kinds = [kind for kind in _KINDS if kind in row] or [kind for kind in _OTHER_KINDS if kind in row]
    if len(kinds) == 1:
        return kinds[0]
    found = f"it has {', '.join(kinds)}" if kinds else f"it has {', '.join(row) or 'nothing'}"
    raise RequestError(
        f"{where} needs exactly one of {', '.join((*_KINDS, *_OTHER_KINDS))}; {found}. Name the key: --key NAME"
    )


def _turns(messages: Seq[Message]) -> list[list[Message]]:
    """The messages between recorded answers; a system message is joined with the next user message."""
    turns: list[list[Message]] = [[]]
    for message in messages:
        if message["role"] != "assistant":
            turns[-1].append(message)
        elif any(earlier["role"] != "system" for earlier in turns[-1]):
            turns.append([])
    return turns if any(message["role"] != "system" for message in turns[-1]) else turns[:-1]
