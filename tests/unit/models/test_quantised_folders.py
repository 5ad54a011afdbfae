"""GPTQ, AWQ, AutoRound, compressed-tensors: the numbers are the file's, and what does not fit together is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from slipstream.errors import ConfigError, ModelError, UnsupportedModelError
from slipstream.models import load_model, unloaded
from slipstream.models.executor.cpu_kernels import CpuKernels
from slipstream.models.families.known import Llama
from slipstream.models.files.awq import AwqMatrix
from slipstream.models.files.compressed import CompressedMatrix, CompressedSettings
from slipstream.models.files.gptq import GptqMatrix, GptqSettings
from slipstream.models.files.grouped import GroupedMatrix
from slipstream.models.files.quantised_folder import check_settings, read_quantised
from slipstream.models.files.quantized import resolve_quantized
from slipstream.models.outline import outline_model
from tests.kit.logits import cached_logits, eager_logits, relative_error
from tests.kit.marks import needs_kernels
from tests.kit.quantised_folders import LINEARS, Layer, awq, compressed, gptq, quantise_folder
from tests.kit.small_llama import sizes


def numbers(matrix: GroupedMatrix) -> Tensor:
    """float32 [out, in], read in two parts that end in the middle of a word."""
    return torch.cat([matrix.widened(0, 11), matrix.widened(11, matrix.out_features)])


def ct_settings(bits: int = 4, form: str = "pack-quantized", **weights: Any) -> dict[str, Any]:
    group = {
        "num_bits": bits,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": 32,
    } | weights
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": group}},
        "ignore": ["lm_head"],
    }


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("form", ["gptq", "gptq_v2"])
def test_gptq_has_the_files_numbers(bits: int, act_order: bool, form: str) -> None:
    layer = Layer.random(64, 128, 32, bits, seed=bits, act_order=act_order)
    settings = GptqSettings.read(
        {"bits": bits, "group_size": 32, "desc_act": act_order, "checkpoint_format": form}
    )
    matrix = GptqMatrix("w", gptq(layer, less_one=form == "gptq"), settings)
    assert torch.equal(numbers(matrix), layer.weight)
    assert (matrix.order is not None) == act_order
    assert not matrix.is_symmetric
    middle = Layer.random(64, 128, 32, bits, seed=bits, middle=True)
    assert GptqMatrix("w", gptq(middle, less_one=form == "gptq"), settings).is_symmetric


def test_a_group_of_all_inputs() -> None:
    layer = Layer.random(16, 96, 96, 4, seed=1)
    matrix = GptqMatrix("w", gptq(layer), GptqSettings.read({"bits": 4, "group_size": -1}))
    assert matrix.group_size == 96
    assert torch.equal(numbers(matrix), layer.weight)


def test_awq_has_the_files_numbers() -> None:
    layer = Layer.random(48, 128, 64, 4, seed=2)
    assert torch.equal(numbers(AwqMatrix("w", awq(layer), 64)), layer.weight)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("act_order", [False, True])
def test_packed_compressed_tensors_have_the_files_numbers(
    bits: int, symmetric: bool, act_order: bool
) -> None:
    layer = Layer.random(44, 128, 32, bits, seed=3, act_order=act_order, middle=symmetric)
    tensors = compressed(layer, symmetric=symmetric)
    settings = CompressedSettings.read(ct_settings(bits, actorder="group" if act_order else None))
    matrix = CompressedMatrix("w", tensors, settings)
    assert torch.equal(numbers(matrix), layer.weight)
    assert matrix.is_symmetric == symmetric


def test_bytes_with_a_scale_an_output_have_the_files_numbers() -> None:
    layer = Layer.random(44, 100, 100, 8, seed=4, middle=True)
    settings = CompressedSettings.read(ct_settings(8, "int-quantized", strategy="channel", group_size=None))
    tensors = compressed(layer, packed=False)
    assert torch.equal(numbers(CompressedMatrix("w", tensors, settings)), layer.weight)
    one = settings.read(ct_settings(8, "int-quantized", strategy="tensor"))
    tensors["weight_scale"] = tensors["weight_scale"][:1, 0]
    expected = layer.weight / layer.scales.float() * layer.scales.float()[0, 0]
    torch.testing.assert_close(numbers(CompressedMatrix("w", tensors, one)), expected)


def test_weights_that_are_not_symmetric_need_their_zero_points() -> None:
    layer = Layer.random(48, 128, 32, 4, seed=7)
    settings = CompressedSettings.read(ct_settings(symmetric=False))
    tensors = compressed(layer)
    assert torch.equal(numbers(CompressedMatrix("w", tensors, settings)), layer.weight)
    del tensors["weight_zero_point"]
    assert "w lacks weight_zero_point" in refusal(lambda: CompressedMatrix("w", tensors, settings))
    assert CompressedMatrix("w", tensors, CompressedSettings.read(ct_settings())).is_symmetric


def refusal(make: Callable[[], Any]) -> str:
    with pytest.raises(ModelError) as caught:
        make()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_layers_that_do_not_fit_together_are_refused() -> None:
    layer = Layer.random(48, 128, 32, 4, seed=5, act_order=True)
    good = gptq(layer)
    settings = GptqSettings.read({"bits": 4, "group_size": 32, "desc_act": True})

    def of_gptq(group: int = 32, **changes: Tensor | None) -> str:
        tensors = {name: tensor for name, tensor in (good | changes).items() if tensor is not None}
        used = GptqSettings.read({"bits": 4, "group_size": group, "desc_act": True})
        return refusal(lambda: GptqMatrix("w", tensors, used))

    assert "quantised in act-order (desc_act) and lacks its index g_idx" in of_gptq(g_idx=None)
    assert "groups of 48 do not divide its 128 inputs" in of_gptq(48)
    assert "g_idx) does not give every group the same number" in of_gptq(g_idx=good["g_idx"] * 0)
    assert "g_idx) does not give every group the same number" in of_gptq(g_idx=good["g_idx"] - 1)
    assert "w.g_idx is 127, and its layer needs 128" in of_gptq(g_idx=good["g_idx"][1:])
    assert "w.scales is 4 x 40, and its layer needs 4 x 48" in of_gptq(scales=good["scales"][:, 8:])
    assert "w.qzeros is 2 x 6, and its layer needs 4 x 6" in of_gptq(qzeros=good["qzeros"][:2])
    assert "w.qweight holds float32 numbers" in of_gptq(qweight=good["qweight"].float())
    assert "w lacks qzeros" in of_gptq(qzeros=None)
    short = gptq(Layer.random(48, 192, 96, 4, seed=5))  # 128 inputs and 64 would have as many scales
    by_shape = GptqSettings.read({"bits": 4, "group_size": 128, "dynamic": {".*": {}}})
    assert "w: the size of its 2 groups is not known" in refusal(lambda: GptqMatrix("w", short, by_shape))
    assert torch.equal(numbers(GptqMatrix("w", good, settings)), layer.weight)
    words = awq(Layer.random(48, 128, 32, 4, seed=6))
    assert "w.qzeros is 3 x 6" in refusal(lambda: AwqMatrix("w", words | {"qzeros": words["qzeros"][1:]}, 32))
    packed = compressed(Layer.random(48, 128, 32, 4, seed=6, act_order=True))
    of_group = CompressedSettings.read(ct_settings(actorder="group"))

    def of_compressed(changes: Mapping[str, Tensor]) -> str:
        return refusal(lambda: CompressedMatrix("w", changes, of_group))

    shape = "w.weight_shape is one number, and its layer needs 2"
    assert shape in of_compressed(packed | {"weight_shape": torch.tensor(48)})
    empty = packed | {"weight_packed": packed["weight_packed"][:0], "weight_shape": torch.tensor([0, 128])}
    assert "w.weight_packed is 0 x 16: it holds nothing" in of_compressed(empty)
    assert "w.qweight is 0 x 48: it holds nothing" in of_gptq(qweight=good["qweight"][:0])
    assert "w.weight_shape is [48, 64]" in of_compressed(packed | {"weight_shape": torch.tensor([48, 64])})
    assert "w.weight_scale is 48 x 2" in of_compressed(
        packed | {"weight_scale": packed["weight_scale"][:, :2]}
    )
    del packed["weight_g_idx"]
    assert "lacks its index weight_g_idx" in of_compressed(packed)


@pytest.mark.parametrize(
    ("method", "settings", "what"),
    [
        ("gptq", {"bits": 5, "group_size": 128}, "GPTQ weights of 5 bits"),
        ("auto-round", {"bits": 5}, "AutoRound weights (int of 5 bits in groups of 128, packed as"),
        ("auto-round", {"bits": 8, "packing_format": "auto_round:auto_awq"}, "of 4 bits packed as auto_awq"),
        (
            "auto-round",
            {"bits": 4, "packing_format": "auto_round:llm_compressor"},
            "auto_round:llm_compressor",
        ),
        ("auto-round", {"bits": 4, "data_type": "mx_fp4"}, "AutoRound weights (mx_fp4 of 4 bits"),
        ("gptq", {"bits": 4, "checkpoint_format": "marlin"}, "the format 'marlin'"),
        ("awq", {"bits": 8}, "AWQ weights of 8 bits"),
        ("awq", {"bits": 4, "version": "gemv"}, "the layout 'gemv'"),
        ("awq", {"bits": 4, "zero_point": False}, "without zero points"),
        ("compressed-tensors", {}, "without config_groups"),
        ("compressed-tensors", ct_settings(8, "float-quantized", type="float"), "float of 8 bits"),
        ("compressed-tensors", ct_settings(4, strategy="block"), "a scale a block"),
        ("compressed-tensors", ct_settings(4, group_size=None), "the size of their groups"),
        ("compressed-tensors", ct_settings(4, symmetric="no"), "say 'no' of whether they are symmetric"),
        (
            "compressed-tensors",
            ct_settings(4) | {"transform_config": {"config_groups": {"R1": {}}}},
            "online rotations (transform_config)",
        ),
        (
            "compressed-tensors",
            ct_settings(4) | {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparse (sparsity_config: sparse-24-bitmask)",
        ),
        ("compressed-tensors", {"config_groups": {"g": 5}}, "a damaged group 'g' in config_groups"),
        ("compressed-tensors", {"config_groups": {"g": {"weights": [1]}}}, "a damaged group 'g'"),
        (
            "compressed-tensors",
            ct_settings(8, "float-quantized", type="float", strategy="block"),
            "the size of their blocks",
        ),
    ],
)
def test_settings_that_are_not_read_are_refused(method: str, settings: dict[str, Any], what: str) -> None:
    assert what in refusal(lambda: check_settings(method, settings))


def test_dense_weights_without_rotations_may_say_so() -> None:
    plain = {"transform_config": {}, "sparsity_config": {"format": "dense", "global_sparsity": 0.1}}
    check_settings("compressed-tensors", ct_settings() | plain)
    check_settings("compressed-tensors", ct_settings() | {"transform_config": None, "sparsity_config": {}})


def damaged(value: Any, random: Random) -> Any:
    """A JSON value with some parts of it replaced by others, or left out."""
    if random.random() < 0.15:
        others = (None, True, 0, -1, 4, 2.5, 1e400, "", "x\ny", [], [1], [[]], {}, {"x": 1}, {"weights": 3})
        return random.choice(others)
    if isinstance(value, dict):
        return {key: damaged(part, random) for key, part in value.items() if random.random() > 0.05}
    return [damaged(part, random) for part in value] if isinstance(value, list) else value


def test_damaged_settings_are_read_or_refused_in_one_line() -> None:
    random, read, refusals = Random(0), 0, []
    blocks = {"type": "float", "strategy": "block", "block_structure": [64, 32]}
    sound: list[dict[str, Any]] = [
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "dynamic": {}},
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True},
        ct_settings() | {"transform_config": {}, "sparsity_config": {"format": "dense"}},
        ct_settings(8, "float-quantized", **blocks),
        {"quant_method": "fp8", "weight_block_size": [64, 32]},
        {"quant_method": "auto-round", "bits": 4, "group_size": 32, "packing_format": "auto_round:auto_gptq"},
        {"group_size": 64, "bits": 4, "model.embed_tokens": {"group_size": 64, "bits": 8}},
    ]
    for number in range(4000):
        settings = damaged(sound[number % len(sound)], random)
        config = SimpleNamespace(quantization_config=settings, model_type="llama")
        try:
            found = resolve_quantized("folder", config)
            read += found is not None and found.is_kept is not None
        except (ConfigError, ModelError, UnsupportedModelError) as error:
            refusals.append(str(error))
    assert read > 400
    assert len(refusals) > 400
    assert not [refusal for refusal in refusals if "\n" in refusal]


def saved(
    folder: Path, layers: Callable[[str, int, int], Layer], write: Any, settings: dict[str, Any]
) -> Any:
    """A tiny model in `folder`, quantised; returns the Transformers model with the same numbers."""
    torch.manual_seed(0)
    config = LlamaConfig(**sizes(64, 2, 4, 2, inner=128, vocab=96, context=64))
    model: Any = LlamaForCausalLM(config)
    for parameter in model.parameters():
        parameter.data = parameter.data.half().float()
    model.save_pretrained(folder, state_dict={k: v.half() for k, v in model.state_dict().items()})
    made = {}
    for name, module in model.named_modules():
        if name.rsplit(".", 1)[-1] in LINEARS:
            layer = layers(name, *module.weight.shape)
            made[name] = write(layer)
            module.weight.data = layer.weight
    quantise_folder(folder, made, settings)
    return model.eval()


def random_layer(**more: Any) -> Callable[[str, int, int], Layer]:
    return lambda name, outputs, inputs: Layer.random(
        outputs, inputs, 32, 4, seed=crc32(name.encode()), **more
    )


IDS = [number * 3 % 96 for number in range(20)]
logits = partial(eager_logits, token_ids=IDS)
packed_logits = partial(cached_logits, token_ids=IDS)
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": False}
FOLDERS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "gptq": (random_layer(), gptq, GPTQ),
    "awq": (random_layer(), awq, {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}),
    "compressed-tensors": (random_layer(), compressed, ct_settings()),
    "AutoRound as GPTQ": (random_layer(), gptq, AUTO_ROUND | {"packing_format": "auto_round:auto_gptq"}),
    "AutoRound's own": (
        random_layer(),
        partial(gptq, less_one=False),
        AUTO_ROUND | {"packing_format": "auto_round:exllamav2"},
    ),
    "AutoRound as AWQ": (random_layer(), awq, AUTO_ROUND | {"packing_format": "auto_round:auto_awq"}),
}


@pytest.mark.parametrize("method", FOLDERS)
def test_a_folder_has_the_logits_of_its_numbers(method: str, tmp_path: Path) -> None:
    expected = logits(saved(tmp_path, *FOLDERS[method]))
    torch.testing.assert_close(
        logits(load_model(str(tmp_path), dtype="float32", pack=False).model), expected, rtol=1e-5, atol=1e-5
    )
    kept = load_model(str(tmp_path), cpu_kernels="torch")
    assert kept.stored_bits == {4}
    assert kept.weight_type.endswith("4 bits")
    torch.testing.assert_close(logits(kept.model), expected, rtol=1e-5, atol=1e-5)


BITS = (2, 3, 4, 8)


def of_mixed_bits(name: str, outputs: int, inputs: int) -> Layer:
    """A layer of other bits and groups than its neighbours."""
    seed = crc32(name.encode())
    return Layer.random(outputs, inputs, 32 << seed % 2, BITS[seed // 16 % 4], seed=seed)


@pytest.mark.parametrize(
    "settings", [GPTQ | {"dynamic": {"-:lm_head": {}}}, AUTO_ROUND | {"extra_config": {".*": {"bits": 3}}}]
)
def test_layers_of_other_bits_are_read_by_their_shapes(settings: dict[str, Any], tmp_path: Path) -> None:
    model = saved(tmp_path, of_mixed_bits, gptq, settings)
    read = read_quantised(str(tmp_path), None, settings["quant_method"], settings)
    assert {matrix.bits for matrix in read.matrices.values()} == set(BITS)
    for name, matrix in read.matrices.items():
        assert torch.equal(matrix.widened(0, matrix.out_features), model.get_submodule(name).weight.data)
    if settings["quant_method"] == "auto-round":
        of_awq = settings | {"packing_format": "auto_round:auto_awq"}
        saved(tmp_path / "awq", small(64), awq, of_awq)
        wider = read_quantised(str(tmp_path / "awq"), None, "auto-round", of_awq)
        assert {matrix.group_size for matrix in wider.matrices.values()} == {64}


def of_bytes(name: str, outputs: int, inputs: int) -> Layer:
    """A layer of 8 bits with a scale an output."""
    return Layer.random(outputs, inputs, inputs, 8, seed=crc32(name.encode()), middle=True)


def random_order(name: str) -> Callable[[str, int, int], Layer]:
    """Layers in act-order, the ones that read the same rows in the same one; `name` has one of its own."""

    def layer(of: str, outputs: int, inputs: int) -> Layer:
        made = Layer.random(outputs, inputs, 32, 4, seed=crc32(of.encode()))
        generator = torch.Generator().manual_seed(inputs + (of.rsplit(".", 1)[-1] == name))
        made.group_of = made.group_of[torch.randperm(inputs, generator=generator)]
        return made

    return layer


@needs_kernels
def test_scales_in_32_bits_are_held_rounded_once_to_11(tmp_path: Path) -> None:
    def layer(name: str, outputs: int, inputs: int) -> Layer:
        made = random_layer()(name, outputs, inputs)
        generator = torch.Generator().manual_seed(outputs)
        made.scales = made.scales.float() * (1 + torch.rand(made.scales.shape, generator=generator) / 1000)
        return made

    model = saved(tmp_path, layer, gptq, GPTQ)
    expected = logits(model)
    lm = load_model(str(tmp_path))
    assert isinstance(lm.executor, CpuKernels)
    weight = model.model.layers[1].mlp.down_proj.weight.data
    held = lm.executor.linears[-2].unpack(torch.arange(len(weight)))
    assert not torch.equal(held, weight)
    assert bool(((held - weight).abs() <= weight.abs() * 2**-11).all())
    assert relative_error(packed_logits(lm), expected) < 0.03
    wide = load_model(str(tmp_path), dtype="float32", pack=False)
    torch.testing.assert_close(logits(wide.model), expected, rtol=1e-5, atol=1e-5)


SWAPPED = {
    "nothing": {},
    "gate and up": {"gate": Llama.up, "up": Llama.gate},
    "norms": {"attention_norm": Llama.mlp_norm, "mlp_norm": Llama.attention_norm},
    "keys and values": {"key": Llama.value, "value": Llama.key},
}


@needs_kernels
@pytest.mark.parametrize("swapped", SWAPPED)
def test_a_family_that_is_described_wrongly_is_refused(
    swapped: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where layers add little to large embeddings, so that errors are some tenths and no more."""
    saved(tmp_path, *FOLDERS["gptq"])
    file, generator = tmp_path / "model.safetensors", torch.Generator().manual_seed(1)
    state = load_file(file)
    for name, weight in state.items():
        if name == "model.embed_tokens.weight":
            state[name] = weight * 100
        if name.endswith("layernorm.weight"):
            state[name] = (0.6 * torch.rand(weight.shape, generator=generator) + 0.7).half()
    save_file(state, file)
    for part, name in SWAPPED[swapped].items():
        monkeypatch.setattr(Llama, part, name)
    if swapped == "nothing":
        assert load_model(str(tmp_path)).kernels == "decoder"
        return
    with pytest.raises(UnsupportedModelError, match="is not what the fused decoder computes"):
        load_model(str(tmp_path))


