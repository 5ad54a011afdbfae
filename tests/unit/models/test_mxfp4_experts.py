"""GPT-OSS in MXFP4: its experts stay packed, and are the numbers that Transformers makes of them."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from slipstream import LLM, SamplingParams
from slipstream.assets import EMBEDDED_TARGET
from slipstream.errors import ModelError
from slipstream.models import load_model
from slipstream.models.linear.code_tables import FP4
from slipstream.models.outline import outline_model
from tests.kit.gguf_files import write_model
from tests.kit.logits import cached_logits, eager_logits, relative_error
from tests.kit.marks import needs_kernels
from tests.kit.small_llama import sizes
from tests.unit.models.test_gguf_models import FAMILIES, tiny
from tests.unit.models.test_quantised_experts import expert_weights

IDS = [number * 3 % 96 for number in range(40)]
logits = partial(eager_logits, token_ids=IDS)
packed_logits = partial(cached_logits, token_ids=IDS)
CONFIG = sizes(64, 3, 4, 2, inner=96, vocab=96, context=128, bos=None, eos=None, pad=None) | {
    **{"head_dim": 16, "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 8},
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}


def saved(folder: Path, **changes: Any) -> Any:
    """A tiny model in `folder` with random experts in MXFP4, and the model with the numbers that these are."""
    generator = torch.Generator().manual_seed(5)
    model = GptOssForCausalLM(GptOssConfig(**CONFIG | changes)).bfloat16()
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    model.save_pretrained(folder)
    state = dict(model.state_dict())
    packed = dict(state)
    for name, weight in state.items():
        if weight.ndim == 3:
            number, inputs, outputs = weight.shape
            shape = (number, outputs, inputs // 32)
            blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
            scales = torch.randint(118, 124, shape, generator=generator, dtype=torch.uint8)
            packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            del packed[name]
            state[name] = convert_moe_packed_tensors(blocks, scales)
    save_file(
        {name: tensor.clone() for name, tensor in packed.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    model.load_state_dict(state)
    return model.float().eval()


@needs_kernels
@pytest.mark.parametrize("width", [64, 160])
def test_experts_are_packed_as_they_are(width: int, tmp_path: Path) -> None:
    model = saved(tmp_path, hidden_size=width, intermediate_size=224 - width)
    lm = load_model(str(tmp_path), kv_cache_dtype="float32")
    assert (lm.kernels, lm.weight_type, lm.weight_format.name) == ("decoder", "MXFP4", "bfloat16")
    assert lm.stored_bits == {4}
    assert lm.rounds_rows
    assert relative_error(packed_logits(lm), logits(model)) < 0.01
    wide = load_model(str(tmp_path), dtype="float32")
    assert torch.equal(expert_weights(lm), expert_weights(wide)), "the numbers are the file's"
    linear = lm.executor.experts[0].down[0]
    assert linear.struct.table
    assert linear.least_bytes < 4.6 / 8 * linear.num_weights + 8 * width, (
        "its bias and an output's factor too"
    )
    planned = outline_model(str(tmp_path))
    assert planned.held.total_bytes == lm.weight_bytes
    assert planned.num_parameters == lm.num_parameters == sum(each.numel() for each in model.parameters())
    assert (planned.kernels, planned.weight_type) == (lm.kernels, lm.weight_type)


@needs_kernels
def test_float32_gives_the_text_and_log_probabilities_of_transformers(tmp_path: Path) -> None:
    model = saved(tmp_path)
    lm = load_model(str(tmp_path), dtype="float32")
    torch.testing.assert_close(packed_logits(lm), logits(model), rtol=1e-4, atol=1e-4)
    plain = load_model(str(tmp_path), dtype="float32", pack=False)
    found, wanted = plain.model.state_dict(), model.state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], each) for name, each in wanted.items())
    spec = {"method": "ngram", "num_speculative_tokens": 3}
    params = SamplingParams(temperature=0, max_tokens=24, logprobs=0, ignore_eos=True)
    expected = list(IDS)
    for _ in range(24):
        expected.append(int(eager_logits(model, expected)[-1].argmax()))
    theirs = eager_logits(model, expected)[len(IDS) - 1 : -1].log_softmax(-1)
    for options in ({}, {"speculative_config": spec}):
        llm = LLM(str(tmp_path), tokenizer=EMBEDDED_TARGET, dtype="float32", **options)
        answer = llm.generate([{"prompt_token_ids": IDS}], params)[0].outputs[0]
        assert list(answer.token_ids) == expected[len(IDS) :]
        ours = [each[token].logprob for each, token in zip(answer.logprobs, answer.token_ids, strict=True)]
        of_them = theirs.gather(1, torch.tensor(expected[len(IDS) :])[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(ours), of_them, rtol=0, atol=1e-4)


@needs_kernels
@pytest.mark.parametrize(
    ("options", "bound"), [({"quantization": "int8"}, 0.06), ({"dtype": "bfloat16"}, 0.01)]
)
def test_experts_are_rounded_or_widened_by_option(
    options: dict[str, Any], bound: float, tmp_path: Path
) -> None:
    model = saved(tmp_path)
    lm = load_model(str(tmp_path), **options)
    planned = outline_model(str(tmp_path), **options)
    assert (lm.kernels, lm.stored_bits, lm.weight_type) == (
        "decoder",
        frozenset(),
        next(iter(options.values())),
    )
    assert relative_error(packed_logits(lm), logits(model)) < bound
    assert planned.held.total_bytes == lm.weight_bytes


def test_folders_whose_experts_are_damaged_are_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    file = tmp_path / "model.safetensors"
    whole = load_file(file)
    name = "model.layers.1.mlp.experts.gate_up_proj"

    def of(changes: dict[str, Tensor | None]) -> str:
        found = {**whole, **changes}
        save_file({key: tensor for key, tensor in found.items() if tensor is not None}, file)
        with pytest.raises(ModelError) as caught:
            load_model(str(tmp_path))
        assert "\n" not in str(caught.value)
        return str(caught.value)

    blocks, scales = whole[f"{name}_blocks"], whole[f"{name}_scales"]
    assert "gate_up_proj_scales is missing next to" in of({f"{name}_scales": None})
    assert "gate_up_proj_scales is 5 x 191 x 2, and its layer needs 5 x 192 x 2" in of(
        {f"{name}_scales": scales[:, 1:].clone()}
    )
    assert "gate_up_proj_scales holds float32 numbers" in of({f"{name}_scales": scales.float()})
    assert "gate_up_proj_blocks has 3 dimensions, and must have 4" in of(
        {f"{name}_blocks": blocks.flatten(2)}
    )
    fewer = {f"{name}_blocks": blocks[:4].clone(), f"{name}_scales": scales[:4].clone()}
    assert "mlp.experts lacks a part of gate_up_proj of expert 4" in of(fewer)
    plain = {key: None for key in whole if key.endswith(("_blocks", "_scales"))}
    assert "says that its weights are MXFP4, and has none such" in of(plain)
    save_file(whole, file)
    with pytest.raises(ModelError, match="which only our own kernels on a CPU hold as they are"):
        load_model(str(tmp_path), cpu_kernels="torch")


@needs_kernels
def test_a_gguf_file_has_its_experts_in_mxfp4_too(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="the extra `export` is not installed")
    model_type, changes, keys = FAMILIES["gpt-oss"]
    model = tiny(model_type, changes)
    kinds = {
        f"blk.{layer}.ffn_{part}_exps.weight": "MXFP4"
        for layer in range(3)
        for part in ("gate", "up", "down")
    }
    with torch.no_grad():
        file = write_model(tmp_path / "x.gguf", "gpt-oss", model, keys, {"": "Q8_0", **kinds})
    lm = load_model(str(file))
    assert lm.weight_type == "Q8_0, MXFP4"
    assert lm.stored_bits == {4, 8}
    assert relative_error(packed_logits(lm), logits(model)) < 0.03
    wide = load_model(str(file), dtype="float32")
    assert torch.equal(expert_weights(lm), expert_weights(wide))
    torch.testing.assert_close(packed_logits(wide), logits(model), rtol=1e-4, atol=1e-4)
    assert outline_model(str(file)).held.total_bytes == lm.weight_bytes


def test_the_table_is_that_of_transformers() -> None:
    codes = torch.arange(16, dtype=torch.uint8).view(1, 1, 1, 16)  # the upper halves of the bytes are 0
    theirs = convert_moe_packed_tensors(codes, torch.full((1, 1, 1), 127, dtype=torch.uint8))
    assert theirs.flatten()[::2].tolist() == [number / 2 for number in FP4]
