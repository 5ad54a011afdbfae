"""Block drafters in training: each block computed as in serving, no look ahead, and losses that mean what they say."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.draft.heads.corrections import CandidateSelector
from slipstream.draft.heads.dflash_head import DFlashConfig, DFlashHead
from slipstream.draft.heads.left_to_right import LeftToRightConfig
from slipstream.train.batches import TargetScores, TrainingBatch, TrainingDocument, make_batch, pack
from slipstream.train.block_loss import (
    BlockPass,
    DraftedTokens,
    block_loss,
    decay_weights,
    draft_blocks,
    draft_metrics,
    position_weights,
    total_variation,
)
from slipstream.train.block_options import BlockTrainOptions
from slipstream.train.blocks import AnchoredBlocks, choose_blocks
from slipstream.train.target import FrozenTarget

LENGTH, BLOCK, LAYERS = 60, 4, (1, 2)


def head_for(target: FrozenTarget, seed: int = 0, **options: Any) -> DFlashHead:
    """A random head of two layers; all of its matrices matter."""
    torch.manual_seed(seed)
    flags: dict[str, Any] = {
        "causal": (False, False),
        "windows": (None, None),
        "draft_vocab_size": target.vocab_size,
    }
    head = DFlashHead(
        DFlashConfig(
            hidden_size=target.hidden_size,
            target_hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            intermediate_size=40,
            num_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            feature_layers=LAYERS,
            block_size=BLOCK,
            mask_token_id=3,
            **{**flags, **options},
        )
    )
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape))
    return head.eval()


def batch_of(target: FrozenTarget, documents: list[TrainingDocument], rows: int = 2) -> TrainingBatch:
    packed = pack(documents, LENGTH, 0, np.random.default_rng(0)).take(slice(0, rows))
    return make_batch(packed, target, LAYERS)


def project_of(target: FrozenTarget) -> Any:
    return target.model.get_output_embeddings()


def drafted(head: DFlashHead, batch: TrainingBatch, blocks: AnchoredBlocks) -> BlockPass:
    return draft_blocks(head, batch, blocks, batch.target.embed, project_of(batch.target))


def blocks_of(batch: TrainingBatch, head: DFlashHead, num_anchors: int = 6, seed: int = 0) -> AnchoredBlocks:
    blocks = choose_blocks(batch, num_anchors, head.config.num_drafts, [seed])
    assert blocks is not None
    return blocks


def alone(head: DFlashHead, batch: TrainingBatch, row: int, anchor: int) -> Tensor:
    """[N, hidden]: one block as the engine computes it, over the tokens of its document before the anchor."""
    number = batch.documents[row, anchor]
    context = [t for t in range(anchor) if batch.documents[row, t] == number]
    features = torch.cat([batch.hidden_states[layer][row, context] for layer in LAYERS], dim=-1)
    entries = head.context_entries(head.encode(features[None]), torch.arange(len(context))[None])

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = (
            torch.cat([held, own], dim=2) for held, own in zip(entries[layer], (key, value), strict=True)
        )
        seen = torch.ones(BLOCK, len(context) + BLOCK, dtype=torch.bool)
        if head.config.causal[layer]:
            seen = seen.tril(len(context))
        if (window := head.config.windows[layer]) is not None:
            seen[:, : max(0, len(context) - window)] = False
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=seen, enable_gqa=True).transpose(
            1, 2
        )

    inputs = torch.tensor([[int(batch.token_ids[row, anchor])] + [head.config.mask_token_id] * (BLOCK - 1)])
    positions = torch.arange(len(context), len(context) + BLOCK)[None]
    return head(batch.target.embed(inputs), positions, attend)[0]


FORMS: dict[str, dict[str, Any]] = {
    "DFlash": {},
    "from the anchor": {"from_anchor": True},
    "causal": {"causal": (True, True)},
    "causal and windowed in part": {"causal": (True, False), "windows": (None, 3)},
    "convolutions": {"convolution_taps": 2, "convolution_group": 8},
    "Markov": {"from_anchor": True, "left_to_right": LeftToRightConfig(kind="vanilla", rank=4)},
    "recurrent": {"left_to_right": LeftToRightConfig(kind="rnn", rank=4)},
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_blocks_of_a_pass_are_those_of_the_engine(
    form: dict[str, Any], target: FrozenTarget, documents: list[TrainingDocument]
) -> None:
    """One pass over all blocks of packed rows gives each what it gets alone: no other document, token or block."""
    head, batch = head_for(target, **form), batch_of(target, documents)
    blocks = blocks_of(batch, head)
    assert int((batch.documents[0] >= 0).sum()) > int((batch.documents[0] == 0).sum()), "several documents"
    with torch.no_grad():
        made = drafted(head, batch, blocks)
        for row in range(2):
            for place, anchor in enumerate(blocks.anchors[row].tolist()):
                expected = alone(head, batch, row, anchor)
                number = row * blocks.anchors.shape[1] + place
                torch.testing.assert_close(made.hidden[number], expected, rtol=1e-3, atol=1e-4)
                if head.left_to_right is None:
                    logits = project_of(target)(expected[head.config.first_slot :])
                    torch.testing.assert_close(made.logits[number], logits, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_no_draft_token_knows_what_it_is_to_draft(
    form: dict[str, Any], target: FrozenTarget, documents: list[TrainingDocument]
) -> None:
    """Everything from the anchor on may change, but for the tokens that a left-to-right head has already drafted."""
    head, batch = head_for(target, **form), batch_of(target, documents, rows=1)
    blocks = blocks_of(batch, head, num_anchors=3)
    anchor = int(blocks.anchors[0, 1])
    later = torch.arange(LENGTH) >= anchor
    states = batch.hidden_states.items()
    hidden = {layer: torch.where(later[:, None], state + 1, state) for layer, state in states}
    before = {layer: torch.where(later[:, None], state, state + 1) for layer, state in states}
    number = 1
    with torch.no_grad():
        made = drafted(head, batch, blocks)
        changed = drafted(head, replace(batch, hidden_states=hidden), blocks)
        assert torch.equal(made.logits[number], changed.logits[number])
        tokens = blocks.tokens.clone()
        tokens[number, 2:] = 7  # behind the first draft token
        other = drafted(head, batch, blocks._replace(tokens=tokens))
        assert torch.equal(made.logits[number, :2], other.logits[number, :2])
        assert torch.equal(made.base_logits, other.base_logits)
        other = drafted(head, replace(batch, hidden_states=before), blocks)
        assert not torch.allclose(made.logits[number], other.logits[number]), "the context is read"


def test_blocks_begin_in_answers_and_end_with_them(
    target: FrozenTarget, documents: list[TrainingDocument]
) -> None:
    batch = batch_of(target, documents)
    gaps = torch.arange(LENGTH) % 9 == 0  # as between two answers of a conversation
    batch = replace(batch, loss_mask=batch.loss_mask & ~gaps)
    blocks = choose_blocks(batch, 10, 5, [3])
    assert blocks is not None
    assert blocks.anchors.shape == (2, 10)
    for row in range(2):
        assert len(set(blocks.anchors[row].tolist())) == 10
        for place, anchor in enumerate(blocks.anchors[row].tolist()):
            number = row * 10 + place
            assert blocks.tokens[number, 0] == batch.token_ids[row, anchor]
            inside = True
            for draft in range(5):
                t = anchor + 1 + draft
                inside = inside and t < LENGTH and bool(batch.loss_mask[row, t - 1])
                assert bool(blocks.is_learned[number, draft]) == inside
                if inside:
                    assert blocks.tokens[number, 1 + draft] == batch.labels[row, t - 1]
            first = batch.positions[row, anchor] == 0
            assert blocks.before[number] == batch.token_ids[row, anchor if first else anchor - 1]
    again, other = choose_blocks(batch, 10, 5, [3]), choose_blocks(batch, 10, 5, [4])
    assert again is not None
    assert other is not None
    assert torch.equal(again.anchors, blocks.anchors)
    assert not torch.equal(other.anchors, blocks.anchors)
    few = replace(
        batch, loss_mask=batch.loss_mask & (torch.arange(LENGTH) < 14) & torch.tensor([[True], [False]])
    )
    sparse = choose_blocks(few, 10, 5, [3])
    assert sparse is not None
    assert not sparse.is_learned[sparse.anchors.shape[1] :].any(), (
        "a row without answers has nothing to learn"
    )
    assert choose_blocks(replace(batch, loss_mask=torch.zeros_like(batch.loss_mask)), 10, 5, [3]) is None


@pytest.mark.parametrize("from_anchor", [False, True])
@pytest.mark.parametrize("loss", ["hard", "forward_kl", "total_variation"])
def test_a_loss_is_the_one_that_loops_give(
    loss: str, from_anchor: bool, target: FrozenTarget, documents: list[TrainingDocument]
) -> None:
    """Each layout learns the text's token at its own distance from the anchor, weighted by exp(-k / gamma)."""
    head, batch = head_for(target, from_anchor=from_anchor), batch_of(target, documents)
    blocks = blocks_of(batch, head)
    options = BlockTrainOptions(loss=loss, gamma=2.0)
    with torch.no_grad():
        value, metrics = block_loss(head, batch, blocks, drafted(head, batch, blocks), options)
        total, count, hits = 0.0, 0, 0
        for row in range(2):
            for anchor in blocks.anchors[row].tolist():
                logits = project_of(target)(alone(head, batch, row, anchor))
                for k in range(BLOCK if from_anchor else BLOCK - 1):
                    slot = k if from_anchor else k + 1  # predicts s + slot + 1, or its own s + slot
                    position = anchor + slot + (1 if from_anchor else 0)
                    if position >= LENGTH or not batch.loss_mask[row, position - 1]:
                        break
                    log_q = logits[slot].log_softmax(-1)
                    p = batch.target_logits[row, position - 1].softmax(-1)
                    each = {
                        "hard": -log_q[batch.token_ids[row, position]],
                        "forward_kl": (p * (p.log() - log_q)).sum(),
                        "total_variation": (p - log_q.exp()).abs().sum() / 2,
                    }[loss]
                    total += math.exp(-k / 2.0) * float(each)
                    count += 1
                    hits += k == 0 and int(log_q.argmax() == batch.token_ids[row, position])
        assert float(value) == pytest.approx(total / count, rel=1e-3)
        assert metrics["agrees_1"] == pytest.approx(hits / blocks.anchors.numel())


