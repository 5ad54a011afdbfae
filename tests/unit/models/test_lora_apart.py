"""LoRA adapters of weights that stay quantised: what is added is PEFT's, and no row knows of the others."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM

from slipstream import LLM, SamplingParams
from slipstream.assets import EMBEDDED_DRAFT, EMBEDDED_TARGET
from slipstream.config import EngineConfig, SpeculativeConfig
from slipstream.errors import ModelError
from slipstream.models import load_model
from slipstream.models.cpu.kernel import common_kernel
from slipstream.models.cpu.native import unavailable
from slipstream.models.cpu.packed_weight import PackedWeight
from slipstream.models.executor.cpu_kernels import CpuKernels
from slipstream.models.linear.low_rank import LowRankChange
from slipstream.models.outline import outline_model
from slipstream.plan.planner import Planner
from slipstream.plan.process import ProcessMemory
from tests.kit.gguf_files import write_model
from tests.kit.logits import cached_logits, relative_error
from tests.kit.marks import needs_kernels
from tests.kit.quantised_folders import gptq_folder
from tests.kit.small_llama import sizes
from tests.unit.models.test_grouped import ROWS, Saved, saved

peft = pytest.importorskip("peft")
IDS = [number * 3 % 96 for number in range(20)]
logits = partial(cached_logits, token_ids=IDS)
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def change(num_out: int, num_in: int, rank: int, seed: int) -> LowRankChange:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((rank, num_in), (num_out, rank))
    return LowRankChange(*(torch.randn(shape, generator=generator) for shape in shapes))


def stack(sizes: list[int], ranks: list[int], bits: int) -> list[Saved]:
    layers = []
    for seed, (size, rank) in enumerate(zip(sizes, ranks, strict=True)):
        layer = saved(size, 96, bits, 32, True, seed)
        layer.change = change(size, 96, rank, seed) if rank else None
        layers.append(layer)
    return layers


@needs_kernels
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("sizes", "ranks", "interleaved"),
    [
        ([70], [1], False),
        ([40, 33, 70], [4, 0, 7], False),
        ([5, 3, 2, 90], [3, 1, 6, 0], False),
        ([70, 70], [4, 9], True),
        ([70, 70], [0, 5], True),
    ],
)
def test_stacks_add_the_change_of_each_layer(
    sizes: list[int], ranks: list[int], interleaved: bool, bits: int
) -> None:
    layers, plain = stack(sizes, ranks, bits), stack(sizes, [0] * len(sizes), bits)
    ours, without = (
        PackedWeight(each, [None] * len(each), common_kernel(each), interleaved) for each in (layers, plain)
    )
    rows = torch.randn(64, 96, generator=torch.Generator().manual_seed(1))
    added = [
        torch.zeros(64, layer.out_features) if layer.change is None else layer.change.of(rows)
        for layer in layers
    ]
    if interleaved:
        twins = [Saved(layer.weight) for layer in layers]
        for twin, values in zip(twins, added, strict=True):
            twin.bias = values[0]
        by_bias = PackedWeight(twins, [twin.bias for twin in twins], common_kernel(twins), True)
        expected = by_bias.multiply(rows[:1])
        torch.testing.assert_close(ours.multiply(rows[:1]), expected, rtol=1e-5, atol=1e-4)
    else:
        expected = without.multiply(rows) + torch.cat(added, dim=1)
        torch.testing.assert_close(ours.multiply(rows), expected, rtol=1e-5, atol=1e-4)
    whole = ours.multiply(rows)
    for count in ROWS:
        assert torch.equal(ours.multiply(rows[:count]), whole[:count])
        assert torch.equal(ours.multiply(rows[64 - count :]), whole[64 - count :])
    everything = torch.arange(ours.out_features)
    assert torch.equal(ours.unpack(everything), without.unpack(everything)), "an embedding reads the weight"


@needs_kernels
def test_a_change_reads_inputs_as_they_are() -> None:
    order = torch.randperm(96, generator=torch.Generator().manual_seed(1)).to(torch.int32)
    layer = Saved(saved(40, 96, 4, 32, True).weight, order)
    without = PackedWeight([layer], [None], common_kernel([layer]))
    layer.change = change(40, 96, 3, 1)
    rows = torch.randn(5, 96, generator=torch.Generator().manual_seed(2))
    ours = PackedWeight([layer], [None], common_kernel([layer])).multiply(rows)
    torch.testing.assert_close(ours, without.multiply(rows) + layer.change.of(rows), rtol=1e-5, atol=1e-4)


def tiny(tied: bool = False) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(**sizes(64, 2, 4, 2, inner=128, vocab=96, context=64, tied=tied))
    return LlamaForCausalLM(config)


def in_gptq(folder: Path, act_order: bool = False) -> Path:
    tiny().save_pretrained(folder / "plain")
    return gptq_folder(folder / "model", str(folder / "plain"), 32, act_order)


def in_gguf(folder: Path, tied: bool) -> Path:
    pytest.importorskip("gguf", reason="the extra `export` is not installed")
    return write_model(
        folder / "model.gguf",
        "llama",
        tiny(tied),
        {"rope.freq_base": 10000.0, "vocab_size": 96},
        {"": "Q8_0"},
    )


MODELS: dict[str, tuple[Callable[[Path], Path], list[str]]] = {
    "gptq": (in_gptq, ALL),
    "act-order": (lambda folder: in_gptq(folder, True), [*ALL[1:], "lm_head"]),
    "gguf": (lambda folder: in_gguf(folder, False), [*ALL[:3], "lm_head"]),
    "gguf, tied": (lambda folder: in_gguf(folder, True), [*ALL[3:], "lm_head"]),
}


def adapter(folder: Path, base: Any, whole: bool = False, **options: Any) -> str:
    torch.manual_seed(1)
    defaults: dict[str, Any] = {"r": 5, "lora_alpha": 11, "init_lora_weights": False}
    model: Any = peft.get_peft_model(base, peft.LoraConfig(**(defaults | options)))
    model.save_pretrained(folder / "adapter", save_embedding_layers=whole)
    return str(folder / "adapter")


def widened(path: Path) -> Any:
    """The Transformers model with the file's numbers."""
    model = load_model(str(path), dtype="float32", pack=False).model
    model.set_attn_implementation("eager")
    return model


