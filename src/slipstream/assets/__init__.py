"""Files that ship with the package: the embedded model pair and sample prompts by task."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from slipstream.assets.embedded import (
    EMBEDDED,
    EMBEDDED_DRAFT,
    EMBEDDED_DRAFTERS,
    EMBEDDED_EAGLE3,
    EMBEDDED_NAME,
    EMBEDDED_TARGET,
)

__all__ = [
    "EMBEDDED",
    "EMBEDDED_DRAFT",
    "EMBEDDED_DRAFTERS",
    "EMBEDDED_EAGLE3",
    "EMBEDDED_NAME",
    "EMBEDDED_TARGET",
    "sample_prompts",
]


def sample_prompts() -> list[dict[str, Any]]:
    """350 held-out prompts, 50 a task, tasks interleaved: `{"task", "source", "split", "messages"}`."""
    with (Path(__file__).parent / "prompts.jsonl").open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]
