"""What tests/gpu asks of a GPU, tried on a CPU through the stand-in for CUDA's graphs: a run on a GPU shall not be lost
to a mistake in the tests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import LLM
from slipstream.assets import EMBEDDED_DRAFT, EMBEDDED_TARGET
from slipstream.models import load_model
from tests.gpu import captured_cases
from tests.gpu.served_cases import check_answers, serving
from tests.kit.mtp_targets import mtp_target
from tests.unit.models.test_fp8_folders import FP8, saved, tiny

PROMPTS = [[5, 9, 14], [8, 3, 7, 20]]


@pytest.mark.parametrize("family", ["gemma2", "gpt-oss"])
def test_a_family_is_transformers_own(family: str, tmp_path: Path) -> None:
    error, lm = captured_cases.tree_error(captured_cases.tiny_folder(family, tmp_path / "model"), "cpu")
    assert error < 1e-4
    assert captured_cases.outside([lm])[0] == 3
    assert not captured_cases.outside([lm])[1]


def test_a_family_in_the_decoder_is_transformers_own(tmp_path: Path) -> None:
    folder = captured_cases.tiny_folder("gemma2", tmp_path / "model")
    error, lm = captured_cases.tree_error(folder, "cpu", decodes=True)
    assert error < 1e-4
    assert lm.kernels == "decoder"
    assert captured_cases.outside([lm])[0] == 3


def test_a_family_that_attends_by_itself(tmp_path: Path) -> None:
    folder = captured_cases.tiny_folder("falcon-new", tmp_path / "model")
    assert captured_cases.tree_error(folder, "cpu", captured=False)[0] < 1e-4


def test_an_error_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = captured_cases.tiny_folder("llama", tmp_path / "model")
    monkeypatch.setattr(captured_cases, "PARENTS", [-1, -1, 0, 1, 1, 3, 5])
    paths = captured_cases.checked_paths()
    monkeypatch.undo()
    monkeypatch.setattr(captured_cases, "checked_paths", lambda: paths)
    assert captured_cases.tree_error(folder, "cpu")[0] > 0.01


def test_texts_of_a_family(tmp_path: Path) -> None:
    folder = captured_cases.tiny_folder("qwen3", tmp_path / "model")
    spec = {"method": "draft_model", "model": folder, "num_speculative_tokens": 3}
    equal, number = captured_cases.num_equal(folder, "cpu", spec, dtype="float32")
    assert equal == number


def test_passes_outside_graphs_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = {"method": "draft_model", "model": EMBEDDED_DRAFT, "num_speculative_tokens": 2}
    llm = LLM(speculative_config=spec, max_num_batched_tokens=32, **captured_cases.options("cpu"))
    assert captured_cases.share_outside(llm, PROMPTS) == 0
    executor = llm.engine.model.executor
    monkeypatch.setattr(type(executor), "reason_not", lambda *_: "a test")
    assert captured_cases.share_outside(llm, PROMPTS) == 1


def test_rows_with_other_bits_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = load_model(EMBEDDED_TARGET, dtype="float32", **captured_cases.options("cpu"))
    assert captured_cases.rows_with_other_bits(lm, [-1, -1, 0, 2], 40) <= 5
    own = lm.forward

    def shifted(groups: Any, pool: Any) -> Any:
        output = own(groups, pool)
        return replace(output, logits=output.logits + len(groups[0].token_ids))

    monkeypatch.setattr(lm, "forward", shifted)
    assert captured_cases.rows_with_other_bits(lm, [-1, -1, 0, 2], 40) == 5


def test_an_fp8_checkpoint_and_its_numbers(tmp_path: Path) -> None:
    numbers = saved(tmp_path / "fp8", FP8, tiny())
    plain = captured_cases.without_fp8(tmp_path / "fp8", numbers, tmp_path / "plain")
    names = {"dtype": "float32", **captured_cases.options("cpu")}
    ours, theirs = (load_model(str(folder), **names) for folder in (tmp_path / "fp8", plain))
    weights = ours.model.state_dict()
    assert all(torch.equal(weights[name], weight) for name, weight in theirs.model.state_dict().items())


def test_a_head_drafts_and_changes_no_text() -> None:
    folder = mtp_target("llama").folder
    captured_cases.check_drafts(folder, {"method": "mtp"}, captured_cases.PROMPTS[:3], "cpu")


def test_a_server_streams_and_counts() -> None:
    with serving("cpu") as client:
        check_answers(client)
