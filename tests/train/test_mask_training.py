"""Drafters that read masks learn what they draft with: chains of masks, P-EAGLE heads, PARD models."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerBase

from slipstream.errors import ConfigError
from slipstream.train.batches import Cursor, TrainingBatch, TrainingDocument, make_batch, row_batches
from slipstream.train.eagle import EagleStudent
from slipstream.train.evaluation import Evaluator
from slipstream.train.mask_chains import mask_chains
from slipstream.train.options import (
    EagleTrainOptions,
    MaskOptions,
    PardTrainOptions,
    PEagleTrainOptions,
    TrainOptions,
)
from slipstream.train.pard import PardStudent
from slipstream.train.peagle import PEagleStudent, masked_states
from slipstream.train.target import FrozenTarget
from slipstream.train.trainer import Student, Trainer

LENGTH, DEPTHS = 48, 4
KINDS = ("peagle", "pard", "pard2")


def student(
    kind: str,
    target: FrozenTarget,
    tokenizer: PreTrainedTokenizerBase,
    documents: list[TrainingDocument],
    **options: Any,
) -> Student:
    options = {"num_depths": DEPTHS, **options}
    if kind == "peagle":
        return PEagleStudent(PEagleTrainOptions(**options), target, tokenizer, documents, seed=0)
    if kind == "pard2":
        options = {"feature_layers": "-1,1", **options}
    wanted = PardTrainOptions(**({"shape": "1x32"} | options if "init" not in options else options))
    return PardStudent(wanted, target, tokenizer, documents, seed=0)


def batch_of(
    target: FrozenTarget, documents: list[TrainingDocument], layers: tuple[int, ...]
) -> TrainingBatch:
    rows = next(row_batches(documents, 4, LENGTH, 0, 0, Cursor()))
    return make_batch(rows, target, layers)


def test_rows_are_nested_chains_that_see_their_text_and_themselves(
    target: FrozenTarget, documents: list[TrainingDocument]
) -> None:
    batch = batch_of(target, documents, ())
    drawn = list(mask_chains(batch.documents, batch.loss_mask, MaskOptions(num_depths=DEPTHS), [0]))
    assert drawn
    for rows in drawn:
        of, learns = batch.documents[rows.row], batch.loss_mask[rows.row]
        pairs = list(zip(rows.places.tolist(), rows.depths.tolist(), strict=True))
        kept = set(pairs)
        assert len(kept) == len(pairs)
        assert {place for place, depth in pairs if depth == 0} == set(
            np.flatnonzero(of.numpy() >= 0).tolist()
        )
        counts = np.bincount(rows.depths.numpy(), minlength=DEPTHS)
        assert all(deeper <= before for before, deeper in pairwise(counts))
        for row, (place, depth) in enumerate(pairs):
            if depth:
                assert (place, depth - 1) in kept
                assert learns[place]
                assert learns[place + depth]
                assert of[place + depth] == of[place]
            for other, (earlier, masks) in enumerate(pairs):
                is_text = masks == 0 and earlier <= place and of[earlier] == of[place]
                is_own = masks > 0 and earlier == place and masks <= depth
                assert bool(rows.seen[row, other]) == (is_text or is_own)
        learned = {pairs[row] for row in rows.learned.tolist()}
        assert learned == {(place, depth) for place, depth in pairs if depth or learns[place]}


def test_shares_say_how_many_rows_are_kept(target: FrozenTarget, documents: list[TrainingDocument]) -> None:
    batch = batch_of(target, documents, ())

    def counts(**options: Any) -> Any:
        drawn = mask_chains(batch.documents, batch.loss_mask, MaskOptions(num_depths=DEPTHS, **options), [0])
        return np.array([np.bincount(rows.depths, minlength=DEPTHS) for rows in drawn])

    whole = counts(depth_share=1.0)
    assert (counts(depth_share=0.5, least_share=0.1)[:, 1] == np.round(whole[:, 1] * 0.5)).all()
    least = counts(depth_share=0.1, least_share=0.5)
    assert (least[:, 3] <= np.round(whole[:, 3] * 0.5)).all()
    assert (counts(max_anchors=3)[:, 1] <= 3).all()


def test_what_is_trained_is_what_is_drafted(
    target: FrozenTarget, tokenizer: PreTrainedTokenizerBase, documents: list[TrainingDocument]
) -> None:
    """Each chain's rows against a plain causal pass over its own document, masks behind it, without the others."""
    made = student("peagle", target, tokenizer, documents)
    assert isinstance(made, PEagleStudent)
    head = made.head
    assert head.mask_hidden is not None
    batch = batch_of(target, documents, tuple(made.feature_layers))
    features = torch.cat([batch.hidden_states[layer] for layer in made.feature_layers], dim=-1)
    masked = batch.documents.where(batch.positions > 0, -1)
    checked = 0

    def causal(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        attended = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True
        )
        return attended.transpose(1, 2)

    for rows in mask_chains(masked, batch.loss_mask, made.options, [0]):
        states = masked_states(head, batch, features[rows.row], target.embed, rows)
        for row in (rows.depths == DEPTHS - 1).nonzero()[:3, 0].tolist():
            place, depth = int(rows.places[row]), int(rows.depths[row])
            first = place - int(batch.positions[rows.row, place])
            tokens = [
                *batch.token_ids[rows.row, first + 1 : place + 1].tolist(),
                *[head.config.mask_token_id] * depth,
            ]
            read = torch.cat([features[rows.row, first:place], head.mask_hidden[0].expand(depth, -1)])
            plain = head(
                target.embed(torch.tensor([tokens])),
                head.encode(read)[None],
                torch.arange(len(tokens))[None],
                causal,
            )
            assert torch.allclose(plain[0, -1], states[row], atol=1e-5)
            checked += 1
    assert checked > 3


