"""Training: what a batch holds, that resuming is exact, that losses mean what they say, what the engine measures."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerBase
from typer.testing import CliRunner

from slipstream.assets import EMBEDDED_DRAFT, EMBEDDED_TARGET
from slipstream.cli.main import app
from slipstream.config import SpeculativeConfig
from slipstream.errors import ConfigError, RequestError
from slipstream.models.files.gguf_tokenizer import read_tokenizer
from slipstream.text.prompts import encode_chat, encode_conversation
from slipstream.train.batches import (
    Cursor,
    TrainingDocument,
    document_positions,
    make_batch,
    next_tokens,
    pack,
    read_documents,
    row_batches,
)
from slipstream.train.distillation import DraftStudent, distillation_loss, make_draft
from slipstream.train.evaluation import EvaluationFigures, Evaluator, MeasuredAcceptance
from slipstream.train.options import DistillOptions, TrainOptions
from slipstream.train.target import FrozenTarget
from slipstream.train.trainer import Progress, Trainer, learning_rate_factor

CPU = torch.device("cpu")
LENGTH = 48


def test_a_templates_answers_are_found(
    data: Path, documents: list[TrainingDocument], tokenizer: PreTrainedTokenizerBase
) -> None:
    first = json.loads(data.read_text().splitlines()[0])["messages"]
    [document] = documents[:1]
    assert tokenizer.decode(document.tokens[document.is_answer]) == first[1]["content"] + "<|end|>"


def test_a_base_models_answers_are_lines_of_text(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
) -> None:
    """What is learned is what is asked: the tokens before an answer are those of the conversation up to it."""
    base = copy.deepcopy(tokenizer)
    base.chat_template = None
    said = ["Why?", "Because.", "And now?", "No more."]
    messages = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(said)]
    file = tmp_path / "data.jsonl"
    file.write_text(json.dumps({"messages": messages}))
    [document] = read_documents([file], base, LENGTH)
    answered = document.tokens[document.is_answer]
    assert base.decode(answered, skip_special_tokens=True) == "Because.\nNo more.\n"
    for number in (1, 3):
        asked = encode_conversation(base, messages[:number])
        assert document.tokens[: len(asked)].tolist() == asked
        assert document.is_answer[len(asked)] > document.is_answer[len(asked) - 1]
    assert encode_conversation(tokenizer, messages[:1], raw=True) == encode_conversation(base, messages[:1])
    assert encode_conversation(tokenizer, messages[:1]) == encode_chat(tokenizer, messages[:1])


def test_lines_of_sentencepiece_are_those_of_one_text() -> None:
    """They have no space in front of each, and not the end token that the file wants behind a text."""
    letters = sorted(set("Why?Because."))
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *letters]
    fields = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.scores": [0.0] * len(pieces),
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * (len(letters) + 1)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_eos_token": True,
    }
    tokenizer = read_tokenizer(fields, "model.gguf")
    messages = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}]
    whole = tokenizer("Why?\nBecause.\n").input_ids
    assert (whole[0], whole[-1]) == (1, 2)
    assert encode_conversation(tokenizer, messages) == whole[:-1]
    assert encode_conversation(tokenizer, messages[:1]) == tokenizer("Why?\n").input_ids[:-1]


def test_what_plain_text_cannot_hold_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    calls = [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]
    with pytest.raises(RequestError, match="tool calls, which plain text cannot hold"):
        encode_conversation(tokenizer, [{"role": "assistant", "content": "", "tool_calls": calls}], raw=True)
    with pytest.raises(RequestError, match="got half of a surrogate pair"):
        encode_conversation(tokenizer, [{"role": "user", "content": "W\ud800"}], raw=True)


def test_token_ids_are_taken_as_they_are(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(json.dumps({"token_ids": list(range(10, 20)), "answer_spans": [[2, 4], [7, 10]]}))
    first, second = read_documents([file], tokenizer, 6)
    assert first.tokens.tolist() == [10, 11, 12, 13, 14, 15]
    assert first.is_answer.tolist() == [False, False, True, True, False, False]
    assert second.is_answer.tolist() == [False, True, True, True]


BAD = {
    "no spans": ({"token_ids": [1, 2]}, "line 1: token_ids need answer_spans"),
    "no token": ({"token_ids": [1, 4096], "answer_spans": [[1, 2]]}, "outside the vocabulary of 4096"),
    "text": ({"token_ids": "ab", "answer_spans": [[1, 2]]}, "must be a list of whole numbers"),
    "nothing": ({"text": "a"}, "line 1 needs a list of messages"),
    "no answer": ({"messages": [{"role": "user", "content": "a"}]}, "no conversation has an answer"),
}


@pytest.mark.parametrize(("row", "message"), BAD.values(), ids=BAD)
def test_bad_data(
    row: dict[str, Any], message: str, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(json.dumps(row))
    with pytest.raises(RequestError, match=message):
        read_documents([file], tokenizer, LENGTH)


def test_packed_rows_are_the_documents_alone(target: FrozenTarget, documents: list[TrainingDocument]) -> None:
    rows = pack(documents, LENGTH, 0, np.random.default_rng(0))
    batch = make_batch(rows, target, [0, 2])
    assert sorted(batch.hidden_states) == [0, 2, 3]
    sources = torch.from_numpy(rows.sources)
    begins = np.cumsum([0, *(len(document.tokens) for document in documents)])
    for number in (0, 7, 31):
        where = (sources >= begins[number]) & (sources < begins[number + 1])
        document = documents[number]
        ids = torch.from_numpy(document.tokens)[None]
        alone = target.model(ids, output_hidden_states=True)
        assert batch.token_ids[where].tolist() == ids[0].tolist()
        assert batch.positions[where].tolist() == list(range(len(ids[0])))
        assert batch.labels[where].tolist() == [*ids[0, 1:].tolist(), -100]
        assert batch.loss_mask[where].tolist() == [*document.is_answer[1:].tolist(), False]
        for layer in (0, 2, 3):
            torch.testing.assert_close(
                batch.hidden_states[layer][where], alone.hidden_states[layer][0], rtol=1e-4, atol=1e-4
            )
        torch.testing.assert_close(batch.target_logits[where], alone.logits[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(batch.target_logits_at(where), batch.target_logits[where])


def test_positions_and_labels() -> None:
    documents = torch.tensor([[0, 0, 1, 1, 1, -1, -1], [0, 0, 0, 0, 0, 0, 0]])
    assert document_positions(documents).tolist() == [[0, 1, 0, 1, 2, 0, 1], [0, 1, 2, 3, 4, 5, 6]]
    tokens = torch.arange(14).view(2, 7)
    assert next_tokens(tokens, documents)[0].tolist() == [1, -100, 3, 4, -100, -100, -100]


def test_batches_go_on_where_the_cursor_stands(documents: list[TrainingDocument]) -> None:
    whole = row_batches(documents, 2, LENGTH, 0, 3, Cursor())
    expected = [next(whole) for _ in range(40)]
    cursor = Cursor()
    part = row_batches(documents, 2, LENGTH, 0, 3, cursor)
    for _ in range(15):
        next(part)
    assert cursor.epoch > 0
    resumed = row_batches(documents, 2, LENGTH, 0, 3, cursor)
    for rows in expected[15:]:
        assert np.array_equal(next(resumed).tokens, rows.tokens)
    with pytest.raises(ConfigError, match="too few for a batch of 1000"):
        next(row_batches(documents, 1000, LENGTH, 0, 3, Cursor()))


@pytest.mark.parametrize("loss", ["forward_kl", "reverse_kl", "total_variation"])
def test_a_divergence_is_zero_for_equals_and_what_it_is_called(loss: str) -> None:
    generator = torch.Generator().manual_seed(0)
    draft = torch.randn(16, 11, generator=generator, dtype=torch.float64, requires_grad=True)
    target = torch.randn(16, 11, generator=generator, dtype=torch.float64)
    labels = torch.randint(11, (16,), generator=generator)
    same, logged = distillation_loss(target, target, labels, {loss: 1.0})
    assert abs(float(same)) < 1e-12
    assert logged["agreement"] == 1
    p, q = target.softmax(-1), draft.softmax(-1)
    expected = {
        "forward_kl": torch.distributions.kl_divergence,
        "reverse_kl": lambda p, q: torch.distributions.kl_divergence(q, p),
        "total_variation": lambda p, q: 1 - torch.minimum(p.probs, q.probs).sum(-1),
    }[loss](torch.distributions.Categorical(p), torch.distributions.Categorical(q)).mean()
    value, _ = distillation_loss(draft, target, labels, {loss: 2.0})
    torch.testing.assert_close(value, 2 * expected)
    value.backward()
    assert draft.grad is not None
    assert draft.grad.abs().sum() > 0


def test_hard_labels_are_the_texts() -> None:
    logits = torch.randn(5, 7)
    labels = torch.arange(5)
    value, _ = distillation_loss(logits, torch.zeros(5, 7), labels, {"hard": 1.0})
    torch.testing.assert_close(value, torch.nn.functional.cross_entropy(logits, labels))


def trainer(
    tokenizer: PreTrainedTokenizerBase,
    target: FrozenTarget,
    documents: list[TrainingDocument],
    output: Path,
    draft: DistillOptions | None = None,
    **options: Any,
) -> Trainer:
    draft = draft or DistillOptions(shape="1x16")
    asked = TrainOptions(**{"max_tokens": 4000, "batch_rows": 4, "row_length": LENGTH, **options})
    student = DraftStudent(make_draft(draft, target, 0), tokenizer, draft, asked.seed)
    return Trainer(student, target, documents, 0, asked, output, {"method": "draft"})


DRAFTS = {
    "text of the target": DistillOptions(shape="1x16"),
    "text of its own": DistillOptions(
        keep_layers="0,2", loss="reverse_kl=1,total_variation=1", on_policy=0.5, on_policy_tokens=8
    ),
}


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("draft", DRAFTS.values(), ids=DRAFTS)
def test_a_resumed_run_ends_bit_identical(
    draft: DistillOptions,
    optimizer: str,
    target: FrozenTarget,
    documents: list[TrainingDocument],
    tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
) -> None:
    def make(output: str) -> Trainer:
        options = {"optimizer": optimizer, "max_tokens": 1800, "accumulation": 2}
        return trainer(tokenizer, target, documents, tmp_path / output, draft, **options)

    whole = make("whole")
    end = whole.run()
    assert end.step >= 4
    first = make("parts")
    first.stop = lambda progress: progress.step == 2
    assert first.run().step == 2
    second = make("parts")
    resumed = second.run()
    assert (resumed.step, resumed.tokens) == (end.step, end.tokens)
    for name, weight in whole.student.module.state_dict().items():
        assert torch.equal(weight, second.student.module.state_dict()[name]), name
    steps = [json.loads(line)["step"] for line in (tmp_path / "parts/log.jsonl").read_text().splitlines()]
    assert steps == sorted(steps)


def test_training_brings_the_draft_nearer_and_leaves_provenance(
    target: FrozenTarget,
    documents: list[TrainingDocument],
    tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
) -> None:
    run = trainer(tokenizer, target, documents, tmp_path, max_tokens=30_000, log_every_s=0.0)
    run.run()
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in log]
    assert np.mean(losses[-3:]) < 0.7 * losses[0]
    assert (tmp_path / "training.png").is_file()
    assert (tmp_path / "training.svg").is_file()
    provenance = json.loads((tmp_path / "draft/training.json").read_text())
    assert provenance["made_with"]["options"]["max_tokens"] == 30_000
    assert provenance["progress"]["step"] == log[-1]["step"]
    assert (tmp_path / "draft/tokenizer.json").is_file()


def test_a_target_pruned_of_nothing_is_the_target(target: FrozenTarget) -> None:
    ids = torch.arange(20)[None]
    whole = make_draft(DistillOptions(keep_layers="0,1,2"), target, 0)
    assert torch.equal(whole(ids).logits, target.model(ids).logits)
    pruned = make_draft(DistillOptions(keep_layers="0,2"), target, 0)
    assert pruned.config.num_hidden_layers == 2
    layers, kept = target.model.model.layers, pruned.model.layers
    assert torch.equal(kept[1].mlp.up_proj.weight, layers[2].mlp.up_proj.weight)


def test_another_run_needs_another_output(
    target: FrozenTarget,
    documents: list[TrainingDocument],
    tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
) -> None:
    trainer(tokenizer, target, documents, tmp_path, max_tokens=300).run()
    trainer(tokenizer, target, documents, tmp_path, max_tokens=600).run()  # more of the same is welcome
    with pytest.raises(ConfigError, match=r"another learning_rate: 0\.001, not 0\.5"):
        trainer(tokenizer, target, documents, tmp_path, learning_rate=0.5).run()
    (tmp_path / "checkpoint.pt").write_bytes(b"half of it")
    with pytest.raises(ConfigError, match="cannot read the checkpoint"):
        trainer(tokenizer, target, documents, tmp_path, max_tokens=900).run()


def test_a_loss_that_is_not_finite_ends_the_run(
    target: FrozenTarget,
    documents: list[TrainingDocument],
    tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
) -> None:
    run = trainer(tokenizer, target, documents, tmp_path)
    with torch.no_grad():
        next(run.student.module.parameters()).fill_(math.nan)
    with pytest.raises(ConfigError, match="the loss is nan at step 1; lower --learning-rate"):
        run.run()


def test_early_stop_keeps_the_best(
    target: FrozenTarget,
    documents: list[TrainingDocument],
    tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
) -> None:
    taus = iter([1.0, 1.5, 2.0, 1.9, 1.8, 1.7, 1.6])

    def figures(speculative: SpeculativeConfig, model: str | None) -> EvaluationFigures:
        assert (Path(speculative.options["model"]) / "config.json").is_file()
        one = MeasuredAcceptance(next(taus), 0.5, [0.5], {})
        return EvaluationFigures(one, one)

    run = trainer(tokenizer, target, documents, tmp_path, evaluate_every_steps=2, patience=2)
    run.evaluate = figures
    progress = run.run()
    assert (progress.best_step, progress.best_tau, progress.step) == (4, 2.0, 8)
    assert json.loads((tmp_path / "draft.best/training.json").read_text())["progress"]["step"] == 4


def test_the_schedule() -> None:
    assert learning_rate_factor(0.0, 0.1, 0.5) == pytest.approx(0.05)
    assert learning_rate_factor(0.3, 0.1, 0.5) == 1.0
    assert learning_rate_factor(0.75, 0.1, 0.5) == pytest.approx(0.5)
    assert learning_rate_factor(1.0, 0.1, 0.5) == 0.0
    assert learning_rate_factor(0.0, 0.0, 0.0) == 1.0
    half = TrainOptions(max_tokens=100, time_limit_minutes=1)
    assert Progress(tokens=50, elapsed_s=6).fraction(half) == 0.5
    assert Progress(tokens=10, elapsed_s=45).fraction(half) == 0.75


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({}, "a run needs a budget"),
        ({"max_tokens": 0}, "max_tokens must be above 0"),
        ({"max_tokens": 1, "optimizer": "adam"}, "did you mean 'adamw'"),
        ({"max_tokens": 1, "hold_fraction": 1.0}, r"must be in \[0, 1\)"),
        ({"max_tokens": 1, "row_length": 1}, "row_length must be at least 2"),
    ],
)
def test_bad_options(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainOptions(**wrong)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({}, "needs exactly one of --init, --shape, --keep-layers; got none"),
        ({"init": "a", "shape": "1x16"}, "got --init and --shape"),
        ({"shape": "1x16", "loss": "kl"}, "unknown loss 'kl'"),
        ({"shape": "1x16", "on_policy": 2.0}, "is a fraction"),
        ({"shape": "1x16", "loss": "hard", "on_policy": 0.5}, "cannot be used with --on-policy"),
        ({"shape": "1by16"}, "LAYERSxWIDTH"),
        ({"shape": "1x15"}, "a multiple of 8"),
        ({"keep_layers": "0,9"}, "ascending layer numbers from 0 to 2"),
        ({"keep_layers": "first"}, "separated by commas"),
    ],
)
def test_bad_drafts(wrong: dict[str, Any], message: str, target: FrozenTarget) -> None:
    with pytest.raises(ConfigError, match=message):
        make_draft(DistillOptions(**wrong), target, 0)


@pytest.fixture(scope="module")
def evaluator() -> Evaluator:
    return Evaluator(None, prompts_per_task=1, max_tokens=16)


def test_the_engine_measures(evaluator: Evaluator) -> None:
    draft = SpeculativeConfig("draft_model", options={"model": EMBEDDED_DRAFT})
    itself = SpeculativeConfig("draft_model", options={"model": EMBEDDED_TARGET, "num_speculative_tokens": 3})
    figures, perfect = evaluator.evaluate(draft), evaluator.evaluate(itself)
    assert evaluator.evaluate(draft) == figures, "the same prompts and seeds every time"
    assert 1 < figures.sampled.tau < figures.greedy.tau < 5
    assert len(figures.greedy.tau_by_task) == 7
    assert all(0 <= rate <= 1 for rate in figures.sampled.conditional)
    assert perfect.greedy.conditional == [1, 1, 1]
    assert "τ" in str(figures)


def test_the_command(data: Path, tmp_path: Path) -> None:
    command = ["train", "draft", "--data", str(data), "--output", str(tmp_path / "out"), "--shape", "1x64"]
    small = [
        "--evaluate-every-steps",
        "1",
        "--max-tokens",
        "100",
        "--batch-rows",
        "2",
        "--row-length",
        "48",
        "--cache-features",
    ]
    result = CliRunner().invoke(
        app, [*command, *small, "--eval-prompts-per-task", "1", "--eval-max-tokens", "8"]
    )
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in (tmp_path / "out/log.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in rows if row["event"] == "evaluation"]
    assert steps == list(range(rows[-1]["step"] + 1))  # the end once, though it is due twice
    refused = CliRunner().invoke(app, command)
    assert refused.exit_code == 2
    assert "a run needs a budget" in refused.output


def test_replacing_options_keeps_them_checked() -> None:
    with pytest.raises(ConfigError, match="dtype"):
        replace(TrainOptions(max_tokens=1), dtype="float8")
