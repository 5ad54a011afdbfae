"""The benchmark of encoder-decoders' drafts runs whole at tiny sizes, and its recipe trains."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from benchmarks import encoder_decoders
from recipes.encoder_decoder_pair import records, tones
from recipes.encoder_decoder_pair.plans import Plan, Shape
from recipes.encoder_decoder_pair.train import TASKS, train

TINY = Shape(1, 1, 16, 24, 2)
OPTIONS = ["--prompts", "2", "--hidden-size", "32", "--decoder-layers", "3", "--intermediate-size", "64"]
OPTIONS += ["--max-tokens", "12", "--threads", "1"]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pairs of random weights: each draft is its target before that is enlarged."""
    folder = tmp_path_factory.mktemp("pairs")
    transformers.utils.logging.disable_progress_bar()
    for family, task_class in TASKS.items():
        torch.manual_seed(3)
        task: Any = task_class()
        model = task.model(TINY)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 2:
                    parameter.copy_(torch.randn(parameter.shape) * 2 / parameter.shape[-1] ** 0.5)
        for role in ("target", "draft"):
            task.save(model, folder / family / role)
    transformers.utils.logging.enable_progress_bar()
    return folder


def test_texts_are_the_same_and_drafts_are_accepted(pairs: Path, tmp_path: Path) -> None:
    result = tmp_path / "encoder_decoders.json"
    assert encoder_decoders.main(["--pairs", str(pairs), *OPTIONS, "--output", str(result)]) == 0
    found = json.loads(result.read_text())
    for family in ("t5", "whisper"):
        row = found["families"][family]
        assert row["num_identical"] == row["num_as_transformers"] == row["num_pairs"] == 2
        assert row["num_accepted"] > 0
        assert row["tau"] > 2, "the draft computes what the enlarged target computes"
        config = json.loads((pairs / family / "target-2-3-64/config.json").read_text())
        assert config["d_model"] == 32
        assert config["cost_expanded"]["from"] == "target"
    page = result.with_suffix(".md").read_text()
    assert "2 of 2 | 2 of 2" in page
    assert "differ" not in page


def test_other_texts_are_a_fault() -> None:
    good = {"num_pairs": 3, "num_identical": 3, "num_as_transformers": 3, "num_accepted": 9}
    result = {"families": {"t5": good, "whisper": {**good, "num_identical": 2, "num_accepted": 0}}}
    assert encoder_decoders.faults({"families": {"t5": good}}) == []
    assert encoder_decoders.faults(result) == [
        "whisper: 1 texts differ with the draft",
        "whisper: no draft token was accepted",
    ]


@pytest.mark.parametrize("family", TASKS)
def test_training_learns_and_repeats(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tones, "NUM_SOUNDS", 4)
    task: Any = TASKS[family]()
    before, after, again = (train(task, Plan(TINY, steps, batch_size=4), family) for steps in (1, 12, 12))
    batch = task.batch(random.Random(1), 4)
    assert float(after(**batch).loss.detach()) < float(before(**batch).loss.detach())
    assert all(torch.equal(*pair) for pair in zip(after.parameters(), again.parameters(), strict=True))


def test_what_is_held_out_is_never_trained_on() -> None:
    task = records.Records()
    held = task.held_out(20)
    assert held == task.held_out(20)
    assert all(records.is_held_out(record) for record, _ in held)
    seen = task.tokenizer.batch_decode(
        task.batch(random.Random(0), 60)["input_ids"], skip_special_tokens=True
    )
    assert not any(map(records.is_held_out, seen))


def test_a_sound_is_as_its_text_says() -> None:
    sound, text = tones.draw(random.Random(4))
    words = text.split()
    size = round(tones.TONE_S * tones.RATE)
    assert len(sound) == size * len(words) // 2
    for number in range(5):
        tone = sound[number * size : (number + 1) * size]
        loudness, note = words[2 * number : 2 * number + 2]
        power = abs(torch.fft.rfft(torch.from_numpy(tone), n=tones.RATE))
        assert abs(int(power.argmax()) - tones.LOWEST_HZ * 2 ** (tones.NOTES.index(note) / 12)) < 8
        assert abs(float(abs(tone).max()) - tones.LOUDNESS[loudness]) < 0.25
