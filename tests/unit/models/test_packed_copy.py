"""Packed weights are read at the second start, with the same bits, and packed again where their copy is damaged."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_gguf_models import tiny
from torch import Tensor

from slipstream.assets import EMBEDDED_TARGET
from slipstream.errors import ConfigError
from slipstream.kv.pool import KVPool
from slipstream.models import RowGroup, load_model
from slipstream.models.cpu import packed_copy, rounded_head
from slipstream.models.cpu.packed_weight import PackedWeight
from tests.kit.gguf_files import write_model
from tests.kit.marks import needs_kernels

pytestmark = needs_kernels

TEXT = [(7 * i * i + 3 * i + 5) % 90 for i in range(20)]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(packed_copy, "LEAST_BYTES", 1)
    return tmp_path / "cache" / "packed"


@pytest.fixture
def gguf(tmp_path: Path) -> str:
    model: Any = tiny("llama", {"num_hidden_layers": 2, "tie_word_embeddings": False})
    return str(write_model(tmp_path / "x.gguf", "llama", model, {}, {"": "Q4_0"}))


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What was packed, since it was last cleared."""
    calls: list[int] = []
    pack = PackedWeight.pack

    def counted(weight: PackedWeight, part: Any, first: int) -> None:
        calls.append(first)
        pack(weight, part, first)

    monkeypatch.setattr(PackedWeight, "pack", counted)
    return calls


def logits(path: str, **options: Any) -> Tensor:
    lm = load_model(path, **options)
    pool = KVPool(lm.shapes, len(TEXT), lm.dtype, lm.device)
    return lm.forward([RowGroup(range(len(TEXT)), 0, TEXT, range(len(TEXT)))], pool).logits


@pytest.mark.parametrize("damage", [False, True])
def test_an_output_layer_in_8_bits_is_read_too(
    damage: bool, cache: Path, packed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounded_head, "LEAST_WEIGHTS", 1)
    first = load_model(EMBEDDED_TARGET, rounds_head=True)
    (file,) = copies(cache)
    if damage:  # the last entries are the norms of what was rounded off, and those of the weights
        whole = file.read_bytes()
        file.write_bytes(whole[:-30_000] + bytes(30_000))
    packed.clear()
    second = load_model(EMBEDDED_TARGET, rounds_head=True)
    assert len(packed) == len(second.executor.linears)  # those of 16 bits, and not the rounded one
    numbers = [torch.cat([lm.executor.rounded.errors, lm.executor.rounded.norms]) for lm in (first, second)]
    assert torch.equal(*numbers)


def copies(cache: Path) -> list[Path]:
    return sorted(cache.iterdir()) if cache.exists() else []


@pytest.mark.parametrize(
    ("path", "options"),
    [
        ("", {}),
        (EMBEDDED_TARGET, {"quantization": "int8"}),
        (EMBEDDED_TARGET, {"quantization": "int4", "attention_backend": "native_layers"}),
    ],
)
def test_the_second_start_reads_what_the_first_packed(
    path: str, options: dict[str, Any], gguf: str, cache: Path, packed: list[int]
) -> None:
    path = path or gguf
    first = logits(path, **options)
    assert packed
    assert len(copies(cache)) == 1
    packed.clear()
    assert torch.equal(logits(path, **options), first)
    assert not packed
    assert not torch.equal(logits(path, **options, exact_rows=True), first)
    for others in ({"kv_cache_dtype": "float32"}, {"max_model_len": 64}):
        logits(path, **options, **others)
    assert len(copies(cache)) == 1, "options that change no packed weight have copies of their own"
    logits(path, **{**options, "dtype": "float32"})
    assert len(copies(cache)) == 2 or not options


@pytest.mark.parametrize("damage", ["a byte", "the end", "all", "a size"])
def test_a_damaged_copy_is_packed_and_written_anew(
    damage: str, gguf: str, cache: Path, packed: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    first = logits(gguf)
    (file,) = copies(cache)
    whole = file.read_bytes()
    middle = len(whole) // 2
    damaged = {
        "a byte": whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :],
        "the end": whole[:-1],
        "all": b"",
        "a size": bytes([whole[0] ^ 1]) + whole[1:],
    }
    file.write_bytes(damaged[damage])
    packed.clear()
    assert torch.equal(logits(gguf), first)
    assert packed
    assert "are damaged" in caplog.text
    assert file.read_bytes() == whole
    packed.clear()
    assert torch.equal(logits(gguf), first)
    assert not packed
    assert copies(cache) == [file]  # nothing half written is left


def test_the_copies_are_bounded_and_the_oldest_goes_first(
    gguf: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits(gguf)
    (file,) = copies(cache)
    size = file.stat().st_size
    os.utime(file, (1, 1))
    logits(gguf)
    assert file.stat().st_mtime > 1  # it was used
    os.utime(file, (1, 1))
    monkeypatch.setenv(packed_copy.BOUND, str(1.5 * size / 1e9))
    logits(EMBEDDED_TARGET, quantization="int4")
    assert copies(cache) == [file]  # the other one is larger
    logits(gguf, rounds_head=True)
    (other,) = copies(cache)
    assert other != file
    monkeypatch.setenv(packed_copy.BOUND, str(0.5 * size / 1e9))
    logits(gguf)
    assert copies(cache) == []


def test_what_killed_writers_left_is_removed(gguf: str, cache: Path) -> None:
    cache.mkdir(parents=True)
    old, new = cache / ".a.weights.x.tmp", cache / ".b.weights.x.tmp"
    for file in (old, new):
        file.write_bytes(b"half")
    os.utime(old, (1, 1))
    logits(gguf)
    assert not old.exists()
    assert new.exists()


def test_a_full_disk_has_no_copy(gguf: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_copy.shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    logits(gguf)
    assert copies(cache) == []


def test_none_is_written_or_read_where_they_may_take_nothing(
    gguf: str, cache: Path, packed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    logits(gguf)
    monkeypatch.setenv(packed_copy.BOUND, "0")
    packed.clear()
    logits(gguf)
    assert packed
    assert copies(cache) == []


@pytest.mark.parametrize("text", ["", "much", "-1", "nan", "inf"])
def test_a_bound_that_is_no_number_is_refused(text: str, gguf: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(packed_copy.BOUND, text)
    with pytest.raises(ConfigError, match="SLIPSTREAM_PACKED_GB must be how many gigabytes"):
        load_model(gguf)


def test_weights_of_16_bits_and_models_without_a_verdict_are_not_kept(gguf: str, cache: Path) -> None:
    logits(EMBEDDED_TARGET)
    load_model(gguf, canary=False)
    assert copies(cache) == []


def test_no_copy_where_it_cannot_be_written(gguf: str, cache: Path, packed: list[int]) -> None:
    cache.parent.mkdir()
    cache.write_text("a file where the folder would be")
    first = logits(gguf)
    packed.clear()
    assert torch.equal(logits(gguf), first)
    assert packed
