"""Prompts that are both trained on and measured with: such a measurement says what was learned by heart.

A training conversation holds an evaluation prompt where what its user says, in one message or up to one, is the
same text, but for case, spaces and punctuation; or where all of it has nearly all of the prompt's runs of five words.
The share is `NEAR`: the containment of Broder, "On the resemblance and containment of documents", 1997; runs of five
words as in Lee et al., "Deduplicating training data makes language models better", 2022. In a short prompt one other
word is another question, so there all runs are asked for. Evaluation prompts are few, so runs are counted exactly,
without MinHash.
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

from slipstream.jsonl import read_rows
from slipstream.workload.reading import Question

RUN = 5
"""Words of a run."""
NEAR = 0.8
"""Of an evaluation prompt's runs, in what the user says in one conversation."""
SHORT = 8
"""Runs: a prompt of fewer is held only where all of them are."""
_WORD = re.compile(r"\w+")


@dataclass
class Overlap:
    """Which evaluation prompts are in the training data, and which conversations hold them."""

    num_prompts: int
    """That were looked for."""
    exact: set[str] = field(default_factory=set)
    """Evaluation prompts that are there word for word, by where they stand."""
    near: set[str] = field(default_factory=set)
    """Those that are there nearly so."""
    conversations: set[str] = field(default_factory=set)
    """Training conversations that hold one, by where they stand."""

    @property
    def prompts(self) -> set[str]:
        """All evaluation prompts that were found."""
        return self.exact | self.near

    def __bool__(self) -> bool:
        return bool(self.conversations)

    def __str__(self) -> str:
        text = (
            f"{len(self.prompts)} of {self.num_prompts} evaluation prompts are in the training data "
            f"({len(self.exact)} word for word, {len(self.near)} nearly so)"
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
    """Look for the first turns of `questions` in the user's messages of JSONL files, or in what the tokenizer makes of
    `token_ids` that are no answer where a line has no messages. Raises `RequestError` for a file that cannot be read.
    """
    whole: dict[tuple[str, ...], list[str]] = {}
    runs: dict[tuple[str, ...], list[str]] = {}
    num_runs: dict[str, int] = {}
    for question in questions:
        said = [_words(text) for text in _asked(question)]
        whole.setdefault(sum(said, ()), []).append(question.where)
        mine = {run for words in said for run in _runs(words)}
        num_runs[question.where] = len(mine)
        for run in mine:
            runs.setdefault(run, []).append(question.where)
    overlap, longest = Overlap(len(questions)), max(map(len, whole), default=0)
    for file in data:
        for where, row in read_rows(file):
            said = [_words(text) for text in _said(row, tokenizer)]
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


def _asked(question: Question) -> list[str]:
    """What the user says before the first answer that is measured: small talk at its end is no prompt of its own."""
    if question.text is not None:
        return [question.text]
    return [str(message["content"]) for message in question.messages if message["role"] == "user"]


def _said(row: dict[str, Any], tokenizer: Any) -> Iterable[str]:
    """The user's messages of a line, whatever else is wrong with it: who reads it says so."""
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
