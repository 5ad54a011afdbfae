"""Drafters of block heads: what they draft depends on the text alone, and the text never on what they draft."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.assets import EMBEDDED_TARGET
from slipstream.config import EngineConfig
from slipstream.core.proposal import Proposal
from slipstream.draft.base import DraftContext
from slipstream.models import load_model, load_tokenizer
from slipstream.testing.conformance import check_drafter
from slipstream.testing.stub_drafters import draft_context
from tests.kit.block_heads import LAYOUTS, VOCAB, RandomBlockDrafter, RandomBlockOptions
from tests.kit.head_drafters import CHOICES, computed, text

METHOD = "tests.kit.block_heads:RandomBlockDrafter"
SHAPES: list[tuple[dict[str, Any], str]] = [
    ({}, "coupled"),
    ({"num_speculative_tokens": 2, "draft_sample_method": "greedy"}, "coupled"),
    ({"tree_top_k": 3, "num_draft_nodes": 9}, "coupled"),
    ({"tree_choices": CHOICES}, "coupled"),
    ({}, "rejection"),
    ({"tree_choices": CHOICES}, "rejection"),
    ({"tree_top_k": 2}, "block"),
    ({"confidence_threshold": 0.02}, "rejection"),
]


def context(verifier: str) -> DraftContext:
    target = load_model(EMBEDDED_TARGET)
    made = draft_context(VOCAB, 512, verifier, load_tokenizer(EMBEDDED_TARGET))
    return replace(made, target=target, dtype=target.dtype, engine_config=EngineConfig(EMBEDDED_TARGET))


def cases() -> list[tuple[str, dict[str, Any], str]]:
    """Every layout with a chain, and every shape."""
    chains = [(layout, *SHAPES[0]) for layout in LAYOUTS]
    return [
        *chains,
        *(("mask", *shape) for shape in SHAPES[1:]),
        *(("markov", *shape) for shape in SHAPES[-2:]),
        ("pruned", *SHAPES[2]),
    ]


@pytest.mark.parametrize(("layout", "shape", "verifier"), cases(), ids=str)
def test_it_keeps_the_contract(layout: str, shape: dict[str, Any], verifier: str) -> None:
    given = context(verifier)
    check_drafter(
        lambda: RandomBlockDrafter(RandomBlockOptions(model=layout, **shape), given),
        VOCAB,
        verifier=verifier,
        params=[SamplingParams(temperature=temperature, seed=3) for temperature in (0.0, 0.9)],
        max_len=24,
        num_sequences=3,
        depends_on_text_only=True,
    )


PROMPTS = ["1, 2, 3, 1, 2, 3,", "Show me how to use the command `tar`.", "1, 2, 3, 1, 2, 3, 1", "Hi"]
REQUESTS = [
    SamplingParams(temperature=temperature, seed=3, max_tokens=16, ignore_eos=True)
    for temperature in (0.0, 0.9)
]


def texts(llm: LLM, drafts: bool = True) -> list[list[int]]:
    """In batches, and again with prefixes that were kept."""
    outputs = [output for params in REQUESTS for output in llm.generate(PROMPTS, params)]
    assert llm.engine.integrity() == []
    assert llm.engine.stats().num_draft_failures == 0
    assert all(output.metrics.num_draft_tokens > 0 for output in outputs) == drafts
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    return texts(LLM(), drafts=False)


@pytest.mark.parametrize(
    ("layout", "shape"),
    [
        *((layout, {}) for layout in ("mask", "dflash2", "rnn")),
        *(
            (layout, {"tree_top_k": 3, "num_draft_nodes": 9})
            for layout in ("mask", "mixed", "markov", "pruned")
        ),
    ],
    ids=str,
)
def test_it_changes_no_text(layout: str, shape: dict[str, Any], plain: list[list[int]]) -> None:
    spec = {"method": METHOD, "model": layout, **shape}
    llm = LLM(speculative_config=spec, max_num_batched_tokens=16, max_num_seqs=3)
    assert texts(llm) == plain


@torch.inference_mode()
@pytest.mark.parametrize(("layout", "shorter"), [("causal", True), ("mask", False), ("refiner", False)])
def test_a_shorter_draft_is_the_longer_one_cut(
    layout: str, shorter: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only where no row sees those behind it may a pass have fewer rows."""
    given, drafts, rows = context("coupled"), {}, {}
    for depth in (4, 2):
        drafter = RandomBlockDrafter(RandomBlockOptions(model=layout, num_speculative_tokens=depth), given)
        forward = drafter.executor.forward
        monkeypatch.setattr(
            drafter.executor,
            "forward",
            lambda blocks, pool, depth=depth, forward=forward: (
                rows.update({depth: len(blocks[0].token_ids)}) or forward(blocks, pool)
            ),
        )
        drafter.allocate(1024)
        sequence, _ = computed(drafter, text(20), features=(2, 5))
        drafts[depth] = drafter.propose([sequence], [depth])[0].token_ids
    assert drafts[2] == drafts[4][:2]
    assert len(drafts[4]) == 4
    assert rows == {4: 5, 2: 3 if shorter else 5}


