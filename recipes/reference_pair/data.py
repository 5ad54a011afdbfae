"""Conversations to training rows: clean, tokenize, mix and pack, all of it a function of the seed."""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypedDict

import numpy as np
from transformers import PreTrainedTokenizerBase

from slipstream.train.batches import TrainingDocument

from .tokenizer import ROLES

Piece = TrainingDocument


class RecipeError(Exception):
    """The recipe cannot be followed with what it was given: one line that says why."""


# End markers that the models which wrote the `chat` answers left in the text.
FOREIGN_END = re.compile(r"\s*(<\|endoftext\|>|</s>)\s*$")


class Message(TypedDict):
    role: str
    content: str


class Conversation(TypedDict):
    task: str
    source: str
    messages: list[Message]


def load_conversations(path: Path) -> list[Conversation]:
    """Read JSONL of `{"task", "source", "messages": [{"role", "content"}]}`, cut foreign end markers.

    Raises `RecipeError` with file and line for anything else.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # JSON may hold other characters that end lines
    except OSError as error:
        raise RecipeError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path} is not UTF-8 text: {error}") from None
    conversations = [
        _conversation(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()
    ]
    if not conversations:
        raise RecipeError(f"{path} holds no conversations")
    return conversations


def _conversation(line: str, where: str) -> Conversation:
    try:
        conversation: Conversation = json.loads(line)
        for message in conversation["messages"]:
            if message["role"] not in ROLES:
                raise RecipeError(f"{where}: a role is one of {', '.join(ROLES)}, got {message['role']!r}")
            message["content"] = FOREIGN_END.sub("", message["content"])
        if not isinstance(conversation["task"], str):
            raise TypeError
    except json.JSONDecodeError as error:
        raise RecipeError(f"{where} is not valid JSON: {error}") from None
    except (KeyError, TypeError):
        raise RecipeError(
            f'{where} is not {{"task": "…", "messages": [{{"role": "…", "content": "…"}}, …]}}'
        ) from None
    return conversation


def repeats(tokens: Sequence[int], size: int = 16, times: int = 3) -> bool:
    """Whether some run of `size` tokens occurs `times` times: the mark of a text caught in a loop."""
    runs = Counter(tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1))
    return bool(runs) and max(runs.values()) >= times


def to_pieces(
    conversations: Sequence[Conversation],
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    max_answer_tokens: int | None = None,
) -> list[Piece]:
    """Tokenize, and cut what is longer than `length` tokens, before a user's turn where that is possible.

    With `max_answer_tokens`, conversations with a longer answer, or with one that runs in circles, are left
    out: a model that has seen only answers that end learns to end its own.
    """
    messages = [message for conversation in conversations for message in conversation["messages"]]
    encoded = iter(
        tokenizer([message["content"] for message in messages], add_special_tokens=False)["input_ids"]
    )
    end = int(tokenizer.eos_token_id)
    role_ids = {
        role: tokenizer.convert_tokens_to_ids(f"<|{role}|>") for role in {m["role"] for m in messages}
    }

    pieces: list[Piece] = []
    for conversation in conversations:
        turns = [(message["role"], next(encoded)) for message in conversation["messages"]]
        answers = [ids for role, ids in turns if role == "assistant"]
        if max_answer_tokens is not None and any(len(a) > max_answer_tokens or repeats(a) for a in answers):
            continue
        runs: list[tuple[list[int], list[bool]]] = [([], [])]
        for role, ids in turns:
            if role == "user" and len(runs[-1][0]) + len(ids) + 2 > length:
                runs.append(([], []))
            runs[-1][0].extend([role_ids[role], *ids, end])
            runs[-1][1].extend([False] + [role == "assistant"] * (len(ids) + 1))
        for tokens, is_answer in runs:
            for start in range(0, len(tokens), length):
                cut = slice(start, start + length)
                pieces.append(Piece(conversation["task"], np.array(tokens[cut]), np.array(is_answer[cut])))
    return pieces


def mix_pieces(
    pieces: Sequence[Piece], weights: Mapping[str, float], rng: np.random.Generator
) -> list[Piece]:
    """Repeat each piece `weights[task]` times on average (1 where absent): 1.5 is one copy or two, evenly."""
    expected = np.array([weights.get(piece.task, 1.0) for piece in pieces])
    copies = np.floor(expected + rng.random(len(pieces))).astype(int)
    return [piece for piece, n in zip(pieces, copies, strict=True) for _ in range(n)]
