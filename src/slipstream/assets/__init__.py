"""Files that ship with the package: the embedded model pair and sample prompts by task."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_PAIR = Path(__file__).parent / "pair"

EMBEDDED_TARGET = str(_PAIR / "target")
EMBEDDED_DRAFT = str(_PAIR / "draft")
EMBEDDED_EAGLE3 = str(_PAIR / "eagle3")
EMBEDDED = "embedded"
"""The embedded target, or its own drafter, where a model is named."""
EMBEDDED_NAME = "embedded-pair"
"""The embedded target's name for clients of a server."""
EMBEDDED_DRAFTERS = {"draft_model": EMBEDDED_DRAFT, "eagle3": EMBEDDED_EAGLE3}
"""Method to the embedded target's own drafter."""


def writer_in_package(reasoning: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """The value of `reasoning` with the folder of a draft that is called `embedded`, and with that as its name."""
    if reasoning is None or reasoning.get("model") != EMBEDDED:
        return reasoning
    own = EMBEDDED_DRAFTERS.get(str(reasoning.get("method", "draft_model")))
    return reasoning if own is None else {"name": EMBEDDED, **reasoning, "model": own}


def sample_prompts() -> list[dict[str, Any]]:
    """350 held-out prompts, 50 a task, tasks interleaved: `{"task", "source", "split", "messages"}`."""
    with (Path(__file__).parent / "prompts.jsonl").open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]
