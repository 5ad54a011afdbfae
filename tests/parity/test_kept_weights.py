"""A 16-bit checkpoint is kept as it is stored, and gives the bits of the same checkpoint widened to float32."""

from __future__ import annotations

import importlib.util
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import FAMILIES, VOCAB, save_tiny
from torch import Tensor
from transformers import OlmoConfig, PreTrainedModel

from slipstream.models import CausalLM, RowGroup, loading, matrices
from slipstream.models import load_model as load_any
from slipstream.models.executor.cpu_kernels import CpuKernels
from slipstream.models.outline import outline_model
from tests.kit.small_llama import sizes

TEXT = [(17 * i * i + 5 * i + 3) % VOCAB for i in range(64)]
FUSED = [
    "llama",
    "llama-gqa",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "phi3",
    "gpt-neox",
    "starcoder2",
]
FUSED += ["granite", "olmo2", "smollm3", "mixtral", "qwen3-moe-odd", "gpt-oss"]
LAYER_BY_LAYER = ["phi", "opt", "olmo"]
"""Olmo has no parameters but its matrices."""
NOT_PLAIN = ["qwen3-moe-mixed", "gpt2", "falcon-old"]
"""Experts that the kernels do not know, and linear layers of a class of their own."""
OLMO = sizes(32, 2, 4, vocab=VOCAB, inner=48, context=128, pad=0, eos=None)
load_model = partial(load_any, kv_cache_dtype="float32")
"""What is compared here are the weights; by default a 16-bit checkpoint rounds its keys and values too."""
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def logits(lm: CausalLM, num_rows: int) -> Tensor:
    """Return the logits of a prompt in passes of so many rows."""
    pool, slots = lm.trial_cache(len(TEXT))
    passes = [
        lm.forward([RowGroup(slots, begin, TEXT[begin : begin + num_rows], range(num_rows))], pool).logits
        for begin in range(0, len(TEXT) - num_rows + 1, num_rows)
    ]
    return torch.cat(passes)


