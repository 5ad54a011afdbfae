"""Targets and drafts of quantised files: the text is the target's, whatever drafts for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slipstream import LLM, SamplingParams
from slipstream.assets import EMBEDDED_DRAFT, EMBEDDED_TARGET
from slipstream.tools.export.checkpoints.gguf_models import finish, model_writer
from tests.kit.gguf_files import requantised
from tests.kit.quantised_folders import gptq_folder

pytest.importorskip("gguf", reason="the extra `export` is not installed")

CHATS = [
    [{"role": "user", "content": f"Show me how to use the command `{name}`."}] for name in ("tar", "grep")
]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=24),
    SamplingParams(temperature=1, seed=7, max_tokens=24),
]


def in_blocks(folder: Path, source: str, kind: str) -> str:
    """An embedded model as a GGUF file of one type."""
    plain = folder / "plain.gguf"
    finish(model_writer(source, plain))
    return str(requantised(folder / f"{kind}.gguf", plain, kind))


def answers(model: str, draft: str | None) -> tuple[list[Any], float]:
    """Token ids of every chat, greedy and drawn, and the share of draft tokens that were accepted."""
    spec = {"method": "draft_model", "model": draft, "num_speculative_tokens": 3} if draft else None
    outputs = LLM(model, speculative_config=spec).chat(
        [*CHATS, *CHATS], [params for params in PARAMS for _ in CHATS]
    )
    rates = [output.metrics.acceptance_rate or 0.0 for output in outputs]
    return [output.outputs[0].token_ids for output in outputs], sum(rates) / len(rates)


@pytest.mark.parametrize(("in_file", "act_order"), [("target", False), ("draft", True)])
def test_speculation_changes_no_text_of_quantised_pairs(
    in_file: str, act_order: bool, tmp_path: Path
) -> None:
    sources = {"target": EMBEDDED_TARGET, "draft": EMBEDDED_DRAFT}
    models = {
        role: in_blocks(tmp_path, source, "Q4_0" if role == "draft" else "Q8_0")
        if role == in_file
        else str(gptq_folder(tmp_path / role, source, 32, act_order))
        for role, source in sources.items()
    }
    alone, _ = answers(models["target"], None)
    drafted, rate = answers(models["target"], models["draft"])
    assert drafted == alone
    assert rate > 0.3
