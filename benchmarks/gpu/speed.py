"""What each drafter gains in time on the GPU: paired and interleaved, as `slipstream bench` does it."""

from __future__ import annotations

from typing import Any

from benchmarks.harness.bench import against_off
from slipstream import LLM
from slipstream.assets import EMBEDDED_DRAFT
from slipstream.errors import SlipstreamError

DRAFT = {"method": "draft_model", "model": EMBEDDED_DRAFT, "num_speculative_tokens": 4}
DRAFTERS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram"},
    "suffix": {"method": "suffix"},
    "draft_model, chain of 4": DRAFT,
    "draft_model, tree of 12": {**DRAFT, "tree_top_k": 3, "num_draft_nodes": 12},
    "layer_skip, its own search": {"method": "layer_skip", "num_speculative_tokens": 3},
}
SELF = {"method": "self", "num_speculative_tokens": 3}

CONCURRENCIES = {1: 2, 8: 5}
"""Requests at once, and how many prompts of each of the seven tasks are asked then: two pairs at least, without which
there is no interval."""

MAX_MODEL_LEN = 1024


def measure(model: str | None, dtype: str, concurrency: int, **sizes: int) -> dict[str, Any]:
    """Every drafter against off on `model`, None being the embedded target; greedy, empty caches."""
    engine = {"device": "cuda", "dtype": dtype, "max_model_len": MAX_MODEL_LEN}
    asked = CONCURRENCIES[concurrency]
    found = against_off(model, DRAFTERS, engine, concurrency=concurrency, prompts_per_task=asked, **sizes)
    return {**found, "dtype": dtype}


def refusal() -> str | None:
    """Why self-drafting in int8 does not run here; None where it does."""
    try:
        LLM(speculative_config=SELF, device="cuda", max_model_len=MAX_MODEL_LEN)
    except SlipstreamError as error:
        return str(error)
    return None
