"""Families whose cache holds latents: what it holds, that it is all that is read, and the same bits in any company."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import test_families as against
import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from test_families import TEXT, TOLERANCE, Decoder, Pair, error, make_cache, tree_logits
from tiny_models import LATENT, save_tiny
from torch import Tensor
from transformers import AutoModelForCausalLM

from slipstream import LLM, SamplingParams
from slipstream.errors import UnsupportedModelError
from slipstream.kv.pool import LayerShape, bytes_per_token
from slipstream.models import CausalLM, load_model
from slipstream.models.cpu.attention import room_bytes
from slipstream.models.cpu.native import unavailable
from slipstream.models.mixers.latent import LatentHeads, latent_projections
from slipstream.models.outline import outline_model
from slipstream.plan.passes import PassSizes
from tests.kit.quantised_folders import Layer, gptq, quantise_folder
from tests.kit.tokenizer_families import byte_level

PAGED = "slipstream.testing.paged:PagedBackend"
needs_kernels = pytest.mark.skipif(unavailable() is not None, reason="the CPU kernels cannot be used here")
DENSE = ["youtu", "minicpm3"]
"""Families of which our kernels compute all that sums over a row; the others have experts in Transformers' code."""


def heads_of(lm: CausalLM) -> list[LatentHeads]:
    return [part for part in lm.model.modules() if isinstance(part, LatentHeads)]


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("family", LATENT)
def test_each_family_against_transformers_over_latents(family: str, kernels: str, tmp_path: Path) -> None:
    folder = save_tiny(LATENT[family](), tmp_path / family)
    theirs = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    lm = load_model(str(folder), dtype="float32", cpu_kernels=kernels)
    rank = lm.config.kv_lora_rank
    assert set(lm.shapes) == {LayerShape(1, rank + 8, rank, values_in_keys=True)}
    assert {bool(heads.native_threads) for heads in heads_of(lm)} == {kernels == "native" and rank % 16 == 0}
    pair = Pair(lm, theirs.eval())
    against.test_weights_are_random_enough(pair)
    against.test_chunked_prefill(pair)
    against.test_draft_tree_and_commit(pair, [[-1, 0, 1], [2, 3], [4, 5, 6]])
    against.test_a_tree_beside_a_prompt_and_a_single_token(pair)
    against.test_greedy_text(pair)


def test_a_backend_that_does_not_say_that_it_reads_latents_gets_every_head(tmp_path: Path) -> None:
    folder = str(save_tiny(LATENT["deepseek-v3"](), tmp_path / "model"))
    paged, ours = (load_model(folder, attention_backend=name) for name in (PAGED, "auto"))
    assert set(paged.shapes) == {LayerShape(4, 20, 10)}
    assert error(Decoder(paged).forward(TEXT), Decoder(ours).forward(TEXT)) < TOLERANCE


@needs_kernels
@pytest.mark.parametrize("entries", ["float32", "bfloat16", "float16", "int8"])
@pytest.mark.parametrize("family", DENSE)
def test_the_same_bits_in_any_chunks_trees_and_company(family: str, entries: str, tmp_path: Path) -> None:
    folder = save_tiny(LATENT[family](), tmp_path / family)
    lm = load_model(str(folder), dtype="float32", cpu_kernels="native", kv_cache_dtype=entries)
    alone = Decoder(lm)
    lone = torch.cat([alone.feed([token]) for token in TEXT])
    for bounds in ([0, 26], [0, 1, 5, 6, 20, 26]):
        decoder = Decoder(lm)
        chunks = [TEXT[begin:end] for begin, end in pairwise(bounds)]
        assert torch.equal(torch.cat([decoder.feed(chunk) for chunk in chunks]), lone)
    cache = make_cache(lm)
    decoders = [Decoder(lm, cache, owner) for owner in range(3)]
    texts = [TEXT[::-1], TEXT, TEXT[3:9]]
    groups = [decoder.group(text) for decoder, text in zip(decoders, texts, strict=True)]
    assert torch.equal(lm.forward(groups, cache.pool).logits[26:52], lone)
    trees = []
    for passes in ([range(-1, 7)], [[-1, 0, 1], [2, 3], [4, 5, 6]]):
        decoder = Decoder(lm)
        decoder.feed(TEXT[:11])
        trees.append(tree_logits(decoder, passes, TEXT[11]))
    assert all(torch.equal(trees[0][node], trees[1][node]) for node in trees[0])
    assert torch.equal(trees[0][-1], lone[11])


