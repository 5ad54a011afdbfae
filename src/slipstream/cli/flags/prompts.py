"""Reads prompts from the command line, a file or standard input."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.errors import RequestError
from slipstream.text.jsonl import Message, read_rows, read_text, up_to_last_user

if TYPE_CHECKING:
    from slipstream.engine.engine import Engine


@dataclass(frozen=True)
class PromptJob:
    """One prompt: exactly one of `text`, `messages` and `token_ids` is set."""

    text: str | None = None
    messages: list[Message] | None = None
    token_ids: list[int] | None = None
    label: str = ""
    """The `task` or `id` of its line in a file; empty otherwise."""
    task: str = ""
    """The `task` of its line in a file; some drafters use it."""
    where: str = ""
    """File and line, for errors; empty for a single prompt."""


def read_jobs(prompt: str | None, file: Path | None) -> list[PromptJob]:
    """The given prompts; raises `RequestError` when there are none or a file cannot be read.

    A `.jsonl` file holds one JSON object a line with `prompt` (text), `messages` (a conversation, answered at its
    last user message) or `token_ids`; `task` and `id` are labels and other keys are ignored. Any other file, and
    standard input, is one prompt.
    """
    if prompt is not None and file is not None:
        raise RequestError("give a prompt or --file, not both")
    if file is not None and file.suffix == ".jsonl":
        jobs = [_job(row, where) for where, row in read_rows(file)]
        if not jobs:
            raise RequestError(f"{file} has no prompts; write one JSON object a line")
        return jobs
    if prompt is None:
        prompt = _read_text(file).rstrip("\n")
    if not prompt.strip():
        raise RequestError(
            "the prompt is empty; give some text as an argument, with --file or on standard input"
        )
    return [PromptJob(text=prompt)]


def prepare(engine: Engine, job: PromptJob, chat: bool | None) -> list[int]:
    """The job's token ids; raises `RequestError`, with file and line, where `engine` would refuse them.

    `chat` wraps a text in the chat template; None does so if the model has one.
    """
    from slipstream.text.prompts import encode_prompt, encode_question

    tokenizer, vocab_size, longest = engine.tokenizer, engine.model.vocab_size, engine.max_model_len
    try:
        if job.token_ids is not None:
            return encode_prompt(tokenizer, job.token_ids, vocab_size, longest)
        if chat and not tokenizer.chat_template:
            raise RequestError("this model's tokenizer has no chat template, which --chat needs; use --raw")
        return encode_question(tokenizer, job.text, job.messages or [], chat is False, vocab_size, longest)
    except RequestError as error:
        raise RequestError(f"{job.where}: {error}" if job.where else str(error)) from None


def _read_text(file: Path | None) -> str:
    if file is None:
        if sys.stdin.isatty():
            raise RequestError(
                "there is no prompt; give one as an argument, with --file or on standard input"
            )
        return sys.stdin.read()
    return read_text(file)


def _job(row: dict[str, Any], where: str) -> PromptJob:
    kinds = ("prompt", "messages", "token_ids")
    if sum(kind in row for kind in kinds) != 1:
        raise RequestError(f"{where} needs exactly one of {', '.join(kinds)}")
    task = str(row.get("task") or "")
    label = task or str(row.get("id") or "")
    if "prompt" in row:
        if not isinstance(row["prompt"], str) or not row["prompt"].strip():
            raise RequestError(f"{where} has an empty prompt")
        return PromptJob(text=row["prompt"], label=label, task=task, where=where)
    if "token_ids" in row:
        if not isinstance(row["token_ids"], list) or not row["token_ids"]:
            raise RequestError(f"{where} needs a list of token ids that is not empty")
        return PromptJob(token_ids=row["token_ids"], label=label, task=task, where=where)
    messages, _ = up_to_last_user(row["messages"], where)
    return PromptJob(messages=messages, label=label, task=task, where=where)
