"""The command that a hand-off would start: heads in vLLM's layout, and the nearest setting where it is asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from handoff_cases import fake_command, free_port
from typer.testing import CliRunner

from slipstream.assets import EMBEDDED_EAGLE3, EMBEDDED_TARGET
from slipstream.cli import handoff as verb
from slipstream.cli.main import app
from slipstream.draft.heads.checkpoints import read_checkpoint, write_checkpoint
from slipstream.draft.heads.eagle_files import save_eagle
from slipstream.draft.heads.eagle_head import EagleConfig, EagleHead


@pytest.fixture(scope="module")
def eagle1(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head of random weights as `slipstream train eagle` writes it."""
    torch.manual_seed(0)
    config = EagleConfig(
        version=1,
        hidden_size=320,
        target_hidden_size=320,
        vocab_size=4096,
        draft_vocab_size=4096,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=80,
        feature_layers=(),
    )
    head = EagleHead(config).half().requires_grad_(False)
    for weight in head.parameters():
        weight.normal_()
    folder = tmp_path_factory.mktemp("eagle1")
    save_eagle(head, folder, target=EMBEDDED_TARGET, layout="eagle")
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["LlamaForCausalLMEagle"]
    return folder


class Started:
    """What would have been started, and the head's folder as it was then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, vllm: str) -> None:
        self._vllm = vllm
        monkeypatch.setattr(verb, "start_and_watch", self._run)

    def _run(self, plan: Any, setting: Any, *_: Any) -> None:
        self.command, self.off_command, self.notes = list(plan.command), plan.off_command, setting.notes
        self.config = json.loads(self.command[self.command.index("--speculative-config") + 1])
        self.folder = Path(self.config["model"])
        self.head = json.loads((self.folder / "config.json").read_text())
        self.tensors = read_checkpoint(str(self.folder))[1]

    def handoff(self, *words: str) -> tuple[int, str]:
        ports = ["--port", str(free_port()), "--watch-port", "0"]
        done = CliRunner().invoke(app, ["handoff", "vllm", *words, "--vllm", self._vllm, *ports])
        return done.exit_code, done.stderr


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Started:
    return Started(monkeypatch, fake_command(tmp_path))


def test_an_eagle_1_head_is_converted_for_as_long_as_vllm_runs(started: Started, eagle1: Path) -> None:
    code, text = started.handoff("--spec", f"eagle:{eagle1}", "--nearest", "--off-side", "canary")
    assert code == 0, text
    assert started.head["architectures"] == ["EagleLlamaForCausalLM"]
    assert started.config["method"] == "eagle"
    assert started.folder != eagle1
    theirs = read_checkpoint(str(eagle1))[1]
    assert all(torch.equal(started.tensors[name], theirs[name]) for name in started.tensors)
    assert started.off_command is not None
    assert "--speculative-config" not in started.off_command
    assert not started.folder.exists(), "the temporary folder is removed at the end"


def test_a_named_folder_stays_and_is_not_written_over(started: Started, eagle1: Path, tmp_path: Path) -> None:
    words = ("--spec", f"eagle:{eagle1}", "--nearest", "--checkpoint", str(tmp_path / "head"))
    assert started.handoff(*words)[0] == 0
    assert started.folder == tmp_path / "head"
    assert (tmp_path / "head" / "model.safetensors").is_file()
    code, text = started.handoff(*words)
    assert code == 2
    assert "there are files already; choose another --checkpoint, or add --overwrite" in text
    assert started.handoff(*words, "--overwrite")[0] == 0


def test_the_nearest_setting_where_it_is_asked_for(started: Started) -> None:
    """The embedded EAGLE-3 head drafts a tree, and vLLM checks chains."""
    code, text = started.handoff("--spec", "eagle3")
    assert code == 2
    assert "a chain of 5 tokens (--nearest takes that)" in text
    code, text = started.handoff("--spec", "eagle3", "--nearest")
    assert code == 0, text
    assert (started.config["method"], started.config["num_speculative_tokens"]) == ("eagle3", 5)
    assert started.head["architectures"] == ["LlamaForCausalLMEagle3"]
    assert started.head["eagle_aux_hidden_state_layer_ids"]
    assert str(started.folder) != EMBEDDED_EAGLE3
    assert any("vLLM checks chains, not trees" in note for note in started.notes)


def test_a_head_that_we_cannot_read_is_handed_over_as_it_is(
    started: Started, eagle1: Path, tmp_path: Path
) -> None:
    config, tensors = read_checkpoint(str(eagle1))
    second = {name.replace("layers.0", "layers.1"): tensor.clone() for name, tensor in tensors.items()}
    write_checkpoint(tmp_path / "two", {**config, "num_hidden_layers": 2}, {**second, **tensors})
    code, text = started.handoff("--spec", f"eagle:{tmp_path / 'two'}", "--nearest")
    assert code == 0, text
    assert started.folder == tmp_path / "two"
    assert any(note.startswith("the head is handed over as it is: ") for note in started.notes)


def test_what_starts_a_server_is_refused_with_one_that_runs(started: Started) -> None:
    for words in (["--nearest"], ["--checkpoint", "x"]):
        done = CliRunner().invoke(app, ["handoff", "vllm", "--attach", "http://127.0.0.1:1", *words])
        assert done.exit_code == 2
        assert f"omit {words[0]}" in done.stderr
