"""Detects evaluation prompts in the training data, on which an evaluation would measure memorisation.

A training conversation contains an evaluation prompt if one of its user messages, or all of them up to some message, is
the same text except for case, spaces and punctuation; or if its user messages together contain a share of `NEAR` of the
prompt's word 5-grams. This is the containment of Broder, "On the resemblance and containment of documents", 1997, with
5-grams as in Lee et al., "Deduplicating training data makes language models better", 2022. A short prompt with one
other word is another question, so all of its 5-grams are required. Evaluation prompts are few, so 5-grams are counted
exactly, without MinHash.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import accumulate, takewhile
from pathlib import Path
from typing import Any

from slipstream.assets.workload.reading import Question
from slipstream.text.jsonl import read_rows

RUN = 5
"""Words in an n-gram."""
NEAR = 0.8
"""Share of an evaluation prompt's n-grams in one conversation from which on it is a near copy."""
SHORT = 8
"""A prompt with fewer n-grams needs all of them."""
_WORD = re.compile(r"\w+")


@dataclass
class Overlap:
    """The evaluation prompts in the training data, and the conversations that contain them."""

    num_prompts: int
    """Number of evaluation prompts."""
    exact: set[str] = field(default_factory=set)
    """`where` of evaluation prompts with exact copies."""
    near: set[str] = field(default_factory=set)
    """`where` of evaluation prompts with near copies only."""
    conversations: set[str] = field(default_factory=set)
    """`FILE, line N` of training conversations that contain one."""

    @property
    def prompts(self) -> set[str]:
        """`where` of all evaluation prompts with copies."""
        return self.exact | self.near

    def __bool__(self) -> bool:
        return bool(self.conversations)

    def __str__(self) -> str:
        text = (
            f"{len(self.prompts)} of {self.num_prompts} evaluation prompts are in the training data "
            f"({len(self.exact)} exact, {len(self.near)} near copies)"
        )
        return f"{text}, in {len(self.conversations):,} conversations" if self else text

    def as_json(self) -> dict[str, int]:
        """Counts, for the provenance of what is trained."""
        return {
            "num_evaluation_prompts": self.num_prompts,
            "num_exact": len(self.exact),
            "num_near": len(self.near),
            "num_conversations": len(self.conversations),
        }


def find_overlap(questions: Seq[Question], data: Seq[Path], tokenizer: Any) -> Overlap:
    """Search the user messages of JSONL files for the first turns of `questions`; lines without messages are decoded
    from their `token_ids`. Raises `RequestError` for a file that cannot be read.
    """
    whole: dict[tuple[str, ...], list[str]] = {}
    runs: dict[tuple[str, ...], list[str]] = {}
    num_runs: dict[str, int] = {}
    for question in questions:
        said = [_words(text) for text in _user_texts(question)]
        whole.setdefault(sum(said, ()), []).append(question.where)
        mine = {run for words in said for run in _runs(words)}
        num_runs[question.where] = len(mine)
        for run in mine:
            runs.setdefault(run, []).append(question.where)
    overlap, longest = Overlap(len(questions)), max(map(len, whole), default=0)
    for file in data:
        for where, row in read_rows(file):
            said = [_words(text) for text in _user_messages(row, tokenizer)]
            so_far = takewhile(lambda words: len(words) <= longest, accumulate(said))
            same = [prompt for words in (*said, *so_far) for prompt in whole.get(words, ())]
            mine = {run for words in said for run in _runs(words)}
            shared = Counter(prompt for run in mine for prompt in runs.get(run, ()))
            alike = [prompt for prompt, number in shared.items() if number >= _needed(num_runs[prompt])]
            overlap.exact.update(same)
            overlap.near.update(alike)
            if same or alike:
                overlap.conversations.add(where)
    overlap.near -= overlap.exact
    return overlap


def _needed(num_runs: int) -> float:
    return num_runs if num_runs < SHORT else NEAR * num_runs


def _user_texts(question: Question) -> list[str]:
    """The user messages before the first answer of an evaluation prompt."""
    if question.text is not None:
        return [question.text]
    return [str(message["content"]) for message in question.messages if message["role"] == "user"]


def _user_messages(row: dict[str, Any], tokenizer: Any) -> Iterable[str]:
    """The user messages of a line. Invalid lines are not reported here but when the data are read."""
    messages = row.get("messages")
    if isinstance(messages, list):
        for message in messages:
            if isinstance(message, dict) and message.get("role") == "user":
                yield str(message.get("content"))
    elif isinstance(row.get("token_ids"), list) and isinstance(row.get("answer_spans"), list):
        start = 0
        for span in [*row["answer_spans"], [len(row["token_ids"])] * 2]:
            yield tokenizer.decode(row["token_ids"][start : span[0]], skip_special_tokens=True)
            start = span[1]


def _words(text: str) -> tuple[str, ...]:
    return tuple(_WORD.findall(unicodedata.normalize("NFKC", text).casefold()))


def _runs(words: tuple[str, ...]) -> Iterable[tuple[str, ...]]:
    return (words[at : at + RUN] for at in range(len(words) - RUN + 1))
