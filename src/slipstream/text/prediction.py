"""What a caller expects as the answer: OpenAI's `prediction`, read and checked."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

from slipstream.errors import PredictionError, RequestError
from slipstream.text.inputs import as_list, check_characters, is_token_id

MAX_PREDICTED_TOKENS = 64
"""The most draft tokens of an expected text in a step."""

Prediction = str | tuple[int, ...]
"""What is expected: text, or token ids."""

_SHAPE = 'a prediction is a text, token ids, or {"type": "content", "content": a text or parts of text}'


def parse_prediction(value: Any) -> Prediction:
    """What a caller expects, from text, token ids or OpenAI's form; raises `PredictionError` for anything else."""
    value = as_list(value)
    if isinstance(value, Mapping):
        if value.get("type") != "content" or value.keys() != {"type", "content"}:
            raise PredictionError(f"{_SHAPE}, got the keys {', '.join(map(repr, value)) or 'none'}")
        value = value["content"]
        if isinstance(value, Seq) and not isinstance(value, str):
            value = "".join(map(_text_of_part, value))
    if isinstance(value, str):
        try:
            check_characters("the prediction", value)
        except RequestError as error:
            raise PredictionError(str(error)) from None
        found: Prediction = value
    elif isinstance(value, Seq) and not isinstance(value, bytes) and all(map(is_token_id, value)):
        found = tuple(map(int, value))
    else:
        raise PredictionError(f"{_SHAPE}, got {type(value).__name__}")
    if not found:
        raise PredictionError("the prediction is empty; give the text that is expected, or leave it out")
    return found


def _text_of_part(part: Any) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        text: str = part["text"]
        return text
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise PredictionError(f"a prediction has a part of type {kind!r}; it may have parts of text only")
