"""The peer's side of the protocol: one JSON object a line in, one out. Standard library only.

    load      {"op": "load", "target": PATH, "draft": PATH, "weights": "float32", "threads": 2,
               "max_model_len": N, "max_num_seqs": N, "options": {...}}
              -> {"event": "ready", "versions": {...}, "load_s": S, "notes": [...]}
    generate  {"op": "generate", "prompts": [[ids], ...], "max_tokens": N, "options": {...}}
              -> {"event": "answers", "token_ids": [[ids], ...], "seconds": S, "first_token_s": S or null,
                  "num_steps": N or null}
    convert   {"op": "convert", "source": PATH, "target": PATH, "weights": "int8"}
              -> {"event": "converted"}

Whatever a peer cannot do is answered with {"event": "refused", "reason": ...}; the worker goes on. End of input
ends it.
`seconds` runs from the call with token ids to the return with token ids, without the pipe.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


class Refused(Exception):
    """The peer cannot do this; the message is the reason that the report prints."""


@dataclass(frozen=True)
class Answers:
    """One call's output token ids, prompt by prompt, and its times in seconds."""

    token_ids: list[list[int]]
    seconds: float
    first_token_s: float | None
    """From the call to the first token, by the peer's own clock; None where it does not tell."""
    num_steps: int | None = None
    """Passes of the target behind the prompts; None where the peer does not tell."""


class Backend(Protocol):
    """A loaded model."""

    def generate(self, prompts: list[list[int]], max_tokens: int, options: dict[str, Any]) -> Answers:
        """Greedy, nothing kept from earlier calls; exactly `max_tokens` tokens a prompt, the end token ignored, unless
        `options` say `ignore_eos` false."""
        ...


@dataclass(frozen=True)
class Loaded:
    """What `load` returns."""

    backend: Backend
    versions: dict[str, str]
    notes: list[str]
    """Settings that a reader should know of, as the report prints them."""


def serve(
    load: Callable[[dict[str, Any]], Loaded], convert: Callable[[Path, Path, str], None] | None = None
) -> None:
    """Answer requests until the input ends. Whatever libraries print goes to standard error."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    backend: Backend | None = None
    for line in sys.stdin:
        request = json.loads(line)
        reply: dict[str, Any]
        try:
            if request["op"] == "load":
                started_s = time.perf_counter()
                loaded = load(request)
                backend = loaded.backend
                load_s = time.perf_counter() - started_s
                reply = {
                    "event": "ready",
                    "versions": loaded.versions,
                    "load_s": load_s,
                    "notes": loaded.notes,
                }
            elif request["op"] == "convert":
                assert convert is not None
                convert(Path(request["source"]), Path(request["target"]), request["weights"])
                reply = {"event": "converted"}
            else:
                assert backend is not None
                answers = backend.generate(request["prompts"], request["max_tokens"], request["options"])
                reply = {
                    "event": "answers",
                    "token_ids": answers.token_ids,
                    "seconds": answers.seconds,
                    "first_token_s": answers.first_token_s,
                    "num_steps": answers.num_steps,
                }
        except Exception as error:  # whatever a peer raises is its reason
            traceback.print_exc()
            reply = {"event": "refused", "reason": _one_line(error)}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def _one_line(error: Exception) -> str:
    name = "" if isinstance(error, Refused) else f"{type(error).__name__}: "
    return (name + " ".join(str(error).split()))[:400]
