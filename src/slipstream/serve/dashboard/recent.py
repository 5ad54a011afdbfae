"""The last few answers of each account, with the tokens that came from accepted drafts."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from slipstream.engine.outputs import CompletionOutput, RequestOutput, Update
from slipstream.serve.job import Job

MAX_ANSWERS = 8
MAX_TOKENS = 400
"""Tokens of an answer that are shown."""


class Recent:
    """Used from the event loop. Without `with_texts` no text is kept, nor how long any token's text is: texts can
    be reconstructed from lengths alone (Weiss et al., "What Was Your Prompt? A Remote Keylogging Attack on AI
    Assistants", 2024)."""

    def __init__(self, with_texts: bool) -> None:
        self.with_texts = with_texts
        self._answers: dict[str, deque[dict[str, Any]]] = {}
        """By account."""

    def add(
        self, account: str, job: Job, output: RequestOutput, pieces: dict[int, list[tuple[str, bool]]]
    ) -> None:
        """Add a finished request; `pieces` are the texts of its answers, by index, where they are kept."""
        answers = self._answers.setdefault(account, deque(maxlen=MAX_ANSWERS))
        for answer in output.outputs:
            answers.appendleft(_as_json(job, output, answer, pieces.get(answer.index)))

    def as_json(self, account: str) -> list[dict[str, Any]]:
        """The answers of an account as JSON, the latest first."""
        return list(self._answers.get(account, ()))


class Pieces:
    """Collects the texts of one prompt's answers from their updates."""

    def __init__(self) -> None:
        self.by_answer: dict[int, list[tuple[str, bool]]] = {}

    def add(self, update: Update) -> None:
        """Add an update's text, up to the first few hundred tokens."""
        pieces = self.by_answer.setdefault(update.index, [])
        pieces += [(piece.text, piece.from_draft) for piece in update.pieces[: MAX_TOKENS - len(pieces)]]


def _as_json(
    job: Job, output: RequestOutput, answer: CompletionOutput, pieces: list[tuple[str, bool]] | None
) -> dict[str, Any]:
    metrics = answer.metrics
    flags = answer.from_draft[:MAX_TOKENS]
    return {
        "id": job.id,
        "task": job.options.task,
        "finished": time.time(),
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_output_tokens": metrics.num_output_tokens,
        "num_draft_tokens": metrics.num_draft_tokens,
        "acceptance_rate": metrics.acceptance_rate if metrics.num_draft_tokens else None,
        "acceptance_length": metrics.acceptance_length,
        "total_s": metrics.total_s,
        "time_to_first_token_s": metrics.time_to_first_token_s,
        "tokens_per_s": metrics.tokens_per_s,
        "lossy": metrics.lossy,
        "num_lossy_tokens": metrics.num_lossy_tokens,
        "finish_reason": answer.finish_reason,
        "from_draft": "".join("01"[flag] for flag in flags),
        "pieces": pieces,
    }
