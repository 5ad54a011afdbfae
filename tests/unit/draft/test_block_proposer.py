"""A drafter with entries of its own that drafts a block in one pass needs a `grow` of its own, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from slipstream import LLM, SamplingParams
from slipstream.assets import EMBEDDED_DRAFT, EMBEDDED_TARGET
from slipstream.draft.model.draft_model import DraftModelDrafter, DraftModelOptions
from slipstream.draft.proposers.draft_tree import DraftTree
from slipstream.draft.registry import DRAFTERS
from slipstream.models import RowGroup, load_tokenizer
from slipstream.testing.conformance import check_drafter
from slipstream.testing.stub_drafters import draft_context

pytestmark = pytest.mark.usefixtures("drafts_loaded_once")

VOCAB = 4096
MASK = 5
"""The token that stands in a block for those that are drafted."""


class BlockDrafter(DraftModelDrafter):
    """One pass over the text that is new and a mask for each further token; each row's logits are a level."""

    keeps_accepted = False  # the block's entries are the masks'

    def grow(self, trees: list[DraftTree]) -> None:
        if not (feeds := self.pending_feeds(trees)):
            return
        blocks = []
        for feed in feeds:
            masks = [MASK] * (feed.tree.max_depth - 1) if feed.rows.logit_rows else []
            last = len(feed.rows.token_ids) - 1
            wanted = range(last, last + 1 + len(masks)) if feed.rows.logit_rows else []
            blocks.append(
                RowGroup(feed.rows.slots, feed.rows.num_past, [*feed.rows.token_ids, *masks], wanted)
            )
        logits = self.model.forward(blocks, self.cache.pool).logits[:, :VOCAB]
        for feed, levels in zip(
            feeds, logits.split([len(block.logit_rows) for block in blocks]), strict=True
        ):
            self.commit_feed(feed)
            for level in levels:
                feed.tree.grow(level.expand(len(feed.tree.frontier), -1))


@pytest.mark.parametrize("shape", [{}, {"tree_top_k": 3, "num_draft_nodes": 7}])
def test_it_keeps_the_contract(shape: dict[str, Any]) -> None:
    context = draft_context(VOCAB, 512, "coupled", tokenizer=load_tokenizer(EMBEDDED_TARGET))
    check_drafter(
        lambda: BlockDrafter(DraftModelOptions(model=EMBEDDED_DRAFT, **shape), context),
        VOCAB,
        verifier="coupled",
        params=[SamplingParams(temperature=temperature, seed=3) for temperature in (0.0, 0.9)],
        max_len=60,
        num_sequences=4,
    )


@pytest.fixture
def registered() -> Iterator[str]:
    DRAFTERS.register("block", BlockDrafter)
    yield "block"
    DRAFTERS.unregister("block")


def test_it_changes_no_text(registered: str) -> None:
    prompts = ["1, 2, 3, 1, 2, 3,", "Show me how to use the command `tar`."]
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    plain = LLM().generate(prompts, params)
    spec = {"method": registered, "model": EMBEDDED_DRAFT, "num_speculative_tokens": 4}
    drafted = LLM(speculative_config=spec, max_num_batched_tokens=8).generate(prompts, params)
    assert [o.outputs[0].token_ids for o in drafted] == [o.outputs[0].token_ids for o in plain]
    assert all(output.metrics.num_accepted_tokens > 0 for output in drafted)
