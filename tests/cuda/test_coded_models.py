"""Models whose weights a GPU's decoder holds as codes, on a CPU by its stand-in: rounded ones, and those of files."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from coded_cases import DECODER, error, logits

from slipstream import LLM, SamplingParams
from slipstream.assets import EMBEDDED_TARGET
from slipstream.errors import ConfigError, ModelError
from slipstream.models import CausalLM, load_model, loading
from slipstream.models.cuda.linear_codes import HeldAs
from slipstream.models.linear.formats import weight_format
from slipstream.models.linear.grouped import GroupedLinear
from slipstream.models.loading import load_plain
from slipstream.models.outline import outline_model
from slipstream.models.resolve import kept_dtype
from slipstream.testing.recorded_graph import RecordedExecutor, RecordedKernels
from tests.kit.quantised_folders import gptq_folder
from tests.unit.models.test_fp8_folders import FP8, compressed, saved, tiny
from tests.unit.models.test_gguf_models import MIXED, quantised

META = torch.device("meta")


def decoded(path: str, **options: Any) -> CausalLM:
    lm = load_model(path, **DECODER, **options)
    assert isinstance(lm.executor, RecordedKernels)
    return lm


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["int8", "int4", "int4_g128"])
def test_a_weight_format_is_held_as_codes(name: str, dtype: str) -> None:
    """Beside plain weights with the numbers that the format leaves."""
    fmt = weight_format(name)
    plain = load_plain(EMBEDDED_TARGET, dtype=getattr(torch, dtype), attention="eager").eval()
    with torch.no_grad():
        for layer in (part for part in plain.modules() if type(part) is torch.nn.Linear):
            own = fmt.of_head() if layer is plain.get_output_embeddings() else fmt
            codes = own.pack_torch(_wide(layer))
            layer.weight.copy_(codes.unpack(torch.arange(layer.out_features)))
        expected = plain(torch.tensor([[1, 5, 9, 3, 7]])).logits[0, [0, 4]].float()
    lm = decoded(EMBEDDED_TARGET, dtype=dtype, quantization=name)
    assert lm.weight_type == name
    assert not lm.rounds_rows
    assert error(logits(lm), expected) < (1e-5 if dtype == "float32" else 0.05)


def _wide(layer: torch.nn.Linear) -> torch.nn.Linear:
    wide = torch.nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
    wide.weight = torch.nn.Parameter(layer.weight.detach().float(), requires_grad=False)
    return wide


@pytest.mark.parametrize("act_order", [False, True])
def test_a_gptq_folder_stays_codes(act_order: bool, tmp_path: Path) -> None:
    folder = str(gptq_folder(tmp_path / "m", EMBEDDED_TARGET, 32, act_order))
    wide = load_model(folder, dtype="float32", attention_backend="packed", cpu_kernels="torch", pack=False)
    lm = decoded(folder)
    assert lm.weight_type == "GPTQ, 4 bits"
    assert error(logits(lm), logits(wide)) < 1e-5
    assert lm.executor.footprint() < 0.5 * sum(part.nbytes for part in wide.model.parameters())


@pytest.mark.parametrize("settings", [FP8, compressed("channel"), compressed("tensor")], ids=str)
def test_an_fp8_folder_stays_codes(settings: dict[str, Any], tmp_path: Path) -> None:
    numbers = saved(tmp_path / "m", settings, tiny())
    lm = decoded(str(tmp_path / "m"))
    assert lm.weight_type == "FP8"
    wide = tiny()
    wide.load_state_dict(numbers)
    expected = wide(torch.tensor([[1, 5, 9, 3, 7]])).logits[0, [0, 4]].detach()
    assert error(logits(lm), expected) < 1e-5
    packed = [weight for layer in lm.executor.decoder.layers for weight in layer.linears]  # type: ignore[attr-defined]
    assert {weight.codes.kind for weight in packed} == {HeldAs.FP8}


@pytest.mark.parametrize("tied", [False, True])
def test_a_gguf_file_stays_codes(tied: bool, tmp_path: Path) -> None:
    file, model = quantised(MIXED, tmp_path, tie_word_embeddings=tied)
    expected = model(torch.tensor([[1, 5, 9, 3, 7]])).logits[0, [0, 4]].detach()
    lm = decoded(str(file))
    assert error(logits(lm), expected) < 1e-5
    outlined = outline_model(str(file), **DECODER)
    assert outlined.stored_as == lm.stored_as
    held = lm.executor.footprint()
    assert 0.8 * held < outlined.held.total_bytes < 1.3 * held


@pytest.mark.parametrize("tied", [False, True])
def test_codes_of_a_file_beside_16_bits(tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GPU computes them."""
    file, model = quantised(MIXED, tmp_path, tie_word_embeddings=tied)
    expected = model(torch.tensor([[1, 5, 9, 3, 7]])).logits[0, [0, 4]].detach()
    monkeypatch.setattr(loading, "kept_dtype", lambda *_: torch.bfloat16)
    lm = decoded(str(file))
    assert lm.dtype == torch.bfloat16
    assert set(lm.weight_type.split(", ")) == {"Q4_K", "Q6_K", "Q8_0"}
    embedded = lm.model.get_input_embeddings()(torch.tensor([3]))
    layer = next(part for part in lm.model.modules() if isinstance(part, GroupedLinear))
    assert embedded.dtype == layer(torch.zeros(1, layer.in_features).bfloat16()).dtype == torch.bfloat16
    assert error(logits(lm), expected) < 0.05


def test_texts_of_codes_are_the_same_beside_others() -> None:
    llm = LLM(quantization="int8", dtype="bfloat16", max_model_len=64, max_num_seqs=2, **DECODER)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    prompts = ["The capital of France", "A list of"]
    together = [answer.outputs[0].token_ids for answer in llm.generate(prompts, params)]
    alone = [llm.generate([prompt], params)[0].outputs[0].token_ids for prompt in prompts]
    assert together == alone


def test_formats_on_a_gpu_are_for_its_decoder() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        weight_format("int8").check(META, dtype, decodes=True)
        with pytest.raises(
            ConfigError, match="models that a GPU's fused decoder computes; on meta leave it out"
        ):
            weight_format("int4").check(META, dtype)
    with pytest.raises(ConfigError, match="'int8' computes in float32"):
        load_model(EMBEDDED_TARGET, dtype="bfloat16", quantization="int8", **DECODER, executor="eager")


def test_codes_of_a_file_on_a_gpu_are_for_its_decoder(tmp_path: Path) -> None:
    folder = str(gptq_folder(tmp_path / "m", EMBEDDED_TARGET, 32))
    with pytest.raises(ModelError, match="its fused decoder computes; --dtype bfloat16 widens them"):
        load_model(folder, device="meta", executor="eager")


def test_an_executor_that_takes_the_decoders_place_does_not_take_codes() -> None:
    """As where the decoder refuses a model that has been read."""
    given: Any = SimpleNamespace(
        model=SimpleNamespace(device=META), weight_format=weight_format("int8"), dtype=torch.bfloat16
    )
    for executor, refused in ((RecordedExecutor, True), (RecordedKernels, False)):
        for quantization, stored_as in (("int8", ""), (None, "Q4_K")):
            with pytest.raises((ConfigError, ModelError)) if refused else nullcontext():
                loading.check_kept(executor, given, quantization, "x", stored_as)


def test_a_file_without_a_type_computes_in_16_bits_on_a_gpu() -> None:
    assert kept_dtype(META, torch.float32) == torch.bfloat16
    assert kept_dtype(META, torch.float16) == torch.float16
    assert kept_dtype(torch.device("cpu"), torch.float32) == torch.float32
