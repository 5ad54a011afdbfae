"""Reads workloads: the bundled sample, JSON lines, Spec-Bench's questions or ShareGPT's conversations.

Files are checked as a whole first; an invalid line is an error that names it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipstream.errors import RequestError
from slipstream.text.jsonl import Message, read_rows, read_text, up_to_last_user

FORMS = "sample, FILE.jsonl, spec-bench:FILE or sharegpt:FILE"

_KINDS = ("prompt", "messages", "turns", "conversations")

_HUMAN, _MODEL = ("human", "user"), ("gpt", "chatgpt", "assistant", "bing", "bard")

_SPEC_BENCH_TASKS = dict.fromkeys(
    ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"), "mt_bench"
)
"""Spec-Bench reports these eight categories as one task; its other categories are tasks themselves."""


@dataclass(frozen=True, slots=True)
class Question:
    """One conversation of a workload with one or several turns to answer."""

    task: str
    where: str
    """File and line, for errors and reports."""
    text: str | None = None
    """A plain prompt, wrapped in the chat template if the model has one. Otherwise `messages` is set."""
    messages: tuple[Message, ...] = ()
    """Messages up to the first user message to answer."""
    later_turns: tuple[str, ...] = ()
    """The user's further messages, each sent after the model's answer to the one before."""
    references: tuple[str, ...] = ()
    """Recorded answers by turn; may be fewer than the turns."""
    output_tokens: int | None = None
    """Length of each answer, where the data gives it."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Questions in the order of the file."""

    source: str
    questions: list[Question] = field(default_factory=list)
    num_unusable: int = 0
    """Number of well-formed entries without a prompt, such as ShareGPT's empty conversations."""


def read_workload(spec: str) -> Workload:
    """The workload that `spec` names, one of `FORMS`; raises `RequestError` that names the file and line."""
    form, _, path = spec.partition(":")
    if spec == "sample":
        return _sample()
    if form == "spec-bench":
        return _from_lines(spec, Path(path), _spec_bench_question)
    if form == "sharegpt":
        return _sharegpt(spec, Path(path))
    if not spec.endswith(".jsonl"):
        raise RequestError(f"workload {spec!r} is none of {FORMS}")
    return _from_lines(spec, Path(spec), _question)


def _sample() -> Workload:
    from slipstream.assets import sample_prompts

    rows = sample_prompts()
    questions = [
        Question(row["task"], f"sample, prompt {number}", messages=tuple(row["messages"]))
        for number, row in enumerate(rows, start=1)
    ]
    return Workload("sample", questions)


def _from_lines(spec: str, file: Path, make: Callable[[Any, str], Question | None]) -> Workload:
    questions: list[Question] = []
    num_unusable = 0
    for where, row in read_rows(file):
        question = make(row, where)
        if question is None:
            num_unusable += 1
        else:
            questions.append(question)
    return _not_empty(Workload(spec, questions, num_unusable), file)


def _question(row: Any, where: str) -> Question | None:
    """A question from a line in Slipstream's own format; raises `RequestError`."""
    kinds = [kind for kind in _KINDS if kind in row]
    if len(kinds) != 1:
        raise RequestError(f"{where} needs exactly one of {', '.join(_KINDS)}; it has {kinds or 'none'}")
    task = _label(row, where)
    output_tokens = _output_tokens(row, where)
    if "conversations" in row:
        return _conversation(row["conversations"], task, where, output_tokens)
    if "turns" in row:
        return _turns(row, task, where, output_tokens)
    references = _references(row.get("reference"), where)
    if "prompt" in row:
        text = _text(row["prompt"], f"{where}: prompt")
        return Question(task, where, text=text, references=references, output_tokens=output_tokens)
    messages, recorded = up_to_last_user(row["messages"], where)
    return Question(
        task,
        where,
        messages=tuple(messages),
        references=references or tuple(str(message["content"]) for message in recorded[:1]),
        output_tokens=output_tokens,
    )


