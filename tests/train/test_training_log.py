"""What a training run says: what its numbers mean, whether the tokens are enough, and how fast it goes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from test_head_training import KINDS, trainer
from transformers import PreTrainedTokenizerBase
from typer.testing import CliRunner

from slipstream.cli.main import app
from slipstream.train.batches import Cursor, TargetScores, TrainingDocument, make_batch, row_batches
from slipstream.train.distillation import DraftStudent, make_draft
from slipstream.train.eagle_loss import Wanted, token_loss
from slipstream.train.options import DistillOptions
from slipstream.train.progress import format_rate, too_few_tokens
from slipstream.train.regenerate import Tally
from slipstream.train.target import FrozenTarget

ROOM = 100_000
"""Bytes of a checkpoint's names, settings and the archive's own."""


@pytest.mark.parametrize(
    ("num_tokens", "seconds", "said"),
    [
        (123_456, 100.0, "1,235 tokens/s"),
        (30, 100.0, "0.3 tokens/s"),
        (1, 90.0, "under 0.1 tokens/s"),
        (0, 9.0, ""),
    ],
)
def test_no_rate_is_said_to_be_nothing(num_tokens: int, seconds: float, said: str) -> None:
    assert format_rate(num_tokens, seconds) == said


def test_a_slow_run_says_no_zero_rate() -> None:
    tally = Tally(num_chosen=4, num_done=2, num_tokens=30, started_s=-1e9)
    assert " 0 tokens/s" not in str(tally)
    assert "e-" not in str(tally)


def test_too_few_tokens_are_warned_of_with_what_would_be_enough() -> None:
    warning = too_few_tokens(1_147, 2_213, 1_500, 6_121_728)
    assert warning.startswith(
        "warning: 777 answer tokens (of 1,147; --max-tokens ends the run before) are too few"
    )
    assert "6,121,728 answer tokens or more" in warning
    assert "too few" in too_few_tokens(1_000, 2_000, None, 1_001)
    assert too_few_tokens(1_000, 2_000, None, 1_000) == ""
    assert too_few_tokens(1_000, 2_000, 1_000, 501) != ""


def test_nats_are_zero_for_the_target_itself_and_agreement_is_a_share(
    target: FrozenTarget, documents: list[TrainingDocument]
) -> None:
    """A fresh EAGLE-3 head is somewhere above; a head whose distribution is the target's has none."""
    rows = next(row_batches(documents, 2, 48, 0, 0, Cursor()))
    batch = make_batch(rows, target, [0])
    logits = batch.target_logits_at(batch.loss_mask)
    every = torch.arange(logits.shape[1])
    wanted = Wanted.of(TargetScores.of(logits, every), every)
    loss, entropy, agreement = token_loss(logits, wanted)
    assert float(loss) - entropy == pytest.approx(0, abs=1e-5)
    assert agreement == 1
    loss, entropy, _ = token_loss(torch.zeros_like(logits), wanted)
    assert float(loss) == pytest.approx(math.log(logits.shape[1]), rel=1e-5)


@pytest.mark.parametrize("kind", ["eagle3", "eagle3-pruned", "medusa"])
def test_the_log_says_what_its_numbers_mean(
    kind: str, target: FrozenTarget, documents: list[TrainingDocument], tmp_path: Path
) -> None:
    said: list[str] = []
    run = trainer(kind, target, documents, tmp_path, max_tokens=200, log_every_s=0.0)
    run.say = said.append
    run.run()
    assert "nats_1 " in said[0]
    assert "agrees_1 " in said[0]
    last = json.loads((tmp_path / "log.jsonl").read_text().splitlines()[-1])
    assert last["nats_1"] > 0
    vocabulary = 40 if kind == "eagle3-pruned" else target.vocab_size
    assert f"ln {vocabulary:,} = {math.log(vocabulary):.1f} is chance" in run.student.about_loss()


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_holds_the_head_and_two_moments(
    kind: str, target: FrozenTarget, documents: list[TrainingDocument], tmp_path: Path
) -> None:
    run = trainer(kind, target, documents, tmp_path, max_tokens=200)
    run.run()
    learned = sum(weight.nbytes for weight in run.student.module.parameters() if weight.requires_grad)
    assert (tmp_path / "checkpoint.pt").stat().st_size < 3 * learned + ROOM
    assert not list(tmp_path.glob("*partial*"))


def test_a_drafts_checkpoint_holds_no_more(
    target: FrozenTarget,
    documents: list[TrainingDocument],
    tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
) -> None:
    options = DistillOptions(keep_layers="0,2")
    run = trainer("eagle", target, documents, tmp_path, max_tokens=200)
    run.student = DraftStudent(make_draft(options, target, 0), tokenizer, options, 0)
    run.run()
    learned = sum(weight.nbytes for weight in run.student.module.parameters())
    # Tied weights are in the module's state twice and share their memory.
    assert (tmp_path / "checkpoint.pt").stat().st_size < 3 * learned + ROOM
    assert "KL in nats a token" in run.student.about_loss()


def test_a_command_says_all_of_it(tiny: str, data: Path, tmp_path: Path) -> None:
    small: dict[str, Any] = {"max_tokens": 100, "batch_rows": 1, "row_length": 48, "eval_prompts_per_task": 1}
    small |= {"eval_max_tokens": 2, "draft_vocab_size": 40, "overlap": "report"}
    flags = [part for key, value in small.items() for part in (f"--{key.replace('_', '-')}", str(value))]
    command = ["train", "eagle3", tiny, "--data", str(data), "--output", str(tmp_path / "run"), *flags]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "answer tokens (of" in result.output
    assert "trainable weights: on other text" in " ".join(result.output.split())
    assert "in the log: loss is the weighted sum of" in result.output
    assert " 0 tokens/s" not in result.output


@pytest.mark.long
def test_a_gguf_file_is_answered_with_and_trained_for(smollm2: str, tmp_path: Path) -> None:
    """SmolLM2's file, quantised to 4 and 8 bits, through both commands and back into the engine."""
    prompts, answers, output = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl", tmp_path / "run"
    prompts.write_text('{"question": "Why is the sky blue?"}\n{"question": "Name three colours."}\n')
    command = ["train", "regenerate", smollm2, "--data", str(prompts), "--output", str(answers)]
    result = CliRunner().invoke(app, [*command, "--max-tokens", "8", "--spec", "off"])
    assert result.exit_code == 0, result.output
    assert len(answers.read_text().splitlines()) == 2
    small: dict[str, Any] = {"max_tokens": 60, "batch_rows": 1, "row_length": 48, "eval_prompts_per_task": 1}
    small |= {"eval_max_tokens": 2, "draft_vocab_size": 256, "intermediate_size": 64, "num_steps": 2}
    flags = [part for key, value in small.items() for part in (f"--{key.replace('_', '-')}", str(value))]
    command = ["train", "eagle3", smollm2, "--data", str(answers), "--output", str(output), *flags]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "are too few for" in result.output
    assert (output / "eagle3/model.safetensors").is_file()
    assert (output / "checkpoint.pt").stat().st_size < 3.3 * (
        output / "eagle3/model.safetensors"
    ).stat().st_size
