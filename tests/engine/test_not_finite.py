"""A draft whose arithmetic overflows writes no text, is counted as failing, and leaves nothing behind."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from typing import Any

import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.assets import EMBEDDED_DRAFT, EMBEDDED_EAGLE3
from slipstream.draft.proposers.draft_tree import DraftTree, Peaks
from slipstream.models.causal_lm import CausalLM, ForwardOutput
from tests.kit.block_heads import block_head
from tests.kit.engines import MakeLLM

DRAFT: dict[str, Any] = {"method": "draft_model", "model": EMBEDDED_DRAFT}
SPECS: dict[str, dict[str, Any]] = {
    "chain": DRAFT,
    "tree": {**DRAFT, "tree_choices": [[0], [1], [0, 0]]},
    "tli": {**DRAFT, "method": "tli"},
    "slem": {**DRAFT, "method": "slem"},
    "self": {"method": "self"},
    "layer_skip": {"method": "layer_skip", "skip_layers": [2, 3]},
    "cascade": {"method": "cascade", "model": EMBEDDED_DRAFT, "draft": {"method": "ngram"}},
    "cascade of layers": {"method": "cascade", "exit_layer": 4, "draft": {"method": "ngram"}},
    "eagle3": {"method": "eagle3", "model": EMBEDDED_EAGLE3},
    "dflash": {"method": "dflash", "model": "mask"},
    "dflash, left to right": {"method": "dflash", "model": "rnn"},
}
NOT_FINITE = -1
"""What the kernels return in place of a token where the logits are not finite; see `Chains.tokens`."""
PARAMS = SamplingParams(temperature=0.8, max_tokens=12, seed=3, ignore_eos=True)


def texts(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, PARAMS)]


@pytest.mark.parametrize("name", SPECS)
def test_whoever_computes_logits(
    name: str, make_llm: MakeLLM, plain: LLM, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sequence's rows are damaged, in a batch of two: the other one keeps its drafter."""
    sick, sound = prompts[0], prompts[5]
    spec = SPECS[name]
    llm = make_llm({**spec, "model": block_head(spec["model"])} if spec["method"] == "dflash" else spec)
    grow, take_chain = DraftTree.grow, DraftTree.take_chain

    def damaged(
        self: DraftTree, logits: torch.Tensor, peaks: Peaks | None = None, likely: float | None = None
    ) -> Any:
        if self.sequence.id == 0 and self.nodes:  # not at once: half a draft is there already
            logits = logits * math.nan
            peaks = None if peaks is None else Peaks.of(logits, [self])
        return grow(self, logits, peaks, likely)

    def damaged_chain(self: DraftTree, token_ids: Seq[int]) -> None:
        take_chain(self, [*token_ids[:1], NOT_FINITE] if self.sequence.id == 0 else token_ids)

    with monkeypatch.context() as patched:
        patched.setattr(DraftTree, "grow", damaged)
        patched.setattr(DraftTree, "take_chain", damaged_chain)
        outputs = llm.generate([sick, sound], PARAMS)
    assert [output.outputs[0].token_ids for output in outputs] == texts(plain, [sick, sound])
    assert outputs[0].metrics.num_draft_tokens == 0 < outputs[1].metrics.num_draft_tokens
    assert llm.engine.stats().num_draft_failures == 1
    assert llm.engine.integrity() == []
    assert texts(llm, [sick]) == texts(plain, [sick])
    assert llm.engine.stats().num_draft_failures == 1


@pytest.mark.parametrize(
    ("verifier", "value"), [("coupled", math.nan), ("rejection", math.inf), ("block", math.nan)]
)
def test_a_damaged_draft_writes_no_text(
    verifier: str, value: float, make_llm: MakeLLM, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an infinite embedding does, or a row of NaN in int8."""
    llm = make_llm({**DRAFT, "verifier": verifier})
    off = make_llm({"method": "off", "verifier": verifier})
    draft = llm.engine.draft_model
    forward = CausalLM.forward

    def damaged(self: CausalLM, *args: Any, **named: Any) -> ForwardOutput:
        output = forward(self, *args, **named)
        if self is draft:
            output.logits[:, 7] = value
        return output

    def damaged_chains(self: CausalLM, groups: Any, *_: Any) -> list[list[int]]:
        return [[NOT_FINITE]] * len(groups)

    monkeypatch.setattr(CausalLM, "forward", damaged)
    monkeypatch.setattr(CausalLM, "draft_chain", damaged_chains)
    assert texts(llm, prompts[:2]) == texts(off, prompts[:2])
    assert llm.engine.stats().num_draft_failures == 2


def test_no_entry_of_a_damaged_text_is_reused(
    make_llm: MakeLLM, plain: LLM, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A passing fault poisons the keys and values too: what was computed then is computed anew."""
    llm = make_llm(DRAFT)
    drafter: Any = llm.engine.drafter
    fresh = llm.generate([prompts[0]], PARAMS)[0].metrics
    llm.reset_caches()
    forward = drafter.model.forward

    def damaged(groups: Any, pool: Any, *args: Any, **named: Any) -> ForwardOutput:
        output: ForwardOutput = forward(groups, pool, *args, **named)
        for group in groups:
            pool.values[0][:, group.slots[group.num_past]] = math.nan
        output.logits[:] = math.nan
        return output

    def damaged_chains(groups: Any, pool: Any, *_: Any) -> list[list[int]]:
        damaged(groups, pool)
        return [[NOT_FINITE]] * len(groups)

    with monkeypatch.context() as patched:
        patched.setattr(drafter.model, "forward", damaged)
        patched.setattr(drafter.model, "draft_chain", damaged_chains)
        assert texts(llm, [prompts[0]]) == texts(plain, [prompts[0]])
    assert drafter.cache.accounting.num_retained == 0
    assert llm.engine.stats().num_draft_failures == 1
    again = llm.generate([prompts[0]], PARAMS)[0].metrics
    assert again.num_accepted_tokens == fresh.num_accepted_tokens > 0
    assert llm.engine.stats().num_draft_failures == 1
