"""Gemma 4 in the fused decoder: layers that differ in heads, in what they store, read, and are given."""

from __future__ import annotations

import dataclasses
import functools
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from slipstream.core.proposal import Proposal
from slipstream.errors import UnsupportedModelError
from slipstream.kv.pool import KVPool
from slipstream.models import CausalLM, RowGroup, load_model
from slipstream.models.cpu.packed_weight import PackedWeight
from slipstream.models.executor.cpu_kernels import CpuKernels
from slipstream.models.families.known import Gemma4, Gemma4Experts, Gemma4Inputs
from slipstream.models.outline import outline_model
from slipstream.models.rows import tree_rows
from tests.kit.folders import kept_folder
from tests.kit.marks import needs_kernels
from tests.kit.quantised_folders import Layer, gptq, quantise_folder
from tests.parity.tiny_models import FAMILIES, save_tiny

pytestmark = needs_kernels
FORMS = ["gemma4", "gemma4-unified", "gemma4-shared", "gemma4-experts"]
LENGTH, BEGIN = 90, 60
TEXT = [(17 * i * i + 5 * i + 3) % 128 for i in range(LENGTH)]
WRONG = [(token + 1) % 128 for token in TEXT]
TREE = Proposal((WRONG[70], TEXT[70], WRONG[71], TEXT[71], TEXT[72]), (-1, -1, 1, 1, 3))


@functools.cache
def folder(form: str, dtype: torch.dtype = torch.float32) -> str:
    torch.manual_seed(0)  # what the weights are drawn on top of
    return str(save_tiny(FAMILIES[form](), kept_folder(), dtype=dtype))


def loaded(form: str, dtype: torch.dtype = torch.float32, **options: Any) -> CausalLM:
    lm = load_model(folder(form, dtype), cpu_kernels="native", **options)
    assert isinstance(lm.executor, CpuKernels)
    return lm