@torch.inference_mode()
@pytest.mark.parametrize("layout", ["markov", "pruned"])
def test_a_chain_ends_by_what_the_head_says_of_its_tokens(
    layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the product of its estimates falls below the threshold, whatever is drawn at the row itself."""
    said = iter([0.9, 0.8, 0.6, 0.5])
    options = RandomBlockOptions(model=layout, confidence_threshold=0.5)
    drafter = RandomBlockDrafter(options, context("coupled"))
    asked: list[list[int]] = []

    def confidence(states: torch.Tensor, previous: torch.Tensor) -> list[float]:
        asked.append(previous.tolist())
        return [next(said)]

    monkeypatch.setattr(drafter.executor, "confidence", confidence)
    drafter.allocate(1024)
    sequence, _ = computed(drafter, text(20), features=(2, 5))
    drafted = drafter.propose([sequence], [4])[0].token_ids
    assert len(drafted) == 2  # 0.9 * 0.8 * 0.6 < 0.5
    assert asked == [[sequence.token_ids[-1]], [drafted[0]], [drafted[1]]]


@torch.inference_mode()
@pytest.mark.parametrize("verifier", ["coupled", "rejection"])
@pytest.mark.parametrize("layout", ["markov", "pruned"])
def test_a_tree_spends_its_nodes_where_the_head_expects_acceptance(
    layout: str, verifier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a head says nothing, is sure of all levels, or of the first one alone."""
    top_k, num_nodes = 6, 14
    drafts: dict[str, Proposal] = {}
    for name, said in (("silent", None), ("sure", [1.0] * 4), ("shallow", [1.0, 1e-9, 1.0, 1.0])):
        options = RandomBlockOptions(model=layout, tree_top_k=top_k, num_draft_nodes=num_nodes)
        drafter = RandomBlockDrafter(options, context(verifier))
        asked: list[int] = []
        passes: list[torch.Tensor] = []

        def forward(*given: Any, forward: Any = drafter.executor.forward, passes: Any = passes) -> Any:
            passes.append(forward(*given))
            return passes[-1]

        def confidence(
            states: Any, previous: Any, said: Any = said, asked: Any = asked, passes: Any = passes
        ) -> Any:
            asked.append(len(previous))
            rows = passes[-1][0][0, 1:]
            if layout == "pruned":  # marginals: all levels at once
                assert states.equal(rows)
                return said
            level = len(asked) - 1
            assert states.equal(rows[level].expand(len(previous), -1))
            return said and [said[level]] * len(previous)

        spread = drafter.executor.spread
        monkeypatch.setattr(drafter.executor, "forward", forward)
        monkeypatch.setattr(drafter.executor, "confidence", confidence)
        # A random head's probabilities are flat, and its trees as wide as they can be.
        monkeypatch.setattr(drafter.executor, "spread", lambda logits, spread=spread: 9 * spread(logits))
        drafter.allocate(1024)
        sequence, _ = computed(drafter, text(20), features=(2, 5))
        drafts[name] = drafter.propose([sequence], [num_nodes])[0]
        assert asked == ([4] if layout == "pruned" else [1, 6, 6, 6])
    at_the_top = {name: draft.depths.count(1) for name, draft in drafts.items()}
    assert drafts["sure"] == drafts["silent"]
    assert at_the_top["sure"] < top_k == at_the_top["shallow"]
