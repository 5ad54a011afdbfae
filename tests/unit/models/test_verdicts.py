"""A model that has passed the checks at load is not compared again, unless anything of it has changed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from test_gguf_models import tiny
from torch import nn

from slipstream.errors import UnsupportedModelError
from slipstream.models import canary, load_model, loading
from slipstream.models.files.grouped import Grouped
from slipstream.models.huggingface import MODEL_FOR_CAUSAL_LM_MAPPING
from slipstream.models.linear.grouped import GroupedLinear
from slipstream.models.verdicts import verdict_of
from tests.kit.gguf_files import write_model
from tests.kit.marks import needs_kernels

pytestmark = needs_kernels


@pytest.fixture
def model() -> Any:
    with torch.no_grad():
        return tiny("llama", {"num_hidden_layers": 2, "tie_word_embeddings": False})


@pytest.fixture
def gguf(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    return write_model(tmp_path / "x.gguf", "llama", model, {}, {"": "Q4_0"})


class Counts:
    """What a start does: passes of the Transformers model and of the kernels, and weights that are widened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stock_passes = self.widened = self.packed_passes = 0
        run, widen, packed = canary.StockPass.run, Grouped.widened, canary.packed_logits

        def running(stock: Any) -> bool:
            self.stock_passes += 1
            return run(stock)

        def widening(part: Grouped) -> Any:
            self.widened += part.codes.numel()
            return widen(part)

        def passing(*arguments: Any, **keywords: Any) -> Any:
            self.packed_passes += 1
            return packed(*arguments, **keywords)

        monkeypatch.setattr(canary.StockPass, "run", running)
        monkeypatch.setattr(Grouped, "widened", widening)
        monkeypatch.setattr(canary, "packed_logits", passing)

    def take(self) -> tuple[int, int, int]:
        found = (self.stock_passes, self.packed_passes, self.widened)
        self.stock_passes = self.packed_passes = self.widened = 0
        return found


def test_the_first_start_widens_each_weight_once_and_the_second_none(
    gguf: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = Counts(monkeypatch)
    load_model(str(gguf))
    stock, packed, widened = counts.take()
    matrices = sum(
        part.weight.numel() for part in model.modules() if isinstance(part, nn.Linear | nn.Embedding)
    )
    # The embedding's rows of the trial text, and the outputs whose logits are compared, are read a second time.
    again = 2 * 12 * 64 + min(512, model.config.vocab_size) * 64
    assert stock == 1
    assert packed <= 4
    assert matrices <= widened <= matrices + again
    load_model(str(gguf))
    assert counts.take() == (
        0,
        0,
        4 * 64,
    )  # two tokens are embedded to try the model out, with a cache and without


def test_masks_and_layers_are_tried_without_reading_weights(
    gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(GroupedLinear, "forward", lambda part, rows: calls.append("forward"))
    load_model(str(gguf), canary=False)
    assert calls == []


def test_changed_files_are_compared_again(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = Counts(monkeypatch)
    load_model(str(gguf))
    counts.take()
    state = gguf.stat()
    os.utime(gguf, ns=(state.st_atime_ns, state.st_mtime_ns + 1))
    load_model(str(gguf))
    assert counts.take()[0] == 1  # written to since
    data = bytearray(gguf.read_bytes())
    data[-1] ^= 1
    gguf.write_bytes(data)
    os.utime(gguf, ns=(state.st_atime_ns, state.st_mtime_ns + 1))
    load_model(str(gguf))
    assert counts.take()[0] == 1  # other contents of the same size and time
    load_model(str(gguf), kv_cache_dtype="float32")
    assert counts.take()[0] == 1  # other settings
    load_model(str(gguf), kv_cache_dtype="float32")
    assert counts.take()[0] == 0
    load_model(str(gguf), reproducible=False)
    assert counts.take()[0] == 1  # what multiplies on a GPU


def test_another_gpu_has_other_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"number {device.index}")
    found = {loading.kernels_of(torch.device(name), False) for name in ("cpu", "cuda:0", "cuda:1")}
    assert len(found) == 3


def test_other_kernels_and_others_classes_have_no_verdict_of_this_model(gguf: Path) -> None:
    ours = verdict_of(str(gguf), None, None, {}, "avx2 1", [GroupedLinear])
    assert ours is not None
    ours.keep()
    assert ours.is_kept()
    others = verdict_of(str(gguf), None, None, {}, "avx2 2", [GroupedLinear])
    assert others is not None
    assert not others.is_kept()
    assert verdict_of(str(gguf), None, None, {}, "avx2 1", [Counts]) is None  # its code may change unseen
    assert verdict_of("no/such-model", None, None, {}, "avx2 1", []) is None


def test_the_class_that_computes_the_model_is_part_of_its_verdict(
    gguf: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = Counts(monkeypatch)
    load_model(str(gguf))
    assert counts.take()[0] == 1
    own = type("LlamaForCausalLM", (type(model),), {"__module__": "own_code"})
    mapping = MODEL_FOR_CAUSAL_LM_MAPPING
    monkeypatch.setitem(mapping._extra_content, type(model.config), own)  # as `AutoModelForCausalLM.register`
    for _ in range(2):
        load_model(str(gguf))
        assert counts.take()[0] == 1  # its code may change unseen
    other = type("OtherForCausalLM", (type(model),), {"__module__": "transformers.models.llama.other"})
    monkeypatch.setitem(mapping._extra_content, type(model.config), other)
    load_model(str(gguf))
    assert counts.take()[0] == 1
    load_model(str(gguf))
    assert counts.take()[0] == 0


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 1}', "\udcff"])
def test_a_damaged_verdict_is_ignored_and_written_anew(
    text: str, gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = Counts(monkeypatch)
    load_model(str(gguf))
    (file,) = (gguf.parent / "cache" / "verdicts").iterdir()
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    counts.take()
    load_model(str(gguf))
    assert counts.take()[0] == 1
    load_model(str(gguf))
    assert counts.take()[0] == 0
    assert [each.name for each in file.parent.iterdir()] == [file.name]  # nothing half written is left


def test_no_verdict_where_it_cannot_be_kept(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (gguf.parent / "cache" / "verdicts").parent.mkdir(exist_ok=True)
    (gguf.parent / "cache" / "verdicts").write_text("a file where the folder would be")
    counts = Counts(monkeypatch)
    for _ in range(2):
        load_model(str(gguf))
        assert counts.take()[0] == 1


def test_a_model_that_is_refused_leaves_no_verdict(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(lm: Any) -> None:
        raise UnsupportedModelError("refused")

    monkeypatch.setattr(loading, "check_cache", refuse)
    with pytest.raises(UnsupportedModelError, match="refused"):
        load_model(str(gguf))
    assert not (gguf.parent / "cache" / "verdicts").exists()
    load_model(str(gguf), canary=False)
    assert not (gguf.parent / "cache" / "verdicts").exists()