def pruned(target: FrozenTarget, documents: list[TrainingDocument], **options: Any) -> DFlashHead:
    """A head that drafts half of the tokens of the documents' answers."""
    used = np.unique(np.concatenate([document.tokens[document.is_answer] for document in documents]))
    ids = torch.from_numpy(used[::2])
    head = head_for(target, draft_vocab_size=len(ids), **options)
    head.draft_token_ids = ids
    head.lm_head = torch.nn.Linear(target.hidden_size, len(ids), bias=False)
    return head


def test_a_token_outside_the_draft_vocabulary_ends_its_block(
    target: FrozenTarget, documents: list[TrainingDocument]
) -> None:
    head, batch = pruned(target, documents), batch_of(target, documents)
    blocks = blocks_of(batch, head, 20)
    tokens = DraftedTokens.of(blocks, head)
    known = set(head.draft_token_ids.tolist())
    reached, learned = torch.zeros_like(tokens.is_reached), torch.zeros_like(tokens.is_reached)
    index = {token: number for number, token in enumerate(head.draft_token_ids.tolist())}
    for number, row in enumerate(blocks.tokens[:, 1:].tolist()):
        for draft, token in enumerate(row):
            if not blocks.is_learned[number, draft]:
                break
            reached[number, draft] = True
            if token not in known:
                break
            learned[number, draft] = True
            assert tokens.labels[number, draft] == index[token]
    assert torch.equal(tokens.is_reached, reached)
    assert torch.equal(tokens.is_learned, learned)
    assert 0 < int(learned.sum()) < int(reached.sum())