@pytest.mark.parametrize("entries", ["bfloat16", "float16", "int8"])
@pytest.mark.parametrize("family", DENSE)
def test_narrow_entries_are_read_alike_by_kernels_and_operators(
    family: str, entries: str, tmp_path: Path
) -> None:
    folder = str(save_tiny(LATENT[family](), tmp_path / family))
    models = [
        load_model(folder, cpu_kernels=kernels, kv_cache_dtype=entries) for kernels in ("native", "torch")
    ]
    native, torch_ = (torch.cat([Decoder(lm).forward(TEXT)]) for lm in models)
    exact = Decoder(load_model(folder)).forward(TEXT)
    spread = float(exact.std())
    assert error(native, torch_) < 0.02 * spread
    assert 1e-4 * spread < error(native, exact) < 0.5 * spread


@pytest.mark.parametrize("entries", ["float32", "bfloat16", "int8"])
def test_the_pool_holds_what_is_counted(entries: str, tmp_path: Path) -> None:
    lm = load_model(str(save_tiny(LATENT["youtu"](), tmp_path / "model")), kv_cache_dtype=entries)
    pool = lm.new_cache(64).pool
    each = bytes_per_token(lm.shapes, lm.cache_dtype)
    assert each == 3 * {"float32": 160, "bfloat16": 80, "int8": 44}[entries]
    assert pool.memory_bytes() == pool.num_slots * each == sum(tensor.nbytes for tensor in pool.tensors)
    assert all(
        values.data_ptr() == keys.data_ptr() for keys, values in zip(pool.keys, pool.values, strict=True)
    )


TRUE_SHAPES = {
    "deepseek-v3": lambda: tf.DeepseekV3Config(),
    "glm-4.7-flash": lambda: tf.Glm4MoeLiteConfig(),
}


@pytest.mark.parametrize("entries", ["bfloat16", "int8"])
@pytest.mark.parametrize(("name", "least"), [("deepseek-v3", 70), ("glm-4.7-flash", 17)])
def test_bytes_a_token_at_true_shapes(name: str, least: float, entries: str, tmp_path: Path) -> None:
    config = TRUE_SHAPES[name]()
    config.num_hidden_layers = 2  # all layers are alike in what they keep
    if name == "glm-4.7-flash":
        config.mlp_layer_types = ["dense", "sparse"]
    config.save_pretrained(tmp_path)
    file = str(tmp_path / "config.json")
    ours = outline_model(file, kv_cache_dtype=entries)
    expanded = outline_model(file, kv_cache_dtype=entries, attention_backend=PAGED)
    assert ours.shapes[0] == LayerShape(1, 576, 512, values_in_keys=True)
    assert ours.kv_bytes_per_token == 2 * (580 if entries == "int8" else 1152)
    assert expanded.kv_bytes_per_token / ours.kv_bytes_per_token > least


def test_the_projection_that_attention_reads_is_not_packed(tmp_path: Path) -> None:
    folder = str(save_tiny(LATENT["youtu"](), tmp_path / "model", dtype=torch.bfloat16))
    plain, rounded = load_model(folder), load_model(folder, quantization="int8")
    for lm in (plain, rounded):
        for projection in latent_projections(lm.model):
            assert isinstance(projection, torch.nn.Linear)
            assert projection.weight.dtype == torch.bfloat16
    assert (plain.weight_type, rounded.weight_type) == ("bfloat16", "int8")


