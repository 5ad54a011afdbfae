"""Checkpoints that read images and are quantised: the language model has the numbers of the file, by all its names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from test_fp8_folders import FP8, in_blocks
from torch import Tensor

from slipstream.errors import ModelError
from slipstream.models import load_model
from slipstream.models.outline import outline_model
from tests.kit.logits import cached_logits
from tests.kit.marks import needs_kernels
from tests.kit.quantised_folders import LINEARS, Layer, awq, compressed, gptq, quantise_folder
from tests.kit.small_llama import sizes

TEXT = [7, 3, 50, 21, 9, 33, 12, 4, 60, 2, 18, 41]
PREFIXES = ("language_model.model.", "model.language_model.")
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": False,
                "strategy": "group",
                "group_size": 32,
            },
        }
    },
    "ignore": ["re:.*vision_tower.*", "lm_head"],
}
SETTINGS: dict[str, dict[str, Any]] = {
    "awq": {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 32,
        "modules_to_not_convert": ["vision_tower", "multi_modal_projector"],
    },
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False},
    "compressed-tensors": COMPRESSED,
    "fp8": {**FP8, "modules_to_not_convert": ["vision_tower", "lm_head"]},
}
PACKING = {"awq": awq, "gptq": gptq, "compressed-tensors": compressed}


def saved(folder: Path, method: str, prefix: str, with_eyes: bool = False) -> tuple[Any, dict[str, Tensor]]:
    """Save a LLaVA whose projections are quantised; returns it with the file's numbers, and those by their names.

    With `with_eyes` the image encoder's projections are quantised too.
    """
    torch.manual_seed(1)
    shape = sizes(64, 2, 4, 2, vocab=64, inner=96, context=64, spread=0.2)
    eyes = {**sizes(64, 1, 2, inner=96), "image_size": 16, "patch_size": 8, "model_type": "clip_vision_model"}
    whole: Any = tf.LlavaForConditionalGeneration(
        tf.LlavaConfig(text_config={**shape, "model_type": "llama"}, vision_config=eyes)
    ).eval()
    for parameter in whole.parameters():
        parameter.data = parameter.data.half().float()
    whole.save_pretrained(folder)
    state, numbers = load_file(folder / "model.safetensors"), {}
    own = "language_model.model."
    state = {name.replace(own, prefix): tensor.half() for name, tensor in state.items()}
    if prefix.startswith("model."):
        state = {name.replace("language_model.lm_head", "lm_head"): tensor for name, tensor in state.items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    layers: dict[str, dict[str, Tensor]] = {}
    for number, (name, weight) in enumerate(state.items()):
        stem = name.removesuffix(".weight")
        if stem.rpartition(".")[2] not in LINEARS or (not with_eyes and not name.startswith(prefix)):
            continue
        if not name.endswith(".weight"):
            continue
        if method == "fp8":
            codes, scales, numbers[stem] = in_blocks(weight.float(), 64, 32)
            layers[stem] = {"weight": codes, "weight_scale_inv": scales}
        else:
            layer = Layer.random(*weight.shape, 32, 4, seed=number)
            layers[stem] = PACKING[method](layer)  # which rounds the scales of some
            numbers[stem] = layer.weight
    quantise_folder(folder, layers, SETTINGS[method])
    held = dict(whole.model.language_model.named_modules())
    with torch.no_grad():
        for stem, weight in numbers.items():
            if stem.startswith(prefix):
                held[stem.removeprefix(prefix)].weight.copy_(weight)
    return whole, numbers


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("method", SETTINGS)
def test_the_language_model_has_the_files_numbers(method: str, prefix: str, tmp_path: Path) -> None:
    whole, numbers = saved(tmp_path, method, prefix)
    lm = load_model(str(tmp_path), dtype="float32")
    with torch.inference_mode():
        expected = whole(input_ids=torch.tensor([TEXT])).logits[0]
    assert (cached_logits(lm, TEXT) - expected).abs().max() < 1e-4 * expected.std()
    wide = load_model(str(tmp_path), dtype="float32", pack=False).model.state_dict()
    for name, weight in numbers.items():
        assert torch.equal(wide[f"model.{name.removeprefix(prefix)}.weight"], weight), name


@needs_kernels
@pytest.mark.parametrize("method", ["awq", "gptq", "compressed-tensors"])
def test_codes_are_kept_and_an_encoders_left_in_the_file(method: str, tmp_path: Path) -> None:
    whole, _ = saved(tmp_path, method, PREFIXES[0], with_eyes=True)
    lm = load_model(str(tmp_path))
    assert lm.stored_bits == {4}
    assert lm.is_fused
    with torch.inference_mode():
        expected = whole(input_ids=torch.tensor([TEXT])).logits[0]
    assert (cached_logits(lm, TEXT) - expected).abs().max() < 0.2 * expected.std()  # rows are rounded
    assert outline_model(str(tmp_path)).held.total_bytes == lm.weight_bytes


def test_a_part_that_is_missing_is_named_as_the_file_names_it(tmp_path: Path) -> None:
    saved(tmp_path, "gptq", PREFIXES[1])
    state = load_file(tmp_path / "model.safetensors")
    del state["model.language_model.layers.1.mlp.up_proj.scales"]
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"model\.language_model\.layers\.1\.mlp\.up_proj lacks scales"):
        load_model(str(tmp_path))