@needs_kernels
@pytest.mark.parametrize("method", [*FOLDERS, "3 bits", "act-order", "orders", "w8a8"])
def test_a_folder_stays_packed(method: str, tmp_path: Path) -> None:
    layers, write, settings = FOLDERS.get(method, FOLDERS["gptq"])
    if method in ("act-order", "orders"):
        layers = random_order("k_proj" if method == "orders" else "")
        settings = settings | {"desc_act": True}
    if method == "3 bits":
        layers = lambda name, *shape: Layer.random(*shape, 32, 3, seed=crc32(name.encode()))  # noqa: E731
        settings = settings | {"bits": 3}
    if method == "w8a8":
        layers = of_bytes
        write = lambda layer: compressed(layer, packed=False)  # noqa: E731
        settings = ct_settings(8, "int-quantized", strategy="channel", group_size=None)
    expected = logits(saved(tmp_path, layers, write, settings))
    lm = load_model(str(tmp_path))
    # Layers whose inputs are in different orders cannot be stacked.
    assert lm.kernels == ("native" if method == "orders" else "decoder")
    assert relative_error(packed_logits(lm), expected) < 0.03
    assert outline_model(str(tmp_path)).held.total_bytes == lm.weight_bytes
    assert outline_model(str(tmp_path)).kernels == lm.kernels
    assert outline_model(str(tmp_path)).weight_type == lm.weight_type