def test_total_variation_counts_what_the_draft_vocabulary_lacks() -> None:
    logits = torch.randn(5, 9, generator=torch.Generator().manual_seed(0))
    some = torch.tensor([0, 3, 4])
    log_q = torch.randn(5, 3, generator=torch.Generator().manual_seed(1)).log_softmax(-1)
    q = torch.zeros(5, 9)
    q[:, some] = log_q.exp()
    expected = (logits.softmax(-1) - q).abs().sum(-1) / 2
    torch.testing.assert_close(total_variation(log_q, TargetScores.of(logits, some)), expected)


def test_confidence_learns_what_rejection_sampling_accepts(
    target: FrozenTarget, documents: list[TrainingDocument]
) -> None:
    """A confidence head learns 1 - total variation of the corrected draft, at every token that a draft reaches."""
    markov = LeftToRightConfig(kind="vanilla", rank=4)
    head = pruned(target, documents, from_anchor=True, left_to_right=markov, confidence="hidden+token")
    batch = batch_of(target, documents)
    blocks = blocks_of(batch, head)
    tokens = DraftedTokens.of(blocks, head)
    made = drafted(head, batch, blocks)
    only = block_loss(head, batch, blocks, made, BlockTrainOptions(loss="confidence=2"))
    found = []
    for number, draft in tokens.is_reached.nonzero().tolist():
        row, anchor = divmod(number, blocks.anchors.shape[1])[0], blocks.anchors.flatten()[number]
        p = batch.target_logits[row, anchor + draft].softmax(-1)
        q = torch.zeros_like(p)
        q[head.draft_token_ids] = made.logits[number, draft].softmax(-1)
        accepted = torch.minimum(p, q).sum().detach()
        c = head.confidence(made.hidden[number, draft], blocks.tokens[number, draft])
        assert c is not None
        each = -(accepted * F.logsigmoid(c) + (1 - accepted) * F.logsigmoid(-c))
        found.append(2 * math.exp(-draft / 4) * float(each.detach()))
    assert float(only[0].detach()) == pytest.approx(float(np.mean(found)), rel=1e-3)
    assert 0 <= only[1]["confidence_error"] <= 1