@torch.inference_mode()
def expected(form: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Transformers' logits of the text."""
    model = AutoModelForCausalLM.from_pretrained(
        folder(form, dtype), attn_implementation="eager", dtype=torch.float32
    )
    logits: Tensor = model(input_ids=torch.tensor([TEXT]), use_cache=False).logits[0]
    return logits


def empty(lm: CausalLM) -> KVPool:
    pool = KVPool(lm.shapes, 2 * LENGTH, lm.dtype, lm.device, cache_dtype=lm.cache_dtype)
    pool.fill(float("nan"))
    return pool


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", FORMS)
def test_logits_are_transformers_own(form: str, dtype: torch.dtype) -> None:
    """Weights of 16 bits are kept so, embeddings of layers too, and are multiplied as float32 numbers."""
    lm = loaded(form, dtype, kv_cache_dtype="float32")
    pool = empty(lm)
    ours = lm.forward([RowGroup(pool.slots, 0, TEXT, range(LENGTH))], pool).logits
    assert float((ours - expected(form, dtype)).abs().max()) < 1e-4
    widths = {tensor.dtype for tensor in (lm.executor.input_table,) if isinstance(tensor, Tensor)}
    assert widths <= {dtype}


@pytest.mark.parametrize("cache", ["float32", "int8"])
@pytest.mark.parametrize("quantization", [None, "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("form", FORMS)
def test_a_rows_bits_do_not_depend_on_its_batch(form: str, quantization: str | None, cache: str) -> None:
    lm = loaded(form, quantization=quantization, kv_cache_dtype=cache)
    pool = empty(lm)
    alone = torch.cat(
        [lm.forward([RowGroup(pool.slots, i, TEXT[i : i + 1], [0])], pool).logits for i in range(LENGTH)]
    )
    pool = empty(lm)
    half = pool.slots[LENGTH:]
    chunks = [(0, 7), (7, BEGIN), (BEGIN, 70)]
    for begin, end in chunks[:2]:
        groups = [
            RowGroup(half, begin, WRONG[begin:end], []),
            RowGroup(pool.slots, begin, TEXT[begin:end], range(end - begin)),
        ]
        assert torch.equal(lm.forward(groups, pool).logits, alone[begin:end])
    logits = lm.forward([tree_rows(pool.slots, BEGIN, TEXT[BEGIN:70], TREE, 0)], pool).logits
    assert torch.equal(logits[:10], alone[BEGIN:70])
    assert torch.equal(logits[[11, 13, 14]], alone[70:73])


def test_an_embedding_of_layers_stays_quantised_as_a_file_holds_it(tmp_path: Path) -> None:
    state = load_file(Path(folder("gemma4-shared")) / "model.safetensors")
    names = ("embed_tokens_per_layer", "per_layer_model_projection", "gate_proj", "up_proj")
    wide = [name.removesuffix(".weight") for name in state if name.removesuffix(".weight").endswith(names)]
    layers = {name: Layer.rounded(state[f"{name}.weight"], 16, 4) for name in wide}
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False}
    shutil.copytree(folder("gemma4-shared"), tmp_path / "stored")
    quantise_folder(tmp_path / "stored", {name: gptq(layer) for name, layer in layers.items()}, settings)
    plain = AutoModelForCausalLM.from_pretrained(folder("gemma4-shared"), attn_implementation="eager")
    for name, layer in layers.items():
        plain.get_submodule(name).weight.data = layer.weight
    with torch.inference_mode():
        wanted = plain(input_ids=torch.tensor([TEXT]), use_cache=False).logits[0]
    lm = load_model(str(tmp_path / "stored"), quantization="float32", cpu_kernels="native")
    assert isinstance(lm.executor, CpuKernels)
    assert isinstance(lm.executor.input_table, PackedWeight)
    outline = outline_model(lm.path, quantization="float32")
    assert (lm.weight_bytes, lm.num_parameters) == (outline.weight_bytes, outline.num_parameters)
    assert lm.executor.read_bytes < lm.weight_bytes - lm.executor.input_table.least_bytes
    pool = empty(lm)
    ours = lm.forward([RowGroup(pool.slots, 0, TEXT, range(LENGTH))], pool).logits
    # Rows of what is quantised are rounded.
    assert float((ours - wanted).norm() / wanted.norm()) < 0.05
    exact = load_model(str(tmp_path / "stored"), quantization="float32", cpu_kernels="torch")
    pool = empty(exact)
    theirs = exact.forward([RowGroup(pool.slots, 0, TEXT, range(LENGTH))], pool).logits
    assert float((theirs - wanted).norm() / wanted.norm()) < 1e-3


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_only_wanted_rows_run_the_layers_that_store_nothing(quantization: str | None) -> None:
    """With the bits that they have where all rows run them, and entries of all rows."""
    lm = loaded("gemma4-shared", quantization=quantization)
    pool, other = empty(lm), empty(lm)
    cuts = [(0, 40, []), (40, 70, [29, 3, 29]), (70, LENGTH, [0])]
    for begin, end, rows in cuts:
        group = RowGroup(pool.slots, begin, TEXT[begin:end], range(end - begin))
        whole = lm.forward([group], other, [lm.num_layers]).logits
        group = RowGroup(pool.slots, begin, TEXT[begin:end], rows)
        assert torch.equal(lm.forward([group], pool).logits, whole[rows])
    for ours, theirs in zip(pool.keys, other.keys, strict=True):
        assert torch.equal(ours[:, :LENGTH], theirs[:, :LENGTH])
    tree = tree_rows(pool.slots, BEGIN, TEXT[BEGIN:70], TREE, 0)
    some = dataclasses.replace(tree, logit_rows=[11, 14])
    assert torch.equal(lm.forward([some], pool).logits, lm.forward([tree], pool).logits[[11, 14]])


def test_nothing_is_written_for_a_layer_that_reads_another_one() -> None:
    lm = loaded("gemma4-shared")
    assert [shape.source for shape in lm.shapes] == [None] * 4 + [2, 3]
    pool = empty(lm)
    lm.forward([RowGroup(pool.slots, 0, TEXT, [0])], pool, layers=[0, 1, 2, 3])
    before = [keys[:, :LENGTH].clone() for keys in pool.keys]
    lm.forward([RowGroup(pool.slots, 0, TEXT, [0])], pool)
    assert all(torch.equal(old, new[:, :LENGTH]) for old, new in zip(before, pool.keys, strict=True))


@pytest.fixture
def new(tmp_path: Path) -> Path:
    """A folder that was never compared: the verdict on one is kept."""
    return tmp_path / "model"


@pytest.mark.parametrize(
    ("form", "family", "name", "value", "fault"),
    [
        ("gemma4", Gemma4, "layer_scale", None, "its layer 0"),
        ("gemma4", Gemma4, "value_norm", None, "its layer 0"),
        ("gemma4", Gemma4, "logit_cap", None, "its output layer"),
        ("gemma4-shared", Gemma4Inputs, "norm_offset", 0.25, "what its layer 0 is given"),
        ("gemma4-experts", Gemma4Experts, "norm_offset", 0.25, "its layer 0"),
    ],
)
def test_a_wrong_description_is_refused(
    form: str, family: type, name: str, value: Any, fault: str, new: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(family, name, value)
    save_tiny(FAMILIES[form](), new)
    with pytest.raises(UnsupportedModelError, match=f"{fault} is not what the fused decoder computes"):
        load_model(str(new), cpu_kernels="native")


@pytest.mark.parametrize(
    ("name", "value", "fault"),
    [
        ("table_scale", "model.per_layer_input_scale", "what its layer 0 is given"),
        ("scale", "model.per_layer_model_projection_scale", "what its layer 0 is given"),
        ("norm", "post_attention_layernorm", "its layers have"),
    ],
)
def test_inputs_that_are_described_wrongly_are_refused(
    name: str, value: str, fault: str, new: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny(FAMILIES["gemma4-shared"](), new)
    assert Gemma4Inputs.inputs is not None
    monkeypatch.setattr(Gemma4Inputs, "inputs", dataclasses.replace(Gemma4Inputs.inputs, **{name: value}))
    if fault.startswith("what"):
        with pytest.raises(UnsupportedModelError, match=fault):
            load_model(str(new), cpu_kernels="native")
    else:
        assert load_model(str(new), cpu_kernels="native").kernels == "native"