def test_a_layer_without_its_index_refuses_the_folder(tmp_path: Path) -> None:
    layers, _, settings = FOLDERS["gptq"]
    saved(
        tmp_path,
        layers,
        lambda layer: {k: v for k, v in gptq(layer).items() if k != "g_idx"},
        settings | {"desc_act": True},
    )
    assert "lacks its index g_idx" in refusal(lambda: load_model(str(tmp_path)))


def small(group: int, fewer: int = 0) -> Callable[[str, int, int], Layer]:
    """Layers in groups of another size, or with fewer outputs than they should have."""
    return lambda name, out, into: Layer.random(out - fewer, into, group, 4, seed=crc32(name.encode()))


def test_what_cannot_be_kept_is_named_with_the_flag_that_widens_it(tmp_path: Path) -> None:
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 8}
    expected = logits(saved(tmp_path / "a", small(8), gptq, settings))
    for refuse in (load_model, outline_model):
        what = refusal(lambda read=refuse: read(str(tmp_path / "a")))
        assert "down_proj: groups of 8 inputs cannot be kept as they are; --dtype float32 widens them" in what
    wide = load_model(str(tmp_path / "a"), dtype="float32", pack=False)
    torch.testing.assert_close(logits(wide.model), expected, rtol=1e-5, atol=1e-5)
    layers, write, settings = FOLDERS["awq"]
    saved(tmp_path / "b", layers, write, settings)
    what = refusal(lambda: load_model(str(tmp_path / "b"), device="meta"))
    assert "holds AWQ, 4 bits weights, which are kept as they are on a CPU, and on a GPU for models" in what
    state = load_file(tmp_path / "b" / "model.safetensors")
    odd = {
        name.replace("up_proj", "extra"): tensor.clone()
        for name, tensor in state.items()
        if name.startswith("model.layers.0.mlp.up_proj")
    }
    save_file(state | odd, tmp_path / "b" / "model.safetensors")
    assert "model.layers.0.mlp.extra is no plain layer of a llama model" in refusal(
        lambda: load_model(str(tmp_path / "b"))
    )