@pytest.mark.parametrize("kind", KINDS)
def test_it_learns_and_the_engine_drafts_with_what_was_saved(
    kind: str,
    tiny: str,
    target: FrozenTarget,
    tokenizer: PreTrainedTokenizerBase,
    documents: list[TrainingDocument],
    tmp_path: Path,
) -> None:
    options = TrainOptions(
        max_tokens=12_000, batch_rows=4, row_length=LENGTH, learning_rate=5e-3, log_every_s=0.0
    )
    made = student(kind, target, tokenizer, documents)
    Trainer(made, target, documents, 0, options, tmp_path / "run", {}).run()
    logged = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in logged if "loss" in row]
    assert np.mean(losses[-3:]) < 0.97 * losses[0]
    made.save(tmp_path / kind)
    config = made.speculative_config(tmp_path / kind)
    assert config.method == kind.removesuffix("2")
    figures = Evaluator(tiny, prompts_per_task=1, max_tokens=8).evaluate(config)
    assert figures.greedy.tau >= 1
    assert len(figures.greedy.conditional) >= 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_ends_bit_identical(
    kind: str,
    target: FrozenTarget,
    tokenizer: PreTrainedTokenizerBase,
    documents: list[TrainingDocument],
    tmp_path: Path,
) -> None:
    def trainer(folder: str) -> Trainer:
        options = TrainOptions(max_tokens=1500, batch_rows=4, row_length=LENGTH)
        made = student(kind, target, tokenizer, documents)
        return Trainer(made, target, documents, 0, options, tmp_path / folder, {"method": kind})

    whole, first = trainer("whole"), trainer("parts")
    whole.run()
    first.stop = lambda progress: progress.step == 2
    first.run()
    second = trainer("parts")
    second.run()
    for name, weight in whole.student.module.state_dict().items():
        assert torch.equal(weight, second.student.module.state_dict()[name]), name


def test_tokens_that_cannot_be_drafted_are_misses_and_not_learned(
    target: FrozenTarget, documents: list[TrainingDocument], tokenizer: PreTrainedTokenizerBase
) -> None:
    """Of a reduced vocabulary; the loss is the mean over the rows whose best token is in it."""
    small = student("peagle", target, tokenizer, documents, draft_vocab_size=3, depth_share=1.0)
    loss, metrics = small.loss(batch_of(target, documents, tuple(small.feature_layers)))
    assert torch.isfinite(loss)
    loss.backward()  # type: ignore[no-untyped-call]
    assert 0 < float(loss.detach()) < 3 * np.log(3) + 5
    assert all(0 <= metrics[f"agrees_{depth + 1}"] < 1 for depth in range(DEPTHS))


def test_a_head_begins_as_the_eagle3_head_that_it_is_made_of(
    target: FrozenTarget,
    tokenizer: PreTrainedTokenizerBase,
    documents: list[TrainingDocument],
    tmp_path: Path,
) -> None:
    """Layers that are added change nothing yet."""
    before = EagleStudent(EagleTrainOptions(draft_vocab_size=40), target, documents, 3, seed=3)
    before.save(tmp_path)
    made = student("peagle", target, tokenizer, documents, init=str(tmp_path), num_layers=3)
    assert isinstance(made, PEagleStudent)
    assert made.head.config.num_layers == 3
    width, hidden = before.head.fc.in_features, before.head.config.hidden_size
    embeds, features = torch.randn(1, 5, hidden), torch.randn(1, 5, width)

    def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1).transpose(1, 2)

    outputs = [
        head.logits(head(embeds, head.encode(features), torch.arange(5)[None], attend))
        for head in (before.head, made.head)
    ]
    assert torch.equal(*outputs)
    with pytest.raises(ConfigError, match="omit --draft-vocab-size"):
        student("peagle", target, tokenizer, documents, init=str(tmp_path), draft_vocab_size=9)


def test_a_draft_model_keeps_the_mask_that_it_has(
    target: FrozenTarget,
    tokenizer: PreTrainedTokenizerBase,
    documents: list[TrainingDocument],
    tmp_path: Path,
) -> None:
    made = student("pard", target, tokenizer, documents, mask_token="3")
    made.save(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["pard_token"] == 3
    again = student("pard", target, tokenizer, documents, init=str(tmp_path))
    assert isinstance(again, PardStudent)
    assert again.mask == 3
    with pytest.raises(ConfigError, match=r"--mask-token <nothing> is not among the target's"):
        student("pard", target, tokenizer, documents, mask_token="<nothing>")
    with pytest.raises(ConfigError, match=r"--depth-share must be in \(0, 1\]"):
        student("pard", target, tokenizer, documents, depth_share=0.0)