def checkpoint(family: str, folder: Path, dtype: str, **changes: Any) -> str:
    config = OlmoConfig(**OLMO) if family == "olmo" else FAMILIES[family]()
    for name, value in changes.items():
        setattr(config, name, value)
    return str(save_tiny(config, folder / family, dtype=DTYPES[dtype]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FUSED)
def test_a_fused_family_has_the_bits_of_float32(family: str, dtype: str, tmp_path: Path) -> None:
    path = checkpoint(family, tmp_path, dtype)
    kept, wide = load_model(path), load_model(path, dtype="float32")
    assert (kept.kernels, kept.weight_format.name, kept.dtype) == ("decoder", dtype, torch.float32)
    assert (wide.kernels, wide.weight_format.name) == ("decoder", "float32")
    for num_rows in (1, 2, 5, 7, 12, 13, 32, 64):
        assert torch.equal(logits(kept, num_rows), logits(wide, num_rows))
    tokens = torch.arange(VOCAB)
    assert torch.equal(kept.embed(tokens), wide.embed(tokens))
    assert 0.4 * wide.weight_bytes < kept.weight_bytes < 0.6 * wide.weight_bytes


@pytest.mark.parametrize("tied", [False, True])
def test_tied_or_not(tied: bool, tmp_path: Path) -> None:
    path = checkpoint("llama", tmp_path, "bfloat16", tie_word_embeddings=tied)
    kept, wide = load_model(path), load_model(path, dtype="float32")
    assert isinstance(kept.executor, CpuKernels)
    assert kept.weight_bytes < 0.6 * wide.weight_bytes
    assert torch.equal(logits(kept, 4), logits(wide, 4))
    int8 = load_model(path, quantization="int8"), load_model(path, quantization="int8", dtype="float32")
    assert torch.equal(*(logits(each, 4) for each in int8))


@pytest.mark.parametrize("quantization", [None, "float32", "int8", "int4"])
@pytest.mark.parametrize("family", ["llama-gqa", "gemma2", "mixtral", "phi"])
def test_float32_is_read_as_stored_and_widened_while_it_is_packed(
    family: str, quantization: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbers are those of a checkpoint that was widened before."""
    path = checkpoint(family, tmp_path, "bfloat16")
    wide = load_any(path, dtype="float32", pack=False, canary=False).model
    assert {parameter.dtype for parameter in wide.parameters()} == {torch.float32}
    wide.save_pretrained(tmp_path / "wide")
    read = []

    def read_weights(*arguments: Any, **keywords: Any) -> Any:
        model, stored_as = load_weights(*arguments, **keywords)
        read.extend({weight.dtype for weight in matrices.plain_matrices(model)})
        return model, stored_as

    load_weights = loading.load_weights
    monkeypatch.setattr(loading, "load_weights", read_weights)
    narrow = load_model(path, dtype="float32", quantization=quantization)
    expected = load_model(str(tmp_path / "wide"), dtype="float32", quantization=quantization)
    assert read == [torch.bfloat16, torch.float32]
    assert narrow.weight_format.name == expected.weight_format.name == (quantization or "float32")
    for num_rows in (1, 5, 64):
        assert torch.equal(logits(narrow, num_rows), logits(expected, num_rows))
    tokens = torch.arange(VOCAB)
    assert torch.equal(narrow.embed(tokens), expected.embed(tokens))


@pytest.mark.parametrize("family", LAYER_BY_LAYER)
def test_a_family_that_runs_layer_by_layer_does_too(family: str, tmp_path: Path) -> None:
    path = checkpoint(family, tmp_path, "bfloat16")
    kept, wide = load_model(path), load_model(path, dtype="float32")
    assert (kept.kernels, kept.weight_format.name, kept.dtype) == ("native", "bfloat16", torch.float32)
    for num_rows in (1, 5, 64):
        assert torch.equal(logits(kept, num_rows), logits(wide, num_rows))
    assert kept.weight_bytes < wide.weight_bytes


@pytest.mark.parametrize("family", NOT_PLAIN)
def test_a_model_with_other_matrices_is_widened_as_before(family: str, tmp_path: Path) -> None:
    path = checkpoint(family, tmp_path, "bfloat16")
    lm = load_model(path)
    assert (lm.weight_format.name, lm.dtype) == ("float32", torch.float32)
    half = load_model(path, dtype="bfloat16")
    assert (half.kernels, half.dtype) == ("torch", torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_float32_checkpoint_is_rounded_once_where_that_is_asked_for(dtype: str, tmp_path: Path) -> None:
    save_tiny(FAMILIES["llama"](), tmp_path / "wide")
    assert load_model(str(tmp_path / "wide")).weight_format.name == "float32"
    kept = load_model(str(tmp_path / "wide"), dtype=dtype)
    named = load_model(str(tmp_path / "wide"), quantization=dtype)
    model = load_model(str(tmp_path / "wide"), dtype="float32", pack=False, canary=False).model
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            parameter.data = parameter.data.to(DTYPES[dtype]).float()
        assert parameter.dtype == torch.float32, name
    model.save_pretrained(tmp_path / "rounded")
    expected = logits(load_model(str(tmp_path / "rounded")), 5)
    assert kept.weight_format.name == named.weight_format.name == dtype
    assert torch.equal(logits(kept, 5), expected)
    assert torch.equal(logits(named, 5), expected)


def test_a_shared_table_that_is_stored_wider_is_not_rounded(tmp_path: Path) -> None:
    """Gemma's embedding scales its rows, and is the output layer too."""
    path = checkpoint("gemma2", tmp_path, "bfloat16")
    file = str(Path(path) / "model.safetensors")
    weights = load_file(file)
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"].float() + 1e-5
    save_file(weights, file, metadata={"format": "pt"})
    mixed, wide = load_model(path), load_model(path, dtype="float32")
    assert mixed.weight_format.name == "float32"
    assert torch.equal(logits(mixed, 5), logits(wide, 5))


def test_what_the_files_hold_counts_and_not_what_the_configuration_says(tmp_path: Path) -> None:
    save_tiny(FAMILIES["llama"](), tmp_path)
    config = (tmp_path / "config.json").read_text()
    assert '"float32"' in config
    (tmp_path / "config.json").write_text(config.replace('"float32"', '"bfloat16"'))
    assert load_model(str(tmp_path)).weight_format.name == "float32"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": "float16"},
        {"dtype": "float32"},
        {"quantization": "int8"},
        {"quantization": "int4"},
        {"dtype": "float32", "quantization": "int8"},
    ],
)
@pytest.mark.parametrize(
    "family", ["llama", "llama-gqa", "qwen2", "gemma2", "gemma3", "opt", "gpt2", "mixtral"]
)
def test_what_is_kept_is_planned_to_the_byte(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    path = checkpoint(family, tmp_path, "bfloat16")
    model, planned = load_model(path, **options), outline_model(path, **options)
    assert planned.held.total_bytes == model.weight_bytes
    assert planned.kernels == model.kernels
    assert planned.weight_format.name == model.weight_format.name
    assert planned.dtype == model.dtype
    assert planned.unpacked_bytes == model.unpacked_bytes


def test_a_version_of_transformers_that_cannot_be_told_reads_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The same numbers in twice the memory, and a warning."""
    path = checkpoint("llama", tmp_path, "bfloat16")
    expected = logits(load_model(path), 5)
    monkeypatch.delattr(PreTrainedModel, "_get_dtype_plan")
    spec = importlib.util.spec_from_file_location("matrices_without_a_plan", matrices.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    assert not hasattr(PreTrainedModel, "_get_dtype_plan")
    monkeypatch.setattr(PreTrainedModel, "_get_dtype_plan", matrices.inherited_plan, raising=False)
    monkeypatch.setattr(loading, "reading", module.reading)
    for _ in range(2):
        wide = load_model(path)
    assert wide.weight_format.name == "float32"
    assert torch.equal(logits(wide, 5), expected)
    assert caplog.text.count("reads 16-bit checkpoints as float32 here") == 1
