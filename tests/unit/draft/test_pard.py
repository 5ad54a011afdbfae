"""PARD drafts what one pass of its model over the text and the masks says, and never reads a mask's entry again."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from slipstream import LLM, SamplingParams
from slipstream.assets import EMBEDDED_DRAFT, EMBEDDED_TARGET
from slipstream.config import EngineConfig, SpeculativeConfig
from slipstream.core.proposal import EMPTY_PROPOSAL, ProposalKind
from slipstream.core.sequence import Sequence
from slipstream.draft.base import Observation
from slipstream.draft.model.pard import PardDrafter, PardOptions
from slipstream.errors import ConfigError, ModelError
from slipstream.models import load_tokenizer
from slipstream.testing.stub_drafters import draft_context
from slipstream.tools.doctor.examination import kind_of
from slipstream.vllm_names import own_speculation
from tests.kit.head_drafters import text
from tests.kit.pard_models import MASK, pard_folder
from tests.unit.draft.test_draft_model import sequence

pytestmark = pytest.mark.usefixtures("drafts_loaded_once")

VOCAB, DEPTH = 4096, 5


def make(verifier: str = "coupled", **options: Any) -> PardDrafter:
    context = draft_context(VOCAB, 512, verifier, tokenizer=load_tokenizer(EMBEDDED_TARGET))
    # An exact reference has entries in 32 bits too.
    context = replace(context, engine_config=EngineConfig(EMBEDDED_TARGET, kv_cache_dtype="float32"))
    options = {"num_speculative_tokens": DEPTH, **options}
    drafter = PardDrafter(PardOptions(model=pard_folder(), **options), context)
    drafter.allocate(4096)
    return drafter


def reference(token_ids: list[int]) -> torch.Tensor:
    """[DEPTH, vocab]: the logits of a plain pass over the text and its masks, in Transformers' own code."""
    model = AutoModelForCausalLM.from_pretrained(pard_folder(), dtype=torch.float32)
    rows = [*token_ids, *[MASK] * (DEPTH - 1)]
    with torch.inference_mode():
        return model(torch.tensor([rows])).logits[0, -DEPTH:]


def given_logits(drafter: PardDrafter, asked: Sequence, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """The logits that a proposal is grown from."""
    found: list[torch.Tensor] = []
    forward = drafter.model.forward

    def noted(*given: Any) -> Any:
        output = forward(*given)
        found.append(output.logits)
        return output

    monkeypatch.setattr(drafter.model, "forward", noted)
    drafter.propose([asked], [DEPTH])
    return found[-1]


def test_its_logits_are_those_of_a_plain_pass_over_text_and_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    token_ids = text(40)
    logits = given_logits(make(), sequence(token_ids), monkeypatch)
    assert logits.shape == (DEPTH, VOCAB)
    assert float((logits - reference(token_ids)).abs().max()) <= 1e-4


def test_drafts_are_those_of_a_plain_pass_whatever_was_accepted() -> None:
    """Full, partial and no acceptance and a stretch without drafting: no entry of a mask is read as a token's."""
    drafter, rng, asked = make(), random.Random(1), sequence(text(60))
    for _ in range(8):
        [proposal] = drafter.propose([asked], [DEPTH])
        assert list(proposal.token_ids) == reference(asked.token_ids).argmax(-1).tolist()
        accepted = rng.randint(0, DEPTH)
        asked.token_ids += [*proposal.token_ids[:accepted], rng.randrange(8, VOCAB)]
        drafter.observe([Observation(asked, EMPTY_PROPOSAL, accepted, torch.empty(0))])
        assert drafter.cache.accounting.num_valid(0) <= len(asked.token_ids) - 1
        if rng.random() < 0.4:
            asked.token_ids += text(rng.randint(1, 30), seed=rng.randrange(99))
    drafter.release(asked)
    assert drafter.cache.accounting.num_held == 0


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_smaller_budget_and_other_sequences_change_no_token(temperature: float) -> None:
    drafter = make()
    alone = [drafter.propose([sequence(text(40, n), temperature, n)], [DEPTH])[0] for n in range(3)]
    drafter.reset()
    together = drafter.propose([sequence(text(40, n), temperature, n) for n in range(3)], [2, DEPTH, 3])
    assert [each.token_ids for each in together] == [
        one.token_ids[:budget] for one, budget in zip(alone, [2, DEPTH, 3], strict=True)
    ]


def test_draft_probabilities_are_the_marginals_that_tokens_were_drawn_from() -> None:
    """No level depends on what was drawn before it, so other seeds give the same distributions."""
    drawn = []
    for seed in range(2):
        asked = sequence(text(40), 1.0, seed)
        [proposal] = make("rejection").propose([asked], [DEPTH])
        assert proposal.kind is ProposalKind.SAMPLED_IID
        assert proposal.draft_probs is not None
        drawn.append((proposal.token_ids, proposal.draft_probs))
        assert torch.allclose(proposal.draft_probs, reference(asked.token_ids).softmax(-1), atol=1e-5)
    assert drawn[0][0] != drawn[1][0]


def test_a_tree_has_the_same_tokens_below_all_nodes_of_a_level() -> None:
    [tree] = make(tree_top_k=3, num_draft_nodes=20, draft_sample_method="greedy").propose(
        [sequence(text(40))], [20]
    )
    best = reference(text(40)).topk(3).indices.tolist()
    assert max(tree.depths) > 2
    assert all(token in best[depth - 1] for token, depth in zip(tree.token_ids, tree.depths, strict=True))


PROMPTS = ["Show me the command tar.", "SELECT name FROM", "def add(a, b):"]


@pytest.mark.parametrize(
    "options", [{}, {"tree_top_k": 3, "num_draft_nodes": 10}, {"confidence_threshold": 0.2}]
)
def test_texts_are_those_of_the_target(options: dict[str, Any]) -> None:
    params = [SamplingParams(temperature=t, max_tokens=20, seed=3) for t in (0.0, 0.9, 0.7)]
    expected = [each.outputs[0].token_ids for each in LLM().generate(PROMPTS, params)]
    llm = LLM(speculative_config={"method": "pard", "model": pard_folder(), **options}, max_num_seqs=2)
    for _ in range(2):  # the second time with reused prefixes
        answers = llm.generate(PROMPTS, params)
        assert [each.outputs[0].token_ids for each in answers] == expected
    assert sum(each.metrics.num_accepted_tokens for each in answers) > 0


def test_it_is_found_by_its_configuration_and_by_vllms_name() -> None:
    assert kind_of(pard_folder()) == "pard"
    given = {"method": "draft_model", "model": pard_folder(), "parallel_drafting": True}
    assert own_speculation(given) == {"method": "pard", "model": pard_folder()}
    assert SpeculativeConfig.from_short(f"pard:{pard_folder()}").method == "pard"


@pytest.mark.parametrize(
    ("folder", "message"),
    [
        (lambda: EMBEDDED_DRAFT, "has no pard_token; run it as draft_model"),
        (lambda: pard_folder(VOCAB), "the mask token 4096 is outside its vocabulary of 4096 tokens"),
        (lambda: pard_folder("<mask>"), "the mask token '<mask>' is outside its vocabulary"),
    ],
)
def test_a_model_without_a_mask_token_is_refused(folder: Any, message: str) -> None:
    context = draft_context(VOCAB, 512, "coupled", tokenizer=load_tokenizer(EMBEDDED_TARGET))
    with pytest.raises(ModelError, match=message):
        PardDrafter(PardOptions(model=folder()), context)


def test_a_correction_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="pard has no correction"):
        PardOptions(model=pard_folder(), correction=str(tmp_path))
