"""Learners on the embedded draft: what they learn, what they keep, and how their drafts are scored."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.assets import EMBEDDED_DRAFT
from slipstream.config import SpeculativeConfig
from slipstream.errors import LearnError
from slipstream.learn.learners.base_draft import BaseDraft
from slipstream.learn.learners.batches import batch_of, batches, example_of
from slipstream.learn.learners.learner_options import LearnerOptions
from slipstream.learn.learners.objective import TargetRows, learn_loss, reached, row_losses
from slipstream.learn.learners.registry import check_learns, make_learner
from slipstream.learn.learners.scoring import replayed
from slipstream.learn.records.served import CheckedRows, Purpose, ServedRecord


def told(number: int, temperature: float = 0.0) -> ServedRecord:
    """An answer that the target was sure of: it counts in steps that depend on nothing but the last token."""
    tokens = 300 + (7 * number + 13 * np.arange(24)) % 200
    ids = np.stack([tokens, (tokens + 1) % 200 + 700, (tokens + 2) % 200 + 900], 1)[8:].astype(np.int32)
    num = len(ids)
    branch = np.array([[950, 951, 952]], np.int32)
    rows = CheckedRows(
        positions=np.array([*range(num), 1], np.int32),
        depths=np.array([*([0] * num), 1], np.int32),
        path_ids=np.array([ids[1, 1]], np.int32),
        path_ends=np.array([*([0] * num), 1], np.int32),
        top_ids=np.concatenate([ids, branch]),
        top_log_probs=np.log(np.tile([0.9, 0.05, 0.01], (num + 1, 1))).astype(np.float16),
        logsumexps=np.zeros(num + 1, np.float32),
    )
    return ServedRecord(
        f"told-{number}",
        "model",
        "template",
        tokens[:8].astype(np.int32),
        tokens[8:].astype(np.int32),
        rows,
        temperature=temperature,
        seed=number,
        purpose=Purpose.TRAIN,
    )


def test_a_branch_sees_the_text_before_it_and_no_more():
    example = example_of(told(0), 512)
    assert example is not None
    assert len(example.tokens) == 23 + 1
    assert example.visible[-1].nonzero()[0].tolist() == [*range(9), 23]
    assert example.positions[-1] == 9
    assert example.places[-1] == 23
    assert example.weights[-1] == pytest.approx(0.05, rel=0.01)
    batch = batch_of([[example, example]])
    assert not (batch.attention_mask[0, 0, 24:, :24] == 0).any()
    assert batch.previous[-1] == example.tokens[-1]


def test_half_of_a_batch_is_older():
    older = [replace(told(number), prompt_ids=np.full(8, 5, np.int32)) for number in range(3)]
    found = next(batches([told(1)], older, rows=4, length=40, seed=0))
    assert [(row == 5).any().item() for row in found.token_ids] == [False, False, True, True]
    with pytest.raises(LearnError, match="none of 1 records"):
        next(batches([replace(told(1), rows=CheckedRows())], [], rows=4, length=40, seed=0))


def test_rows_that_come_free_weigh_less():
    chance = reached(torch.tensor([0.1, 0.9, 0.8, 0.5, 0.7]), torch.tensor([0, 1, 2, 3, -1]), 2)
    assert chance.tolist() == pytest.approx([0.0, 1.0, 1.0, 1 - 0.9 * 0.8, 1.0])


def test_the_loss_is_smallest_where_the_draft_is_the_target():
    logits = torch.randn(5, 12, generator=torch.Generator().manual_seed(0))
    top = torch.log_softmax(logits, -1).topk(4)
    rows = TargetRows(top.indices, top.values, torch.full((5,), 1.0), torch.ones(5), torch.full((5,), -1))
    same = learn_loss(logits, rows, 4)
    assert same.overlap == pytest.approx(1, abs=1e-4)
    assert float(same.loss) == pytest.approx(0, abs=1e-4)
    assert float(learn_loss(logits.roll(1, 1), rows, 4).loss) > 0.1


def test_tokens_that_a_head_cannot_draft_are_lost_and_teach_nothing():
    generator = torch.Generator().manual_seed(0)
    rows = TargetRows(
        torch.tensor([[0, 5, 2], [5, 6, 7]]),
        torch.tensor([[0.5, 0.3, 0.1], [0.5, 0.3, 0.1]]).log(),
        torch.ones(2),
        torch.ones(2),
        torch.zeros(2, dtype=torch.int64),
    )
    logits = torch.randn(2, 8, generator=generator)
    same = row_losses(logits, rows), row_losses(logits, rows, torch.arange(8))
    assert torch.equal(same[0][0], same[1][0])
    assert torch.equal(same[0][1], same[1][1])
    draft_ids = torch.tensor([0, 1, 2, 3, 4, -1, -1, -1])
    target = torch.tensor(
        [0.5, 0.1 / 3, 0.1, 0.1 / 3, 0.1 / 3]
    ).log()  # the tail's 0.1 over those that it has
    divergence, overlap = row_losses(target[None].repeat(2, 1), rows, draft_ids)
    assert divergence[0].item() == pytest.approx(0, abs=1e-4), "it can come no nearer to the target"
    assert overlap[0].item() == pytest.approx(0.5 + 0.1 + 0.1, abs=1e-3)
    assert overlap[1].item() == pytest.approx(0.1, abs=1e-3)
    assert divergence.isfinite().all()


@pytest.mark.parametrize(("name", "rate"), [("whole", 5e-3), ("low_rank", 2e-2), ("corrective", 0.1)])
def test_a_learner_gets_better_and_its_tensors_are_all_that_it_needs(name: str, rate: float, tmp_path: Path):
    options = LearnerOptions(num_steps=20, batch_rows=2, row_length=128, learning_rate=rate)
    learner = make_learner(name, BaseDraft(EMBEDDED_DRAFT), options)
    seen: list[int] = []
    learned = learner.learn([told(number) for number in range(12)], before_step=lambda at, _: seen.append(at))
    assert seen == list(range(20))
    held_out = [told(number) for number in range(20, 26)]
    steps = [
        sum(replayed(hits, 4).num_steps for hits in learner.scorer(tensors).hits(held_out))
        for tensors in (None, learned.tensors)
    ]
    assert steps[1] < 0.8 * steps[0]
    if name == "corrective":
        with pytest.raises(LearnError, match="no draft of its own"):
            learner.checkpoint(learned.tensors, tmp_path)
    else:
        learner.checkpoint(learned.tensors, tmp_path)
        saved = make_learner("whole", BaseDraft(str(tmp_path)), options).scorer(None).hits(held_out)
        assert all(
            (one == two).mean() > 0.9
            for one, two in zip(saved, learner.scorer(learned.tensors).hits(held_out), strict=True)
        )


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_what_is_scored_is_what_the_engine_would_have_accepted(temperature: float):
    llm = LLM(speculative_config={"method": "draft_model", "model": EMBEDDED_DRAFT}, dtype="float32")
    prompt = list(range(200, 230))
    params = SamplingParams(temperature=temperature, top_p=0.95, max_tokens=40, seed=3, ignore_eos=True)
    output = llm.generate([prompt], params)[0]
    token_ids = output.outputs[0].token_ids
    record = replace(
        told(0, temperature),
        prompt_ids=np.array(prompt, np.int32),
        token_ids=np.array(token_ids, np.int32),
        top_p=0.95,
        seed=3,
    )
    learner = make_learner("whole", BaseDraft(EMBEDDED_DRAFT), LearnerOptions())
    [hits] = learner.scorer(None).hits([record])
    found = replayed(hits, 4)
    assert abs(sum(found.accepted) - output.metrics.num_accepted_tokens) <= 1


def test_a_drafter_that_does_not_learn_here_says_so_in_a_line():
    with pytest.raises(LearnError, match=r"'ngram' learns by itself.*--learn is for draft_model, eagle3"):
        check_learns(SpeculativeConfig("ngram"))
    for method in ("auto", "ensemble"):
        with pytest.raises(
            LearnError, match=f"drafter '{method}' does not; --learn is for draft_model, eagle3, eagle"
        ):
            check_learns(SpeculativeConfig(method))
    with pytest.raises(LearnError, match="without a drafter"):
        check_learns(None)
    check_learns(SpeculativeConfig("draft_model", options={"model": "a"}))
