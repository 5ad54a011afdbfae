"""EAGLE, Medusa and Hydra heads learn, resume exactly, and are what the engine loads and drafts with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerBase
from typer.testing import CliRunner

from slipstream.cli.main import app
from slipstream.draft.heads.hydra import HydraHeads
from slipstream.draft.heads.medusa import MedusaConfig, MedusaHeads, save_medusa
from slipstream.errors import ConfigError, ModelError
from slipstream.models import load_model
from slipstream.train.batches import Cursor, TrainingDocument, make_batch, row_batches
from slipstream.train.eagle import EagleStudent, most_used
from slipstream.train.evaluation import Evaluator
from slipstream.train.heads import HeadStudent, JointStudent
from slipstream.train.options import EagleTrainOptions, HeadTrainOptions, TrainOptions
from slipstream.train.target import FrozenTarget
from slipstream.train.trainer import Student, Trainer

LENGTH = 48
KINDS = ("eagle3", "eagle3-pruned", "eagle", "medusa", "medusa-shared", "hydra", "hydra-shared")


def student(kind: str, target: FrozenTarget, documents: list[TrainingDocument]) -> Student:
    method, _, variant = kind.partition("-")
    if method.startswith("eagle"):
        pruned = {"draft_vocab_size": 40, "layout": "speculators"} if variant else {}
        options = EagleTrainOptions(num_steps=3, **pruned)
        return EagleStudent(options, target, documents, 3 if method == "eagle3" else 1, seed=0)
    return HeadStudent(HeadTrainOptions(num_heads=3, shares_lm_head=bool(variant)), target, method, seed=0)


def trainer(
    kind: str, target: FrozenTarget, documents: list[TrainingDocument], output: Path, **options: Any
) -> Trainer:
    asked = TrainOptions(**{"max_tokens": 4000, "batch_rows": 4, "row_length": LENGTH, **options})
    return Trainer(student(kind, target, documents), target, documents, 0, asked, output, {"method": kind})


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_learns(
    kind: str, target: FrozenTarget, documents: list[TrainingDocument], tmp_path: Path
) -> None:
    trainer(kind, target, documents, tmp_path, max_tokens=12_000, learning_rate=5e-3, log_every_s=0.0).run()
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows]
    assert np.mean(losses[-3:]) < 0.97 * losses[0]
    assert "agrees_1" in rows[-1]


@pytest.mark.parametrize("kind", ["eagle3", "hydra"])
def test_a_resumed_run_ends_bit_identical(
    kind: str, target: FrozenTarget, documents: list[TrainingDocument], tmp_path: Path
) -> None:
    whole = trainer(kind, target, documents, tmp_path / "whole", max_tokens=1500)
    whole.run()
    first = trainer(kind, target, documents, tmp_path / "parts", max_tokens=1500)
    first.stop = lambda progress: progress.step == 2
    first.run()
    second = trainer(kind, target, documents, tmp_path / "parts", max_tokens=1500)
    second.run()
    for name, weight in whole.student.module.state_dict().items():
        assert torch.equal(weight, second.student.module.state_dict()[name]), name


@pytest.mark.parametrize("kind", KINDS)
def test_the_engine_loads_and_drafts_with_what_was_saved(
    kind: str, tiny: str, target: FrozenTarget, documents: list[TrainingDocument], tmp_path: Path
) -> None:
    made = student(kind, target, documents)
    made.save(tmp_path)
    evaluator = Evaluator(tiny, prompts_per_task=1, max_tokens=8)
    figures = evaluator.evaluate(made.speculative_config(tmp_path))
    assert figures.greedy.tau >= 1
    assert len(figures.greedy.conditional) >= 1


def again(
    kind: str, path: Path, target: FrozenTarget, documents: list[TrainingDocument], **options: Any
) -> Student:
    """A student of the same kind that goes on from the head in `path`."""
    method = kind.partition("-")[0]
    if method.startswith("eagle"):
        wanted = EagleTrainOptions(init=str(path), **options)
        return EagleStudent(wanted, target, documents, 3 if method == "eagle3" else 1, seed=1)
    return HeadStudent(HeadTrainOptions(init=str(path), **options), target, method, seed=1)


@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on_from_a_head(
    kind: str, target: FrozenTarget, documents: list[TrainingDocument], tmp_path: Path
) -> None:
    first = trainer(kind, target, documents, tmp_path / "run", max_tokens=1500)
    first.run()
    first.student.save(tmp_path / "head")
    second = again(kind, tmp_path / "head", target, documents)
    for name, weight in first.student.module.state_dict().items():
        assert torch.equal(weight, second.module.state_dict()[name]), name
    assert second.speculative_config(tmp_path).options["num_speculative_tokens"] >= 3
    options = TrainOptions(max_tokens=1000, batch_rows=4, row_length=LENGTH)
    Trainer(second, target, documents, 0, options, tmp_path / "more", {}).run()
    changed = [
        name
        for name, weight in first.student.module.named_parameters()
        if not torch.equal(weight, second.module.get_parameter(name))
    ]
    assert len(changed) == len(list(second.module.parameters()))  # all of it learns


def test_a_head_to_go_on_from_must_be_of_its_kind(
    target: FrozenTarget, documents: list[TrainingDocument], tmp_path: Path
) -> None:
    student("eagle", target, documents).save(tmp_path / "eagle")
    with pytest.raises(ConfigError, match="EAGLE-1 head, not an EAGLE-3 one"):
        again("eagle3", tmp_path / "eagle", target, documents)
    with pytest.raises(ConfigError, match="omit --draft-vocab-size"):
        again("eagle3", tmp_path / "eagle", target, documents, draft_vocab_size=10)
    heads = MedusaHeads(
        MedusaConfig(hidden_size=target.hidden_size + 2, vocab_size=target.vocab_size, num_heads=2)
    )
    save_medusa(heads, tmp_path / "wide")
    with pytest.raises(ModelError, match="use heads that were trained for it"):
        again("medusa", tmp_path / "wide", target, documents)
    student("medusa-shared", target, documents).save(tmp_path / "shared")
    with pytest.raises(ConfigError, match="which --joint trains"):
        again("medusa", tmp_path / "shared", target, documents, joint=True)


def test_medusa_2_trains_a_target_of_its_own(
    tiny: str,
    target: FrozenTarget,
    documents: list[TrainingDocument],
    tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
) -> None:
    before = {name: weight.clone() for name, weight in target.model.state_dict().items()}
    made = JointStudent(HeadTrainOptions(num_heads=2, joint=True), target, tokenizer, seed=0)
    options = TrainOptions(max_tokens=3000, batch_rows=4, row_length=LENGTH, log_every_s=0.0)
    evaluator = Evaluator(tiny, prompts_per_task=1, max_tokens=4)
    Trainer(made, target, documents, 0, options, tmp_path, {}, evaluator.evaluate).run()
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    drifts = [row["target_drift"] for row in rows if row["event"] == "train"]
    assert drifts[0] == pytest.approx(0, abs=1e-4)  # the copy begins as the target
    assert rows[-1]["event"] == "evaluation"
    assert all(torch.equal(weight, before[name]) for name, weight in target.model.state_dict().items())
    saved = load_model(str(tmp_path / "medusa/target"), pack=False, cpu_kernels="torch").model.state_dict()
    assert any(not torch.equal(saved[name].float(), before[name]) for name in before)


@pytest.mark.parametrize("kind", ["medusa", "hydra-shared"])
def test_heads_are_trained_on_what_they_are_asked(
    kind: str, target: FrozenTarget, documents: list[TrainingDocument]
) -> None:
    """The loss's draft logits are teacher forcing's over whole rows, at the rows that count."""
    made = student(kind, target, documents)
    assert isinstance(made, HeadStudent)
    with torch.no_grad():
        for weight in made.module.parameters():
            weight.add_(0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
    rows = next(row_batches(documents, 2, LENGTH, 0, 0, Cursor()))
    batch = make_batch(rows, target, made.feature_layers)
    hidden, embeds = batch.hidden_states[target.num_layers], target.embed(batch.token_ids)
    heads = made.heads
    assert isinstance(heads, MedusaHeads | HydraHeads)
    forced = heads(hidden) if isinstance(heads, MedusaHeads) else heads(hidden, embeds)
    total = 0.0
    for head in range(3):
        losses = []
        for row in range(2):
            for t in range(LENGTH - 2 - head):
                before = t + 1 + head
                same = batch.documents[row, t] == batch.documents[row, before]
                if same and batch.loss_mask[row, t : before + 1].all():
                    wanted = batch.target_logits[row, before].softmax(-1)
                    losses.append(float(-(wanted * forced[head, row, t].detach().log_softmax(-1)).sum()))
        total += 0.8**head * float(np.mean(losses))
    assert float(made.loss(batch)[0].detach()) == pytest.approx(total, rel=1e-4)


def test_the_draft_vocabulary_is_what_answers_use_most() -> None:
    tokens = np.array([5, 5, 7, 9, 9, 9, 3])
    said = np.array([True, True, True, True, True, True, False])
    assert most_used([TrainingDocument("a", tokens, said)], 12, 2).tolist() == [5, 9]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"feature_layers": "0,1"}, "three numbers"),
        ({"feature_layers": "0,1,9"}, "from 0 to 2"),
        ({"draft_vocab_size": 10**6}, "more than the target's"),
        ({"layout": "eagle4"}, "unknown layout"),
        ({"step_decay": 0.0}, "step-decay"),
    ],
)
def test_a_head_that_cannot_be_is_refused(
    options: dict[str, Any], message: str, target: FrozenTarget, documents: list[TrainingDocument]
) -> None:
    with pytest.raises(ConfigError, match=message):
        EagleStudent(EagleTrainOptions(**options), target, documents, 3, 0)


@pytest.mark.parametrize("method", ["eagle3", "eagle", "medusa", "hydra"])
def test_the_commands(method: str, tiny: str, data: Path, tmp_path: Path) -> None:
    small = "--max-tokens 200 --batch-rows 2 --row-length 48 --eval-prompts-per-task 1 --eval-max-tokens 4"
    command = ["train", method, tiny, "--data", str(data), "--output", str(tmp_path / "out"), *small.split()]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "out" / method / "config.json").is_file()