NAMES = (
    "q_a_proj",
    "q_b_proj",
    "kv_a_proj_with_mqa",
    "kv_b_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
)


def quantised(tmp_path: Path, adapter: bool = False) -> tuple[Path, dict[str, Layer]]:
    """A folder in GPTQ's layout, wide enough for its groups, and its layers."""
    config = LATENT["youtu"]()
    wide = {
        "hidden_size": 64,
        "q_lora_rank": 64,
        "kv_lora_rank": 64,
        "v_head_dim": 16,
        "intermediate_size": 128,
    }
    config.tie_word_embeddings = False
    for name, size in wide.items():
        setattr(config, name, size)
    folder = save_tiny(config, tmp_path / "model", dtype=torch.float16)
    state = load_file(folder / "model.safetensors")
    layers = {
        name.removesuffix(".weight"): Layer.rounded(weight.float(), 32, 4)
        for name, weight in state.items()
        if name.split(".")[-2] in NAMES
    }
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
    quantise_folder(folder, {name: gptq(layer) for name, layer in layers.items()}, settings)
    return folder, layers


def plain_copy(folder: Path, layers: dict[str, Layer], tmp_path: Path, added: dict[str, Tensor]) -> Any:
    """Transformers' model of the file's numbers, an adapter's changes added."""
    config = tf.AutoConfig.from_pretrained(folder)
    del config.quantization_config
    config.dtype = torch.float32
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    state = load_file(folder / "model.safetensors")
    plain = {name: tensor.float() for name, tensor in state.items() if name in model.state_dict()}
    for name, layer in layers.items():
        plain[f"{name}.weight"] = layer.weight + added.get(name, 0)
    model.load_state_dict(plain)
    return model


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_a_quantised_projection_is_read_by_its_files_numbers(kernels: str, tmp_path: Path) -> None:
    folder, layers = quantised(tmp_path)
    theirs = plain_copy(folder, layers, tmp_path, {})
    lm = load_model(str(folder), dtype="auto", cpu_kernels=kernels)
    assert all(projection.weight.dtype == torch.float32 for projection in latent_projections(lm.model))
    assert outline_model(str(folder), cpu_kernels=kernels).weight_bytes == lm.weight_bytes
    exact = load_model(str(folder), dtype="float32", cpu_kernels=kernels)
    assert error(Decoder(exact).forward(TEXT), Pair(exact, theirs).expected(TEXT)) < TOLERANCE
    for name, heads in zip(sorted(name for name in layers if "kv_b" in name), heads_of(lm), strict=True):
        assert torch.equal(heads.kv_b_proj.weight, layers[name].weight)


def write_adapter(folder: Path, layers: dict[str, Layer], targets: Sequence[str]) -> dict[str, Tensor]:
    """Changes of rank 2, as PEFT saves them; returns what each adds to its layer's weight."""
    generator = torch.Generator().manual_seed(3)
    tensors, added = {}, {}
    for name, layer in layers.items():
        if name.split(".")[-1] not in targets:
            continue
        down = torch.randn(2, layer.codes.shape[1], generator=generator) * 0.1
        up = torch.randn(layer.codes.shape[0], 2, generator=generator) * 0.1
        tensors |= {f"base_model.model.{name}.lora_{part}.weight": t for part, t in (("A", down), ("B", up))}
        added[name] = up @ down
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": list(targets), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return added


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_an_adapter_changes_the_projection(kernels: str, tmp_path: Path) -> None:
    folder, layers = quantised(tmp_path)
    added = write_adapter(tmp_path / "adapter", layers, ["kv_b_proj", "o_proj"])
    theirs = plain_copy(folder, layers, tmp_path, added)
    lm = load_model(str(folder), dtype="auto", cpu_kernels=kernels, lora=str(tmp_path / "adapter"))
    planned = outline_model(str(folder), cpu_kernels=kernels, lora=str(tmp_path / "adapter"))
    assert planned.weight_bytes == lm.weight_bytes
    for name, heads in zip(sorted(name for name in layers if "kv_b" in name), heads_of(lm), strict=True):
        assert error(heads.kv_b_proj.weight, layers[name].weight + added[name]) < 1e-6
    expected = Pair(lm, theirs).expected(TEXT)
    without = Pair(lm, plain_copy(folder, layers, tmp_path, {})).expected(TEXT)
    ours = Decoder(lm).forward(TEXT)
    assert error(ours, expected) < 0.5 * error(without, expected)


