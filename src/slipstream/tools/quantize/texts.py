"""Text to calibrate on: conversations, behind one another, cut into rows of one length."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.assets import sample_prompts
from slipstream.errors import ConfigError, RequestError
from slipstream.text.jsonl import check_messages, read_rows
from slipstream.text.prompts import encode_conversation


def read_texts(file: Path | None) -> list[Any]:
    """The `messages`, `text` or `prompt` of JSON lines; without a file, the bundled sample conversations.

    Raises `RequestError`, which names the line, for one that has none of them.
    """
    if file is None:
        return [row["messages"] for row in sample_prompts()]
    found: list[Any] = []
    for where, row in read_rows(file):
        text = row.get("text", row.get("prompt"))
        if not isinstance(text, str) and "messages" not in row:
            raise RequestError(f"{where} has no messages, text or prompt to calibrate on")
        found.append(text if isinstance(text, str) else check_messages(row["messages"], where))
    if not found:
        raise ConfigError(f"{file} is empty; write one JSON object with messages, text or prompt a line")
    return found


def as_rows(tokenizer: Any, texts: Seq[Any], num_rows: int, length: int, seed: int) -> Tensor:
    """int64 [rows, length]: the texts as the chat template writes them, behind one another in an order drawn by `seed`.

    Fewer than `num_rows` where there is not so much text; one at least, of all of it again where it is shorter.
    Raises `ConfigError` for texts without a token.
    """
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed)).tolist()
    tokens: list[int] = []
    for number in order:
        text = texts[number]
        tokens += _encoded(tokenizer, text)
        if len(tokens) >= num_rows * length:
            break
    if not tokens:
        raise ConfigError("the texts to calibrate on have no tokens")
    if len(tokens) < length:
        tokens = (tokens * -(-length // len(tokens)))[:length]
    count = min(num_rows, len(tokens) // length)
    return torch.tensor(tokens[: count * length]).view(count, length)


def _encoded(tokenizer: Any, text: Any) -> list[int]:
    if isinstance(text, str):
        ids: list[int] = tokenizer(text, add_special_tokens=True)["input_ids"]
        return ids
    return encode_conversation(tokenizer, text)
