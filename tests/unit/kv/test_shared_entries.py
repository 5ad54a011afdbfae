"""Layers that read the keys and values of an earlier one: nothing is stored for them, and nothing is planned."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import transformers as tf

from slipstream import LLM, SamplingParams
from slipstream.config import SpeculativeConfig
from slipstream.draft.registry import create_drafter
from slipstream.errors import ConfigError
from slipstream.kv.pool import KVPool, LayerShape, bytes_per_token, runnable
from slipstream.models import RowGroup, load_model
from slipstream.models.outline import outline_model
from slipstream.testing.stub_drafters import draft_context
from tests.kit.assistants import TYPES, VOCAB, gemma4
from tests.kit.small_llama import sizes
from tests.kit.tokenizer_families import byte_level

SHAPES = [LayerShape(2, 8, 8), LayerShape(1, 16, 12), LayerShape(2, 8, 8, 0), LayerShape(2, 8, 8)]
"""The third layer reads the first one's entries."""
PROMPTS = [[(17 * i * i + 5 * i + 3) % VOCAB for i in range(length)] for length in (9, 40, 23)]


@pytest.fixture(scope="module")
def gemma3n(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder."""
    folder = tmp_path_factory.mktemp("gemma3n")
    shape = sizes(32, len(TYPES), 4, 2, inner=48, vocab=VOCAB, context=256, eos=None, bos=None, pad=None)
    config = tf.Gemma3nTextConfig(
        **shape,
        head_dim=8,
        sliding_window=5,
        layer_types=TYPES,
        num_kv_shared_layers=2,
        vocab_size_per_layer_input=VOCAB,
        hidden_size_per_layer_input=8,
        laurel_rank=4,
        activation_sparsity_pattern=[0.5, *[0.0] * 5],
        initializer_range=0.3,
    )
    torch.manual_seed(0)
    tf.Gemma3nForCausalLM(config).save_pretrained(folder)
    byte_level(VOCAB).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_a_reading_layer_has_the_other_ones_tensors(dtype: torch.dtype) -> None:
    pool = KVPool(SHAPES, 7, torch.float32, torch.device("cpu"), cache_dtype=dtype)
    apart = KVPool(
        [SHAPES[0], SHAPES[1], SHAPES[3]], 7, torch.float32, torch.device("cpu"), cache_dtype=dtype
    )
    assert pool.memory_bytes() == apart.memory_bytes() == 7 * bytes_per_token(SHAPES, dtype)
    assert pool.keys[2].data_ptr() == pool.keys[0].data_ptr() != pool.keys[3].data_ptr()
    entries = [torch.randn(2, 3, 8), torch.randn(2, 3, 8)]
    pool.write(0, slice(0, 3), *entries)
    found = pool.read(2, slice(0, 3))
    pool.write(2, slice(0, 3), torch.zeros(2, 3, 8), torch.zeros(2, 3, 8))
    for ours, kept, given in zip(pool.read(2, slice(0, 3)), found, entries, strict=True):
        assert torch.equal(ours, kept)
        assert torch.allclose(ours, given, atol=0.05)
    pool.move(0, 4, 3)
    assert torch.equal(pool.read(2, slice(4, 7))[0], found[0])


def test_layers_that_run_without_those_that_they_read_are_found() -> None:
    assert runnable(SHAPES, (0, 2, 3)) == (0, 2, 3)
    assert runnable(SHAPES, (1, 2, 3)) == (1, 3)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_what_a_model_shares_is_found_and_planned(kernels: str, gemma3n: str) -> None:
    for folder in (gemma4(2).folder, gemma3n):
        lm = load_model(folder, cpu_kernels=kernels)
        assert [shape.source for shape in lm.shapes] == [None] * 4 + [2, 3]
        assert lm.kv_bytes_per_token == bytes_per_token(lm.shapes[:4], lm.cache_dtype)
        assert outline_model(folder, cpu_kernels=kernels).kv_bytes_per_token == lm.kv_bytes_per_token
    lm = load_model(gemma4(0).folder, cpu_kernels=kernels)
    assert all(shape.source is None for shape in lm.shapes)


SPECS: list[dict[str, Any]] = [
    {"method": "ngram", "num_speculative_tokens": 3},
    {"method": "token_recycling"},
    {"method": "lookahead"},
]


@pytest.mark.parametrize(
    ("family", "kernels", "cache"),
    [
        *(("gemma3n", "auto", "int8"), ("gemma4", "torch", "float32")),
        *(("gemma4", "auto", "float32"), ("gemma4", "auto", "int8")),
    ],
)
def test_drafts_and_reused_prefixes_leave_the_text_alone(
    family: str, kernels: str, cache: str, gemma3n: str
) -> None:
    folder = gemma3n if family == "gemma3n" else gemma4(2).folder
    options: dict[str, Any] = {"cpu_kernels": kernels, "kv_cache_dtype": cache, "max_model_len": 128}

    def texts(llm: LLM) -> list[list[int]]:
        params = SamplingParams(temperature=0.5, seed=3, max_tokens=16, ignore_eos=True)
        return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, params)]

    plain = LLM(folder, max_num_seqs=1, enable_prefix_caching=False, **options)
    expected = texts(plain)
    for spec in SPECS if (family, kernels) == ("gemma4", "auto") else SPECS[:1]:
        llm = LLM(folder, speculative_config=spec, max_num_batched_tokens=31, **options)
        assert texts(llm) == expected, spec
        assert texts(llm) == expected, f"{spec}, after reuse of its own prefixes"


def test_a_layer_without_the_one_that_it_reads_is_refused() -> None:
    lm = load_model(gemma4(2).folder)
    pool = KVPool(lm.shapes, 4, lm.dtype, lm.device)
    if lm.kernels != "decoder":
        pytest.skip("layer by layer it runs whole only")
    with pytest.raises(
        ConfigError, match="layer 5 of this gemma4_text model reads the keys and values of layer 3"
    ):
        lm.forward([RowGroup(pool.slots, 0, [1, 2], [1])], pool, layers=[0, 1, 2, 5])
    context = dataclasses.replace(draft_context(VOCAB, 128), target=lm)
    with pytest.raises(ConfigError, match="run both, or leave out layer 5 too"):
        create_drafter(SpeculativeConfig("layer_skip", "coupled", {"skip_layers": [3]}), context)