def by_peft(path: Path, folder: str) -> Tensor:
    """The logits of PEFT over the file's numbers, without merging."""
    model = peft.PeftModel.from_pretrained(widened(path), folder).eval()
    with torch.inference_mode():
        found: Tensor = model(input_ids=torch.tensor([IDS]), use_cache=False).logits[0]
    return found


@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings", "ignore:Model has `tie_word_embeddings")
@pytest.mark.parametrize("kind", MODELS)
def test_an_adapter_is_kept_apart_from_quantised_weights(kind: str, tmp_path: Path) -> None:
    make, targets = MODELS[kind]
    path = make(tmp_path)
    folder = adapter(tmp_path, tiny(kind.endswith("tied")), target_modules=targets, use_rslora=True)
    expected = by_peft(path, folder)
    assert relative_error(logits(load_model(str(path))), expected) > 0.2, "the adapter changes much"
    in_torch = load_model(str(path), lora=folder, cpu_kernels="torch")
    assert in_torch.stored_bits
    torch.testing.assert_close(logits(in_torch), expected, rtol=1e-4, atol=1e-4)
    planned = outline_model(str(path), lora=folder, cpu_kernels="torch").held
    assert planned.total_bytes == in_torch.weight_bytes
    saved_numbers = load_file(f"{folder}/adapter_model.safetensors").items()
    apart = [part.numel() for name, part in saved_numbers if "gguf" in kind or "lm_head" not in name]
    assert planned.adapter_bytes == 4 * sum(apart), "the output layer of GPTQ is plain"
    torch.testing.assert_close(
        logits(load_model(str(path), lora=folder, dtype="float32", cpu_kernels="torch")),
        expected,
        rtol=1e-4,
        atol=1e-4,
    )
    if unavailable() is not None:
        return
    packed = load_model(str(path), lora=folder)
    assert isinstance(packed.executor, CpuKernels)
    held = outline_model(str(path), lora=folder).held
    assert held.total_bytes == packed.weight_bytes
    assert held.adapter_bytes == packed.weight_bytes - load_model(str(path)).weight_bytes
    whole = logits(packed)
    assert relative_error(whole, expected) < 0.05  # rows are rounded to 8 bits
    for parts in (20, 7, 2):
        assert torch.equal(logits(packed, parts=parts), whole), "a row's bits do not depend on its batch"


@needs_kernels
def test_layers_outside_the_fused_decoder_have_it_too(tmp_path: Path) -> None:
    """Families that run layer by layer multiply with the same packed layers."""
    path = in_gptq(tmp_path)
    folder = adapter(tmp_path, tiny(), target_modules=ALL)
    fused = logits(load_model(str(path), lora=folder))
    layered = load_model(str(path), lora=folder, attention_backend="packed")
    assert not isinstance(layered.executor, CpuKernels)
    assert relative_error(logits(layered), fused) < 0.05
    assert relative_error(logits(load_model(str(path), attention_backend="packed")), fused) > 0.2


@needs_kernels
def test_a_plan_counts_the_adapter_of_layers_in_one(tmp_path: Path) -> None:
    """Phi 3 has one layer of queries, keys and values and one of gate and up, whose parts share their ranks."""
    pytest.importorskip("gguf", reason="the extra `export` is not installed")
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": None}
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "max_position_embeddings": 64,
    }
    model = Phi3ForCausalLM(Phi3Config(vocab_size=96, **sizes, **heads))
    path = write_model(tmp_path / "model.gguf", "phi3", model, {"rope.dimension_count": 16}, {"": "Q8_0"})
    folder = adapter(tmp_path, model, target_modules=["qkv_proj", "gate_up_proj", "down_proj"])
    lm, held = load_model(str(path), lora=folder), outline_model(str(path), lora=folder).held
    assert isinstance(lm.executor, CpuKernels)
    assert held.adapter_bytes > 0
    assert held.total_bytes == lm.weight_bytes


@needs_kernels
@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings", "ignore:Model has `tie_word_embeddings")
def test_a_plan_counts_the_adapter_of_layers_that_run_one_by_one(
    tmp_path: Path,
) -> None:
    path = in_gguf(tmp_path, True)
    folder = adapter(tmp_path, tiny(True), target_modules=[*ALL, "lm_head"])
    held = outline_model(str(path), lora=folder, attention_backend="packed").held
    lm = load_model(str(path), lora=folder, attention_backend="packed")
    assert lm.kernels == "native"
    assert held.total_bytes == lm.weight_bytes


