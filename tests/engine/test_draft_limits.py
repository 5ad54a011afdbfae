"""A draft with a shorter context than the target's, and the cost of drafting for many."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Seq
from typing import Any

import pytest

from slipstream import LLM, SamplingParams
from slipstream.assets import EMBEDDED_DRAFT
from slipstream.core.step import StepItem
from slipstream.draft.model.draft_model import DraftModelDrafter
from slipstream.models.executor.chains import Chains
from tests.kit.engines import MakeLLM

DRAFT: dict[str, Any] = {"method": "draft_model", "model": EMBEDDED_DRAFT, "num_speculative_tokens": 4}
TREE: dict[str, Any] = {**DRAFT, "tree_top_k": 3, "num_draft_nodes": 9}
SHAPES = pytest.mark.parametrize("spec", [DRAFT, TREE], ids=["chain", "tree"])


def drafter_of(llm: LLM) -> DraftModelDrafter:
    drafter = llm.engine.drafter
    assert isinstance(drafter, DraftModelDrafter)
    return drafter


@SHAPES
def test_a_long_prompt_beside_short_ones(
    make_llm: MakeLLM,
    plain: LLM,
    prompts: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    spec: dict[str, Any],
) -> None:
    """One prompt is beyond the draft's context, one grows beyond it, and the others never notice."""
    limit = 160
    text = [token for prompt in prompts for token in prompt]
    short = sorted(prompts, key=len)[:4]
    long, growing = text[:400], text[: limit - 20]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    llm = make_llm(spec, max_num_batched_tokens=4096)
    drafter = drafter_of(llm)
    monkeypatch.setattr(drafter, "traits", dataclasses.replace(drafter.traits, context_length=limit))
    alone = [llm.generate(prompt, params)[0] for prompt in short]
    llm.reset_caches()
    lengths: dict[str, list[tuple[int, int]]] = {}
    propose = llm.engine.drafting.propose

    def spy(scheduled: Seq[StepItem], *given: Any) -> Any:
        record = propose(scheduled, *given)
        for item in scheduled:
            sequence, drafted = item.sequence, len(item.proposal)
            lengths.setdefault(sequence.request_id, []).append((len(sequence.token_ids), drafted))
        return record

    monkeypatch.setattr(llm.engine.drafting, "propose", spy)
    batch = [short[0], long, short[1], growing, *short[2:]]
    outputs = llm.generate(batch, params)
    for prompt, output in zip(batch, outputs, strict=True):
        reference = plain.generate(prompt, params)[0].outputs[0]
        assert output.outputs[0].token_ids == reference.token_ids
        for length, drafted in lengths[output.request_id]:
            assert drafted == 0 or length + 4 <= limit, "no draft token beyond what the draft can hold"
    assert outputs[1].metrics.num_draft_tokens == 0
    assert outputs[3].metrics.num_draft_tokens > 0
    assert lengths[outputs[3].request_id][-1][0] > limit, "it outgrew the draft under way"
    for output, before in zip([outputs[0], outputs[2], *outputs[4:]], alone, strict=True):
        assert output.metrics.num_draft_tokens == before.metrics.num_draft_tokens > 0
        assert output.metrics.num_accepted_tokens == before.metrics.num_accepted_tokens
    assert llm.engine.stats().num_draft_failures == 0


@SHAPES
def test_a_batch_costs_as_many_draft_passes_as_one_sequence(
    make_llm: MakeLLM, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch, spec: dict[str, Any]
) -> None:
    llm = make_llm(spec)
    model = drafter_of(llm).model
    forward, propose = model.forward, llm.engine.drafting.propose
    passes: list[int] = []  # of each step
    groups: list[int] = []  # sequences in each pass

    def count(batch: Any, pool: Any) -> Any:
        passes[-1] += 1
        groups.append(len(batch))
        return forward(batch, pool)

    def count_chains(batch: Any, pool: Any, chains: Chains) -> list[list[int]]:
        passes[-1] += chains.depth
        groups.append(len(batch))
        drawn: list[list[int]] = draw(batch, pool, chains)
        return drawn

    def count_trees(rows: Any, pool: Any, drafts: Any, *given: Any) -> Any:
        drawn = draft(rows, pool, drafts, *given)
        if drawn is not None and not isinstance(drafts, Chains):
            passes[-1] += 1 + len(drafts.shape.fed)
            groups.append(len(rows.groups))
        return drawn

    def step(scheduled: Seq[StepItem], *given: Any) -> Any:
        passes.append(0)
        return propose(scheduled, *given)

    draw, draft = model.draft_chain, model.executor.draft
    monkeypatch.setattr(model, "draft_chain", count_chains)  # a pass a level
    monkeypatch.setattr(model.executor, "draft", count_trees)
    monkeypatch.setattr(model, "forward", count)
    monkeypatch.setattr(llm.engine.drafting, "propose", step)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    short = sorted(prompts, key=len)
    llm.generate(short[0], params)
    alone = passes.copy()
    assert max(alone) == 4, "one pass a level"
    for batch in ([short[0]] * 8, short[:8]):
        llm.reset_caches()
        passes.clear()
        groups.clear()
        llm.generate(batch, params)
        assert max(passes) == 4, "as many a step as for one"
        assert max(groups) == 8
        if batch[0] == batch[1]:
            assert passes == alone
        else:
            assert sum(passes) < 2 * sum(alone), "a batch takes as many steps as its slowest"
