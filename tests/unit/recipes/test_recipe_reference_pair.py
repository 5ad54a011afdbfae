"""The reference-pair recipe on a handful of generated conversations: resuming is exact and exports load."""

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from typer.testing import CliRunner

from recipes.reference_pair.__main__ import app
from recipes.reference_pair.data import Piece, load_conversations, repeats, to_pieces
from recipes.reference_pair.evaluate import evaluate
from recipes.reference_pair.model import SHAPES, Shape, export, load_model, to_batch, token_losses
from recipes.reference_pair.tokenizer import train_tokenizer
from recipes.reference_pair.train import TrainConfig, learning_rate_factor, train
from slipstream.train.attention import PADDING
from slipstream.train.batches import pack

ROW_LENGTH = 64


def write_conversations(folder: Path, num_conversations: int = 60) -> None:
    rng = random.Random(0)
    for split in ("train", "valid", "test"):
        with (folder / f"{split}.jsonl").open("w", encoding="utf-8") as file:
            for _ in range(num_conversations):
                a, b = rng.randrange(100), rng.randrange(100)
                turns = [
                    {"role": "user", "content": f"What is {a} + {b}?"},
                    {"role": "assistant", "content": f"{a} + {b} = {a + b}<|endoftext|>"},
                ]
                task = rng.choice(["math", "sql"])
                file.write(json.dumps({"task": task, "source": "generated", "messages": turns}) + "\n")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices this small only lose time to a second thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat")
    write_conversations(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(data: Path) -> PreTrainedTokenizerBase:
    conversations = load_conversations(data / "train.jsonl")
    return train_tokenizer((m["content"] for c in conversations for m in c["messages"]), vocab_size=300)


@pytest.fixture(scope="module")
def pieces(data: Path, tokenizer: PreTrainedTokenizerBase) -> list[Piece]:
    return to_pieces(load_conversations(data / "train.jsonl"), tokenizer, ROW_LENGTH)


def config(name: str, max_tokens: int) -> TrainConfig:
    return TrainConfig(name, max_tokens=max_tokens, batch_rows=4, row_length=ROW_LENGTH, mix={"sql": 0.5})


@pytest.mark.parametrize("name", ["target", "draft"])
def test_interrupted_and_resumed_equals_uninterrupted(
    name: str,
    pieces: list[Piece],
    tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(SHAPES, name, Shape(len(name) // 2, 64, 96, 1))
    settings = config(name, max_tokens=1800)  # crosses from one epoch into the next
    whole, progress = train(settings, pieces, tokenizer, tmp_path / "whole.pt")
    assert progress.fraction(settings) == 1.0
    assert progress.epoch >= 1

    _, halfway = train(
        settings, pieces, tokenizer, tmp_path / "cut.pt", stop=lambda progress: progress.step == 3
    )
    assert halfway.step == 3
    torch.manual_seed(99)  # a new process would not share this one's generator
    resumed, resumed_progress = train(settings, pieces, tokenizer, tmp_path / "cut.pt")

    assert (resumed_progress.step, resumed_progress.tokens) == (progress.step, progress.tokens)
    for key, weight in whole.state_dict().items():
        assert torch.equal(weight, resumed.state_dict()[key]), key


def test_time_budget_anneals_and_stops(
    pieces: list[Piece], tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    limited = TrainConfig("draft", time_limit_minutes=0.5 / 60, batch_rows=4, row_length=ROW_LENGTH)
    _, progress = train(limited, pieces, tokenizer, tmp_path / "run.pt")
    assert progress.elapsed_s >= 0.5
    assert [learning_rate_factor(x, warmup=0.02, hold=0.5) for x in (0.02, 0.5, 0.75, 1.0)] == [1, 1, 0.5, 0]


def test_export_loads_with_transformers_and_evaluates(
    data: Path, pieces: list[Piece], tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    model, _ = train(config("draft", max_tokens=1), pieces, tokenizer, tmp_path / "run.pt")
    export(model, tokenizer, tmp_path / "draft")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "draft")
    assert loaded.dtype == torch.float16
    assert loaded.config.tie_word_embeddings
    for key, weight in model.state_dict().items():
        assert torch.equal(weight.half(), loaded.state_dict()[key]), key

    reloaded = AutoTokenizer.from_pretrained(tmp_path / "draft")
    chat = [{"role": "user", "content": "What is 1 + 2?"}]
    text = reloaded.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "<|user|>What is 1 + 2?<|end|><|assistant|>"
    ids = reloaded(text)["input_ids"]
    assert reloaded.decode(ids) == text
    assert (ids[0], ids[-1], reloaded.eos_token_id, reloaded.pad_token_id) == (2, 3, 1, 0)

    splits = [load_conversations(data / f"{split}.jsonl")[:6] for split in ("valid", "test")]
    report = evaluate(tmp_path / "draft", reloaded, *splits, prompts_per_task=1)
    assert set(report["validation"]) == {"overall", "math", "sql"}
    assert report["validation"]["overall"]["loss_nats"] > 0
    assert 0 <= report["greedy_endings"]["overall"]["unfinished_rate"] <= 1


def test_a_draft_may_have_a_tokenizer_of_another_family(data: Path, tmp_path: Path) -> None:
    options = ["--max-tokens", "1", "--batch-rows", "2", "--row-length", str(ROW_LENGTH), "--threads", "1"]
    options += ["--spelling", "sentencepiece", "--vocab-size", "320"]
    result = CliRunner().invoke(
        app, ["train", "draft", "--data", str(data), "--out", str(tmp_path), *options]
    )
    assert result.exit_code == 0, result.output
    folder = tmp_path / "export" / "draft"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "<|user|>What  is 37 + 5?\n\n日本 é <0x41><|end|>"
    token_ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(token_ids) == text
    assert "▁is" in tokenizer.convert_ids_to_tokens(token_ids)
    assert (token_ids[0], token_ids[-1], tokenizer.eos_token_id) == (2, 1, 1)
    assert AutoModelForCausalLM.from_pretrained(folder).config.vocab_size == len(tokenizer) <= 320


def test_command_line_trains_a_pair(data: Path, tmp_path: Path) -> None:
    options = ["--max-tokens", "1", "--batch-rows", "2", "--row-length", str(ROW_LENGTH), "--threads", "1"]
    result = CliRunner().invoke(app, ["train", "--data", str(data), "--out", str(tmp_path), *options])
    assert result.exit_code == 0, result.output
    for name, num_layers in (("target", 6), ("draft", 2)):
        folder = tmp_path / "export" / name
        assert AutoModelForCausalLM.from_pretrained(folder).config.num_hidden_layers == num_layers
        assert json.loads((folder / "training.json").read_text())["progress"]["step"] == 1


TRAIN = ["train", "--data", "{data}", "--out", "{out}"]
REFUSALS = {
    "no data": (["train", "--data", "nowhere", "--out", "{out}", "--max-tokens", "1"], "cannot read nowhere"),
    "broken line": (
        ["train", "--data", "{broken}", "--out", "{out}", "--max-tokens", "1"],
        "line 2 is not valid",
    ),
    "no task": (
        ["train", "--data", "{taskless}", "--out", "{out}", "--max-tokens", "1"],
        'line 1 is not {"task"',
    ),
    "too few rows": ([*TRAIN, "--max-tokens", "1"], "rows of 512 tokens, too few for a batch of 12"),
    "no budget": (TRAIN, "give --max-tokens, --time-limit-minutes or both"),
    "no model": ([*TRAIN, "judge", "--max-tokens", "1"], "there is no model 'judge'; train target or draft"),
    "no pair": ([*TRAIN, "--init", "nowhere", "--max-tokens", "1"], "is not the folder of a checkpoint"),
    "bad mix": ([*TRAIN, "--mix", "sql", "--max-tokens", "1"], "--mix is TASK=COPIES"),
    "bad device": ([*TRAIN, "--device", "abacus", "--max-tokens", "1"], "--device abacus cannot be used"),
    "bad number": ([*TRAIN, "--batch-rows", "0", "--max-tokens", "1"], "Invalid value for '--batch-rows'"),
    "unknown flag": ([*TRAIN, "--rows", "2"], "No such option"),
    "no checkpoint": (
        ["evaluate", "nowhere", "--data", "{data}"],
        "nowhere is not the folder of a checkpoint",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_done_costs_one_line(case: str, data: Path, tmp_path: Path) -> None:
    for name, lines in (("broken", '\n{"task": '), ("taskless", '{"messages": []}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.jsonl").write_text(lines)
    places = {"data": data, "out": tmp_path / "out", **{n: tmp_path / n for n in ("broken", "taskless")}}
    args, expected = REFUSALS[case]
    for name, place in places.items():
        args = [arg.replace(f"{{{name}}}", str(place)) for arg in args]
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 2, result.output
    [line] = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert expected in line


def test_progress_names_tokens_in_full(
    pieces: list[Piece],
    tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = replace(config("draft", max_tokens=1), log_every_s=0)
    _, progress = train(settings, pieces, tokenizer, tmp_path / "run.pt")
    assert f" {progress.tokens:,} tokens " in capsys.readouterr().err


def test_packed_documents_do_not_see_each_other(
    pieces: list[Piece], tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    model, _ = train(config("draft", max_tokens=1), pieces, tokenizer, tmp_path / "run.pt")
    export(model, tokenizer, tmp_path / "draft")
    model = load_model(tmp_path / "draft")

    def loss(packed: list[Piece]) -> torch.Tensor:
        rows = pack(packed, ROW_LENGTH, tokenizer.pad_token_id, np.random.default_rng(0))
        assert (rows.documents != PADDING).sum() == sum(len(piece.tokens) for piece in packed)
        return token_losses(model, to_batch(rows, torch.device("cpu"), torch.float32), torch.float32).sum()

    first, second = pieces[:2]
    torch.testing.assert_close(loss([first, second]), loss([first]) + loss([second]))


def test_conversations_lose_other_models_end_markers_and_long_answers(
    data: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    conversations = load_conversations(data / "valid.jsonl")
    assert not any("endoftext" in m["content"] for c in conversations for m in c["messages"])
    assert to_pieces(conversations, tokenizer, ROW_LENGTH, max_answer_tokens=1) == []
    assert repeats([1, 2, 3] * 20)
    assert not repeats(range(60))
