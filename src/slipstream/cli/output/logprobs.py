"""Prints log-probabilities as a table below their answer."""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipstream.core.types import TokenLogprob
    from slipstream.engine.outputs import CompletionOutput, RequestOutput


def print_logprobs(tokenizer: Any, answer: CompletionOutput) -> None:
    """Print the answer's tokens to standard output; nothing without `logprobs`."""
    if answer.token_logprobs is not None:
        _print_table(tokenizer, "token", answer.token_ids, answer.token_logprobs)


def print_prompt_logprobs(tokenizer: Any, output: RequestOutput) -> None:
    """Print the prompt's tokens to standard output; nothing without `prompt_logprobs`."""
    if output.prompt_token_logprobs is not None:
        _print_table(tokenizer, "prompt token", output.prompt_token_ids, output.prompt_token_logprobs)


def _print_table(tokenizer: Any, title: str, token_ids: Seq[int], entries: Seq[TokenLogprob | None]) -> None:
    """A token a line: its text, its log-probability (a prompt's first token has none), the alternatives."""

    def text(token_id: int) -> str:
        return json.dumps(tokenizer.decode([token_id]), ensure_ascii=False)

    shown = [text(token_id) for token_id in token_ids]
    width = max(map(len, [title, *shown]))
    print(f"\n{title:<{width}}  logprob  alternatives")
    for token, entry in zip(shown, entries, strict=True):
        logprob, top = ("", ()) if entry is None else (f"{entry.logprob:.3f}", entry.top)
        alternatives = "  ".join(f"{text(other)} {value:.3f}" for other, value in top)
        print(f"{token:<{width}}  {logprob:>7}  {alternatives}".rstrip())