def save_with_tokenizer(family: str, folder: Path) -> str:
    config = LATENT[family]()
    config.vocab_size, config.max_position_embeddings = 320, 256
    config.pad_token_id = config.bos_token_id = None
    save_tiny(config, folder)
    byte_level(320).save_pretrained(folder)
    return str(folder)


SPECS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 4},
    "draft tree": {"method": "draft_model", "tree_top_k": 3, "num_draft_nodes": 8},
    "self": {"method": "self"},
    "layer_skip": {"method": "layer_skip", "skip_layers": [1]},
    "token_recycling": {"method": "token_recycling", "num_draft_nodes": 6},
}
PROMPTS = [[7, 19, 5] * 5, [*([7, 19, 5] * 5), 40, 2], list(range(3, 30)), [11, 12] * 9]


def texts(llm: LLM) -> list[list[int]]:
    params = [
        SamplingParams(temperature=0.0 if i % 2 else 0.8, seed=i, max_tokens=80, ignore_eos=True)
        for i in range(len(PROMPTS))
    ]
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, params)]


@needs_kernels
@pytest.mark.parametrize("entries", ["float32", "int8"])
@pytest.mark.parametrize("name", SPECS)
def test_texts_are_the_same_with_drafts_after_reuse_and_preemption(
    name: str, entries: str, tmp_path: Path
) -> None:
    folder = save_with_tokenizer("youtu", tmp_path / "model")
    spec = {**SPECS[name], **({"model": folder} if "draft" in name else {})}
    lone = LLM(folder, kv_cache_dtype=entries, max_num_seqs=1, enable_prefix_caching=False)
    expected = texts(lone)
    drafted = LLM(folder, kv_cache_dtype=entries, speculative_config=spec, max_num_batched_tokens=24)
    assert texts(drafted) == expected
    assert texts(drafted) == expected, "after reuse of its own prefixes"
    room = 330 * drafted.engine.memory_plan.kv_bytes_per_token
    tight = LLM(
        folder, kv_cache_dtype=entries, speculative_config=spec, kv_cache_bytes=room, max_model_len=120
    )
    assert texts(tight) == expected
    assert tight.engine.stats().num_preemptions > 0
    for llm in (drafted, tight):
        assert llm.engine.integrity() == []


def test_another_attention_than_the_hooks_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks at load compare with Transformers' own attention over every head."""
    folder = str(save_tiny(LATENT["deepseek-v3"](), tmp_path / "model"))
    absorb = LatentHeads.absorb
    monkeypatch.setattr(LatentHeads, "absorb", lambda self, query: absorb(self, query) * 1.05)
    with pytest.raises(UnsupportedModelError, match="logits differ from Transformers'"):
        load_model(folder, cpu_kernels="torch")


@needs_kernels
@pytest.mark.parametrize("threads", [1, 3])
def test_the_kernels_compute_with_as_much_as_is_planned(threads: int, tmp_path: Path) -> None:
    """In a thread of its own, whose room nobody has used."""
    lm = load_model(str(save_tiny(LATENT["youtu"](), tmp_path / "model")), kv_cache_dtype="float32")
    for heads in heads_of(lm):
        heads.native_threads = threads

    def computed() -> int:
        Decoder(lm).forward(TEXT)
        return room_bytes()

    with ThreadPoolExecutor(1) as lone:
        held = lone.submit(computed).result()
    planned = PassSizes.of(lm).score_bytes(len(TEXT), len(TEXT), threads)
    assert held == planned