def test_a_plan_names_the_adapter_and_refuses_what_loading_refuses(tmp_path: Path) -> None:
    path = in_gptq(tmp_path)
    folder = adapter(tmp_path, tiny(), target_modules=ALL)
    config = EngineConfig(str(path), lora=folder)
    spec = SpeculativeConfig("draft_model", options={"model": str(path), "lora": folder})
    parts = {part.name: part.num_bytes for part in Planner(config, spec, ProcessMemory(0, 0)).at(1, 32).parts}
    assert parts["adapter"] == outline_model(str(path), lora=folder).held.adapter_bytes > 0
    (draft,) = (size for name, size in parts.items() if name.startswith("draft weights"))
    assert draft == outline_model(str(path), lora=folder).held.total_bytes
    merged = outline_model(str(tmp_path / "plain"), lora=folder).held
    assert merged == outline_model(str(tmp_path / "plain")).held, "nothing is held of what is merged"
    with pytest.raises(ModelError, match="is no LoRA adapter"):
        outline_model(str(path), lora=str(path))
    folder = adapter(tmp_path, tiny(), target_modules=ALL, use_dora=True)
    with pytest.raises(ModelError, match="of the kind DoRA"):
        outline_model(str(path), lora=folder)


@needs_kernels
@pytest.mark.long
def test_speculation_changes_no_text_of_adapted_pairs(tmp_path: Path) -> None:
    """Target and draft are quantised files with an adapter each."""
    models, adapters = {}, {}
    for role, source in (("target", EMBEDDED_TARGET), ("draft", EMBEDDED_DRAFT)):
        (tmp_path / role).mkdir()
        models[role] = str(gptq_folder(tmp_path / role / "model", source, 32, role == "draft"))
        plain = AutoModelForCausalLM.from_pretrained(source)
        adapters[role] = adapter(tmp_path / role, plain, target_modules=ALL, lora_alpha=6)
    spec = {
        "method": "draft_model",
        "model": models["draft"],
        "lora": adapters["draft"],
        "num_speculative_tokens": 3,
    }
    chats = [[{"role": "user", "content": f"Show me how to use `{name}`."}] for name in ("tar", "grep", "ls")]
    temperatures = {"temperature": 0}, {"temperature": 1, "seed": 7}, {"temperature": 0.7, "seed": 3}
    params = [SamplingParams(max_tokens=24, **each) for each in temperatures]

    def texts(**options: Any) -> tuple[list[Any], float]:
        outputs = LLM(models["target"], **options).chat(chats, params)
        rates = [output.metrics.acceptance_rate or 0.0 for output in outputs]
        return [output.outputs[0].token_ids for output in outputs], sum(rates) / len(rates)

    alone, _ = texts(lora=adapters["target"])
    drafted, rate = texts(lora=adapters["target"], speculative_config=spec)
    assert drafted == alone
    assert rate > 0.1
    assert texts()[0] != alone


@pytest.mark.filterwarnings(
    "ignore:.*tie_word_embeddings", "ignore:.lora_bias=True", "ignore:Adapter .default"
)
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"target_modules": ["q_proj"], "use_dora": True}, "of the kind DoRA"),
        ({"target_modules": ["q_proj"], "init_lora_weights": "pissa"}, "begins with pissa"),
        ({"target_modules": ["o_proj"], "lora_bias": True}, "changes .*o_proj by more than a product"),
        ({"target_modules": ["embed_tokens"]}, "changes model.embed_tokens by more than a product"),
        (
            {"target_modules": ["q_proj"], "trainable_token_indices": [3]},
            "changes model.embed_tokens by more",
        ),
        ({"target_modules": ["embed_tokens"], "whole": True}, "holds whole weights for model.embed_tokens"),
        ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, "holds whole weights for lm_head"),
    ],
    ids=str,
)
def test_other_changes_of_quantised_weights_are_refused(
    options: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    path = in_gguf(tmp_path, False)
    folder = adapter(tmp_path, tiny(), **options)
    for take in (load_model, outline_model):
        with pytest.raises(ModelError, match=rf"{reason}.*; --dtype float32 widens them") as caught:
            take(str(path), lora=folder)
        assert "\n" not in str(caught.value)
