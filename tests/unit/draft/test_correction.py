"""A layer on a drafter's logits: what it computes, what it changes, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from slipstream import LLM, SamplingParams
from slipstream.assets import EMBEDDED_DRAFT, EMBEDDED_EAGLE3, EMBEDDED_TARGET
from slipstream.config import SpeculativeConfig
from slipstream.draft import registry
from slipstream.draft.model.draft_model import DraftModelOptions
from slipstream.draft.proposers.correction import Correction
from slipstream.errors import ConfigError, ModelError
from slipstream.models import load_tokenizer
from slipstream.models.rows import RowGroup
from slipstream.testing.stub_drafters import draft_context

VOCAB = 4096
DRAFT = {"method": "draft_model", "model": EMBEDDED_DRAFT, "num_speculative_tokens": 3}
PARAMS = SamplingParams(temperature=0.8, seed=5, max_tokens=24, ignore_eos=True)


def layer(file: Path, spread: float = 0.5, vocab_size: int = VOCAB) -> str:
    """A layer whose bias is random."""
    generator = torch.Generator().manual_seed(0)
    save_file(
        {
            "left": spread * torch.randn(vocab_size, 2, generator=generator),
            "right": torch.randn(2, vocab_size, generator=generator),
            "log_temperature": torch.tensor([0.2]),
        },
        file,
    )
    return str(file)


def one_successor(file: Path) -> str:
    """A layer after which token 1000 follows even tokens, and token 1001 odd ones."""
    left = torch.zeros(VOCAB, 2)
    left[::2, 0] = left[1::2, 1] = 1.0
    right = torch.zeros(2, VOCAB)
    right[0, 1000] = right[1, 1001] = 1e4
    save_file({"left": left, "right": right, "log_temperature": torch.zeros(1)}, file)
    return str(file)


def test_it_is_a_temperature_and_a_bias_by_the_token_of_the_row() -> None:
    left, right = torch.randn(6, 2), torch.randn(2, 6)
    made = Correction({"left": left, "right": right, "log_temperature": torch.tensor([0.5])}, 5)
    logits = torch.randn(3, 5)
    slots: Any = list(range(8))
    rows = [RowGroup(slots, 0, [4, 2, 5], [0, 2]), RowGroup(slots, 3, [1], [0])]
    expected = logits / torch.exp(torch.tensor(0.5)) + (left[[4, 5, 1]] @ right)[:, :5]
    torch.testing.assert_close(made(logits, rows), expected)


@pytest.mark.parametrize(
    "spec",
    [
        DRAFT,
        {**DRAFT, "tree_top_k": 2, "num_draft_nodes": 6},
        {"method": "eagle3", "model": EMBEDDED_EAGLE3, "num_speculative_tokens": 3},
        {"method": "self", "num_speculative_tokens": 2},
        {"method": "layer_skip", "skip_layers": [3], "num_speculative_tokens": 2},
    ],
    ids=lambda spec: f"{spec['method']}-{spec.get('tree_top_k', 1)}",
)
def test_it_says_what_is_drafted_and_no_text_changes(spec: dict[str, Any], tmp_path: Path) -> None:
    llm = LLM(speculative_config={**spec, "correction": one_successor(tmp_path / "layer")})
    seen: list[tuple[int, tuple[int, ...]]] = []
    llm.engine.on_observe = lambda items: seen.extend(
        (item.sequence.token_ids[item.length_before - 1], tuple(item.proposal.token_ids)) for item in items
    )
    prompts = [[7, 11, 13], [8, 11, 12]]
    found = llm.generate([list(prompt) for prompt in prompts], PARAMS)
    off = LLM().generate([list(prompt) for prompt in prompts], PARAMS)
    assert [one.outputs[0].token_ids for one in found] == [one.outputs[0].token_ids for one in off]
    first = {(last % 2, proposed[0]) for last, proposed in seen if proposed}
    assert first == {(0, 1000), (1, 1001)}
    assert llm.engine.stats().num_draft_failures == 0


def test_what_it_holds_is_counted(tmp_path: Path) -> None:
    file = layer(tmp_path / "layer")
    context = draft_context(VOCAB, 512, "coupled", load_tokenizer(EMBEDDED_TARGET))
    sizes = []
    for more in ({}, {"correction": file}):
        options = DraftModelOptions(model=EMBEDDED_DRAFT, **more)
        drafter = registry.create_drafter(
            SpeculativeConfig("draft_model", options={"model": EMBEDDED_DRAFT, **more}), context
        )
        sizes.append((drafter.memory_bytes(), type(drafter).footprint(options, context).head_bytes))
    assert sizes[1][0] - sizes[0][0] == 2 * VOCAB * 2 * 4
    assert 0 <= sizes[1][1] - (sizes[1][0] - sizes[0][0]) < 1000


def test_a_file_that_is_no_layer_is_one_line(tmp_path: Path) -> None:
    def fails(file: str, match: str) -> None:
        with pytest.raises(ModelError, match=match):
            LLM(speculative_config={**DRAFT, "correction": file})

    fails(str(tmp_path / "none"), "cannot read the correction")
    (tmp_path / "text").write_text("no tensors")
    fails(str(tmp_path / "text"), "cannot read the correction")
    fails(layer(tmp_path / "small", vocab_size=100), "is for 100 tokens and the draft has 4096")
    save_file({"left": torch.zeros(4, 2)}, tmp_path / "half")
    fails(str(tmp_path / "half"), "'right' is missing")
    save_file(
        {"left": torch.zeros(VOCAB, 3), "right": torch.zeros(2, VOCAB), "log_temperature": torch.zeros(1)},
        tmp_path / "odd",
    )
    fails(str(tmp_path / "odd"), "a correction has left")
    with pytest.raises(ConfigError, match="tli has no correction"):
        LLM(speculative_config={"method": "tli", "model": EMBEDDED_DRAFT, "correction": "layer"})