def drafts(*shape: int) -> DraftedTokens:
    """All draft tokens reached and learned; the text's token is 0."""
    every = torch.ones(shape, dtype=torch.bool)
    return DraftedTokens(every, every, torch.zeros(shape, dtype=torch.long))


def test_weights_along_a_block() -> None:
    tokens = drafts(2, 3)
    q = torch.tensor([[0.5, 1.0, 0.25], [0.1, 0.2, 0.4]])
    log_q = torch.stack([q, 1 - q], dim=-1).log()
    decay = decay_weights(tokens, BlockTrainOptions(gamma=7.0))
    assert decay.tolist() == pytest.approx([math.exp(-k / 7) for k in (0, 1, 2)])
    uniform = position_weights(tokens, BlockTrainOptions(position_weights="uniform"), log_q)
    assert uniform.tolist() == [1.0] * 3
    options = BlockTrainOptions(position_weights="dpace")
    dpace = position_weights(tokens, options, log_q)
    for row, weights in zip(q.tolist(), dpace.tolist(), strict=True):
        smooth = [0.5 * one + 0.5 for one in row]
        reach = [math.prod(smooth[: k + 1]) for k in range(3)]
        assert weights == pytest.approx([sum(reach[k:]) for k in range(3)])
    ended = replace(tokens, is_learned=torch.tensor([[True, False, False], [True, True, True]]))
    short = position_weights(ended, options, log_q)
    assert short[0].tolist() == pytest.approx([0.75, 0.0, 0.0])


def test_tau_is_what_a_greedy_draft_of_the_text_would_yield() -> None:
    logits = torch.zeros(3, 3, 4)
    logits[0, 0, 0] = logits[0, 2, 0] = 1.0  # right, wrong, right: one token stands
    logits[0, 1, 1] = 1.0
    logits[1:, :, 0] = 1.0  # all three
    begun = torch.tensor([[True] * 3, [True] * 3, [False] * 3])  # the last block has no text
    tokens = replace(drafts(3, 3), is_reached=begun, is_learned=begun)
    metrics = draft_metrics(logits, tokens)
    assert metrics == {"tau": 1 + (1 + 3) / 2, "agrees_1": 1.0, "agrees_2": 0.5, "agrees_3": 1.0}


def test_a_selector_learns_to_choose_among_its_candidates(
    target: FrozenTarget, documents: list[TrainingDocument]
) -> None:
    """The layers learn as without it; a text's token that is no candidate takes the place of the least likely one."""
    selector = LeftToRightConfig(kind="selector", rank=4, top_k=3)
    head, batch = head_for(target, left_to_right=selector), batch_of(target, documents)
    blocks = blocks_of(batch, head)
    made = drafted(head, batch, blocks)
    choose = head.left_to_right
    assert isinstance(choose, CandidateSelector)
    options = BlockTrainOptions(loss="hard", selector_weight=2.0)
    value = float(block_loss(head, batch, blocks, made, options)[0].detach())
    head.left_to_right = None
    plain = float(
        block_loss(head, batch, blocks, replace(made, logits=made.base_logits), options)[0].detach()
    )
    found = []
    for number, draft in blocks.is_learned.nonzero().tolist():
        base, label = made.base_logits[number, draft], int(blocks.tokens[number, 1 + draft])
        candidates = base.topk(3).indices.tolist()
        if label not in candidates:
            candidates[-1] = label
        read = choose.read(made.hidden[number : number + 1])[0, 1 + draft]
        scores = base[candidates] + choose.transitions(
            read, blocks.tokens[number, draft], torch.tensor(candidates)
        )
        chosen = scores.detach().log_softmax(-1)[candidates.index(label)]
        found.append(-float(chosen) * math.exp(-draft / 4))
    assert value == pytest.approx(plain + 2 * float(np.mean(found)), rel=1e-3)


@pytest.mark.parametrize(("fraction", "base"), [(0.0, 1.0), (0.125, 0.75), (0.5, 0.0), (0.9, 0.0)])
def test_a_gru_begins_with_the_layers_own_logits(
    fraction: float, base: float, target: FrozenTarget, documents: list[TrainingDocument]
) -> None:
    gru = LeftToRightConfig(kind="gru", rank=4, state_size=8)
    head, batch = head_for(target, left_to_right=gru), batch_of(target, documents)
    blocks = blocks_of(batch, head)
    made, options = drafted(head, batch, blocks), BlockTrainOptions(loss="hard")

    def value(part: BlockPass, at: float) -> float:
        return float(block_loss(head, replace(batch, fraction=at), blocks, part, options)[0].detach())

    final, own = value(made, 1.0), value(replace(made, logits=made.base_logits), 1.0)
    assert value(made, fraction) == pytest.approx((1 - base) * final + base * own, rel=1e-5)
    assert final != pytest.approx(own, rel=1e-3)