def test_layers_of_another_shape_are_refused(tmp_path: Path) -> None:
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    saved(tmp_path, small(32, 8), gptq, settings)
    assert "down_proj is 56 x 128, and the configuration says 64 x 128" in refusal(
        lambda: load_model(str(tmp_path))
    )


def test_biases_of_nothing_and_the_generation_configuration(tmp_path: Path) -> None:
    layers, write, settings = FOLDERS["gptq"]
    saved(tmp_path, layers, write, settings)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 5], "temperature": 0.6}')
    file = tmp_path / "model.safetensors"
    name, state = "model.layers.0.mlp.up_proj.bias", load_file(file)
    save_file(state | {name: torch.zeros(128)}, file)
    assert load_model(str(tmp_path)).model.generation_config.eos_token_id == [3, 5]
    save_file(state | {name: torch.ones(128)}, file)
    assert f"has unknown weights: {name}" in refusal(lambda: load_model(str(tmp_path)))


def test_a_prediction_layer_is_left_in_the_file(tmp_path: Path) -> None:
    layers, write, settings = FOLDERS["gptq"]
    saved(tmp_path, layers, write, settings)
    file = tmp_path / "model.safetensors"
    stem, state = "model.layers.0.mlp.up_proj.", load_file(file)
    own = {
        f"mtp.{name.removeprefix(stem)}": part.clone()
        for name, part in state.items()
        if name.startswith(stem)
    }
    save_file(state | own, file)
    assert "mtp is no plain layer of a llama model" in refusal(lambda: load_model(str(tmp_path)))
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_nextn_predict_layers": 1}))
    unused = load_model(str(tmp_path)).unused_tensors
    assert list(unused) == ["mtp.weight"]
    quantised = json.loads(config.read_text())["quantization_config"]
    numbers = read_quantised(str(tmp_path), None, "gptq", quantised).widened(torch.float32)
    assert torch.equal(unused["mtp.weight"], numbers[f"{stem}weight"])