def _spec_bench_question(row: Any, where: str) -> Question:
    """A line of Spec-Bench's `question.jsonl`: question_id, category, turns, reference."""
    for key in ("category", "turns"):
        if key not in row:
            raise RequestError(
                f"{where} has no {key!r}; a line of Spec-Bench has question_id, category and turns"
            )
    category = _text(row["category"], f"{where}: category")
    return _turns(row, _SPEC_BENCH_TASKS.get(category, category), where, None)


def _turns(row: Any, task: str, where: str, output_tokens: int | None) -> Question:
    turns = row["turns"]
    if not isinstance(turns, list) or not turns:
        raise RequestError(f"{where}: turns must be a list of texts that is not empty")
    texts = [_text(turn, f"{where}: turn {number}") for number, turn in enumerate(turns, start=1)]
    return Question(
        task,
        where,
        messages=({"role": "user", "content": texts[0]},),
        later_turns=tuple(texts[1:]),
        references=_references(row.get("reference"), where),
        output_tokens=output_tokens,
    )


def _sharegpt(spec: str, file: Path) -> Workload:
    """A JSON list of entries with `conversations`."""
    try:
        entries = json.loads(read_text(file))
    except json.JSONDecodeError as error:
        raise RequestError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(entries, list):
        raise RequestError(f"{file} must be a JSON list of ShareGPT conversations")
    questions: list[Question] = []
    for number, entry in enumerate(entries, start=1):
        where = f"{file}, entry {number}"
        if not isinstance(entry, dict) or "conversations" not in entry:
            raise RequestError(f"{where} has no 'conversations'; a ShareGPT entry has id and conversations")
        question = _conversation(entry["conversations"], "sharegpt", where, None)
        if question is not None:
            questions.append(question)
    return _not_empty(Workload(spec, questions, len(entries) - len(questions)), file)


def _conversation(messages: Any, task: str, where: str, output_tokens: int | None) -> Question | None:
    """The first human message and the recorded answer; None when the conversation does not begin with a human."""
    if not isinstance(messages, list):
        raise RequestError(f"{where}: conversations must be a list of messages with from and value")
    for message in messages:
        known = isinstance(message, dict) and isinstance(message.get("from"), str)
        if not known or not isinstance(message.get("value"), str):
            raise RequestError(f'{where}: a message is {{"from": "human", "value": "…"}}, got {message!r}')
    system = [m for m in messages[:1] if m["from"] == "system"]
    rest = messages[len(system) :]
    if not rest or rest[0]["from"] not in _HUMAN or not rest[0]["value"].strip():
        return None
    recorded = rest[1]["value"] if len(rest) > 1 and rest[1]["from"] in _MODEL else ""
    return Question(
        task,
        where,
        messages=(
            *({"role": "system", "content": message["value"]} for message in system),
            {"role": "user", "content": rest[0]["value"]},
        ),
        references=(recorded,) if recorded.strip() else (),
        output_tokens=output_tokens,
    )


def _label(row: Any, where: str) -> str:
    label = row.get("task", row.get("category", "all"))
    return _text(label, f"{where}: task")


def _output_tokens(row: Any, where: str) -> int | None:
    value = row.get("output_tokens")
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise RequestError(f"{where}: output_tokens must be a whole number of at least 1, got {value!r}")
    return value


def _references(value: Any, where: str) -> tuple[str, ...]:
    """`reference`, one text or one a turn, as a tuple; raises `RequestError`."""
    texts = [value] if isinstance(value, str) else value or []
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise RequestError(f"{where}: reference must be a text or a list of texts, got {value!r}")
    return tuple(texts)


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise RequestError(f"{what} must be a text that is not empty, got {value!r}")
    return value


def _not_empty(workload: Workload, file: Path) -> Workload:
    if not workload.questions:
        raise RequestError(f"{file} has no prompts")
    return workload
