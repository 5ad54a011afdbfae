"""Heads beside a target on a GPU: they draft, and change no text."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream.assets import EMBEDDED_EAGLE3, sample_prompts
from tests.gpu.captured_cases import PROMPTS, check_drafts
from tests.kit.head_drafters import random_heads
from tests.kit.mtp_targets import mtp_target

pytestmark = pytest.mark.gpu

EAGLE3: dict[str, Any] = {"method": "eagle3", "model": EMBEDDED_EAGLE3}
CONVERSATIONS = [row["messages"] for row in sample_prompts()[:8]]


@pytest.mark.parametrize("shape", [{}, {"tree_top_k": 1, "num_draft_nodes": None}], ids=["tree", "chain"])
def test_the_embedded_eagle3(shape: dict[str, Any]) -> None:
    check_drafts(None, {**EAGLE3, **shape}, CONVERSATIONS, "cuda")


@pytest.mark.parametrize("method", ["medusa", "hydra"])
def test_heads_that_guess(method: str) -> None:
    check_drafts(None, {"method": method, "model": random_heads(method)}, CONVERSATIONS[:4], "cuda")


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_prediction_layers(family: str) -> None:
    check_drafts(mtp_target(family).folder, {"method": "mtp"}, PROMPTS, "cuda")
