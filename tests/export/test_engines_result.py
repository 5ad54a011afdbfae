"""What `benchmarks.export_engines` compares, and what its recorded result says."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.export_engines import NUM_TOKENS, RESULT, compared, ours
from benchmarks.export_page import HEADS_RESULT, HEADS_TOLERANCE, METHODS, NAMES, met, page
from slipstream.tools.export import SpeculativeRecord

NEAR_TIE = 0.01
"""Nats. Where our target prefers its own token by less, another order of sums may choose the other."""


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    recorded: dict[str, Any] = json.loads(RESULT.read_text())
    return recorded


def test_every_engine_ran_every_drafter_that_it_supports(result: dict[str, Any]) -> None:
    cells = {(cell["engine"], cell["method"]): cell for cell in result["cells"]}
    assert cells.keys() == {(engine, method) for engine in NAMES for method in METHODS}
    assert {name for name, cell in cells.items() if "passes" not in cell} == {("transformers", "eagle3")}
    assert "refused" in cells["transformers", "eagle3"]


def test_their_texts_are_ours_but_for_near_ties(result: dict[str, Any]) -> None:
    for cell in result["cells"]:
        if "passes" not in cell:
            continue
        assert cell["same_texts"] + len(cell["differences"]) == result["num_prompts"]
        assert cell["same_texts"] >= 0.9 * result["num_prompts"]
        assert all(abs(one["margin"]) <= NEAR_TIE for one in cell["differences"])


def test_acceptance_there_is_ours(result: dict[str, Any]) -> None:
    for cell in result["cells"]:
        if "passes" not in cell:
            continue
        for side in ("ours", "theirs"):
            accepted = cell["num_tokens"] / cell["passes"][side] - 1
            assert cell["accepted_per_pass"][side] == pytest.approx(accepted)
            assert 0.3 < accepted < NUM_TOKENS
        ratio = cell["accepted_per_pass"]["theirs"] / cell["accepted_per_pass"]["ours"]
        assert cell["theirs_over_ours"] == pytest.approx(ratio)
        assert met(cell)


def test_the_page_says_what_the_result_says(result: dict[str, Any]) -> None:
    written = RESULT.with_suffix(".md").read_text()
    assert written == page(result)
    assert "The bar is a difference of 2%: met by all 7." in written
    assert "The bar is a difference of 5%: met by all 4." in " ".join(written.split())


def test_our_heads_are_accepted_alike_in_llama_cpp() -> None:
    for cell in json.loads(HEADS_RESULT.read_text())["cells"]:
        accepted = {side: cell["num_tokens"] / cell["passes"][side] - 1 for side in ("ours", "theirs")}
        assert cell["accepted_per_pass"] == pytest.approx(accepted)
        assert accepted["theirs"] / accepted["ours"] == pytest.approx(1, abs=HEADS_TOLERANCE)
        assert cell["same_texts"] + len(cell["differences"]) == cell["num_prompts"]


REQUEST = {"prompts": [[1, 2], [3]], "texts": [[5, 6, 7], [8, 9]], "lengths": [3, 2]}
LLM, ANSWER = "benchmarks.export_engines.LLM", "benchmarks.export_engines._answer"


@pytest.mark.parametrize(
    ("method", "asked", "passes"),
    [
        ("draft_model", [([1, 2, 5], 2), ([3, 8, 9], 0)], 7),  # it drafts in the prompt's pass
        ("eagle3", [([1, 2], 3), ([3, 8], 1)], 6),  # it drafts behind it
    ],
)
def test_ours_goes_on_from_where_theirs_began(
    method: str, asked: list[Any], passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []

    def answer(_llm: object, prompt: list[int], length: int) -> tuple[list[int], int]:
        given.append((prompt, length))
        return [0] * length, 7

    monkeypatch.setattr(LLM, lambda **_: None)
    monkeypatch.setattr(ANSWER, answer)
    found = ours(SpeculativeRecord(method=method, model="draft", depth=4), REQUEST, [1, 2])
    assert given == asked
    assert [len(tokens) for tokens, _, _ in found["answers"]] == REQUEST["lengths"]
    assert [num for _, num, _ in found["answers"]] == [1, 2]
    assert [count for _, _, count in found["answers"]] == [passes, passes]


def test_acceptance_is_compared_where_the_texts_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.export_engines.difference", lambda *_: {"position": 1, "margin": 0.001})
    here = {"answers": [[[5, 6, 7], 1, 1], [[8, 9], 1, 1]]}
    there = {"version": "1", "answers": [[[5, 6, 7], 1, 2], [[8, 4], 1, 9]]}
    cell = compared(here, there, REQUEST)
    assert cell["same_texts"] == 1
    assert cell["differences"] == [{"prompt": 1, "position": 1, "margin": 0.001}]
    assert cell["passes"] == {"ours": 1, "theirs": 2}
    assert cell["accepted_per_pass"] == {"ours": 1.0, "theirs": 0.0}
    assert cell["theirs_over_ours"] == 0.0


def test_our_own_text_must_be_the_targets() -> None:
    here = {"version": "1", "answers": [[[5, 6, 4], 1, 1], [[8, 9], 1, 1]]}
    with pytest.raises(RuntimeError, match="prompt 0"):
        compared(here, here, REQUEST)