def test_damaged_folders_are_refused(tmp_path: Path) -> None:
    layers, write, settings = FOLDERS["compressed-tensors"]
    saved(tmp_path, layers, write, settings)
    file, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    whole, plain = file.read_bytes(), load_file(file)

    def of(change: dict[str, Any]) -> str:
        config.write_text(json.dumps(json.loads(config.read_text()) | change))
        return refusal(lambda: load_model(str(tmp_path)))

    file.write_bytes(whole[: len(whole) // 2])
    assert "cannot read 'model.safetensors'" in of({})
    file.write_bytes(whole)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": "model-00002.safetensors"}}))
    assert "model-00002.safetensors" in of({})
    for odd in (5, None, ["x"], "", "..", "../model.safetensors", "/model.safetensors", "a/b.safetensors"):
        index.write_text(json.dumps({"weight_map": {"a": "model.safetensors", "b": odd}}))
        what = of({})
        assert "model.safetensors.index.json" in what
        assert f"its weight_map names {odd!r}, which is no file next to it" in what
    index.write_text("[]")
    assert "model.safetensors.index.json" in of({})
    index.unlink()
    save_file({name: tensor for name, tensor in plain.items() if "weight_packed" not in name}, file)
    assert "lacks weight_packed" in of({})
    save_file(
        {name: tensor for name, tensor in plain.items() if "layers.1.self_attn.o_proj" not in name}, file
    )
    assert "lacks weights: model.layers.1.self_attn.o_proj.weight" in of({})
    file.write_bytes(whole)
    assert "says that its weights are GPTQ, and has none such" in of({"quantization_config": GPTQ})
    assert "needs " in of({"quantization_config": ct_settings(group_size=64)})
    assert "groups of 48 do not divide its" in of({"quantization_config": ct_settings(group_size=48)})
    assert "lacks its index weight_g_idx" in of({"quantization_config": ct_settings(actorder="group")})
    assert "and the configuration says" in of({"quantization_config": settings, "hidden_size": 32})
    settings = {"quant_method": "compressed-tensors", "config_groups": {"g": 5}}
    of({"quantization_config": settings})
    for read in (load_model, outline_model):
        assert "a damaged group 'g'" in refusal(lambda read=read: read(str(tmp_path)))


def test_a_plan_says_in_one_line_what_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("a fault\nof two lines")

    saved(tmp_path, *FOLDERS["gptq"])
    monkeypatch.setattr(unloaded, "read_weights", fail)
    assert "cannot read the weights of" in refusal(lambda: outline_model(str(tmp_path)))
