"""The kernels' decoder: a row's logits are the same bits in any batch, and its weights are held once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPTNeoXConfig,
    GptOssConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    Qwen3MoeConfig,
    Starcoder2Config,
)

from slipstream.assets import EMBEDDED_TARGET
from slipstream.core.proposal import Proposal
from slipstream.kv.pool import KVPool
from slipstream.models import CausalLM, RowGroup, load_model
from slipstream.models.batch import ForwardBatch
from slipstream.models.cpu.part_times import PassPart
from slipstream.models.executor.cpu_kernels import CpuKernels
from slipstream.models.loading import adapt
from slipstream.models.rows import tree_rows
from tests.kit.small_llama import sizes

LENGTH = 300
TEXT = [(17 * i * i + 5 * i + 3) % 96 for i in range(LENGTH)]

COSTLY = (("int4", "int8"),)
"""Weights and a cache of the embedded target whose kernels the small models run as well."""


@pytest.fixture(
    scope="module",
    params=[
        *(("embedded", "float16", "float16"), ("embedded", "int8", "bfloat16")),
        *(pytest.param(("embedded", *kinds), marks=pytest.mark.long) for kinds in COSTLY),
        *(("odd", "float32", "float16"), ("odd", "bfloat16", "float32"), ("odd", "int8", "float32")),
        *(("odd", "int4_g64", "float32"), ("window", "int4_g128", "int8")),
        *(("window", "float32", "float32"), ("window", "bfloat16", "bfloat16"), ("window", "int8", "int8")),
        *(("gemma2", "bfloat16", "int8"), ("gemma3", "int4", "float16"), ("gpt-neox", "int8", "bfloat16")),
        *(("olmo2", "int8", "int8"), ("phi3", "int4_g64", "float32"), ("starcoder2", "float16", "float16")),
        *(("mixtral", "float32", "float32"), ("qwen3-moe", "bfloat16", "float16")),
        *(("mixtral", "int8", "bfloat16"), ("qwen3-moe", "int4", "float32")),
        *(("gpt-oss", "float32", "float16"), ("gpt-oss", "int4_g64", "int8")),
    ],
    ids=lambda case: f"{case[0]}, {case[1]} weights, {case[2]} cache",
)
def lm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    """The embedded target and small models of awkward shapes, over every kind of weight and of cache."""
    name, quantization, cache = request.param
    path = EMBEDDED_TARGET if name == "embedded" else str(_awkward(name, tmp_path_factory.mktemp("odd")))
    loaded = load_model(path, quantization=quantization, cpu_kernels="native", kv_cache_dtype=cache)
    assert isinstance(loaded.executor, CpuKernels)
    assert loaded.cache_dtype == getattr(torch, cache)
    return loaded


def _awkward(name: str, folder: Path) -> Path:
    """Grouped heads of 24, widths that fill no panel; with a window, one shorter than the text."""
    torch.manual_seed(0)
    shape = sizes(72, 2, 6, 2, vocab=97, inner=101, head_dim=24, spread=0.2)
    no_heads = {key: value for key, value in shape.items() if key != "num_key_value_heads"}
    gemma = {"sliding_window": 37, "layer_types": ["sliding_attention", "full_attention"]}
    config = {
        "odd": lambda: LlamaConfig(**shape, attention_bias=True),
        "window": lambda: MistralConfig(**shape, sliding_window=37),
        "gemma2": lambda: Gemma2Config(**shape, **gemma, attn_logit_softcapping=2.0),
        "gemma3": lambda: Gemma3TextConfig(**shape, **gemma, final_logit_softcapping=9.0),
        "gpt-neox": lambda: GPTNeoXConfig(**no_heads, rotary_pct=0.5),
        "olmo2": lambda: Olmo2Config(**shape),
        "phi3": lambda: Phi3Config(**shape, partial_rotary_factor=0.5, pad_token_id=0, sliding_window=37),
        "starcoder2": lambda: Starcoder2Config(**shape),
        "mixtral": lambda: MixtralConfig(
            **{**shape, "intermediate_size": 100},
            num_local_experts=5,
            num_experts_per_tok=2,
            sliding_window=37,
        ),
        "gpt-oss": lambda: GptOssConfig(
            **{**shape, "intermediate_size": 40}, **gemma, num_local_experts=6, num_experts_per_tok=4
        ),
        "qwen3-moe": lambda: Qwen3MoeConfig(
            **shape, moe_intermediate_size=40, num_experts=12, num_experts_per_tok=3, norm_topk_prob=False
        ),
    }[name]()
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    return folder


def make_pool(lm: CausalLM, num_slots: int = 2 * LENGTH) -> KVPool:
    """Every entry that was not written is NaN, so that reading one shows."""
    pool = KVPool(lm.shapes, num_slots, lm.dtype, lm.device, cache_dtype=lm.cache_dtype)
    pool.fill(float("nan"))
    return pool


def chain(start: int, begin: int, end: int) -> RowGroup:
    return RowGroup(range(start, 2 * LENGTH), begin, TEXT[begin:end], range(end - begin))


@pytest.fixture(scope="module")
def alone(lm: CausalLM) -> Tensor:
    """[LENGTH, vocab]: the logits of every row, each computed in a pass of its own."""
    pool = make_pool(lm)
    return torch.cat([lm.forward([chain(0, i, i + 1)], pool).logits for i in range(LENGTH)])


@pytest.mark.parametrize("sizes", [[LENGTH], [1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 69], [7] * 42 + [6]])
def test_chunks_have_the_bits_of_single_rows(lm: CausalLM, alone: Tensor, sizes: list[int]) -> None:
    pool, begin, logits = make_pool(lm), 0, []
    for size in sizes:
        logits.append(lm.forward([chain(0, begin, begin + size)], pool).logits)
        begin += size
    assert torch.equal(torch.cat(logits), alone)


def test_neighbours_do_not_change_a_row(lm: CausalLM, alone: Tensor) -> None:
    pool = make_pool(lm)
    lm.forward([chain(0, 0, 200)], pool)
    lm.forward([chain(LENGTH, 0, 50)], pool)
    both = lm.forward([chain(LENGTH, 50, 57), chain(0, 200, 203)], pool).logits
    assert torch.equal(both, torch.cat([alone[50:57], alone[200:203]]))


def test_a_node_of_a_tree_has_the_bits_of_its_path(lm: CausalLM, alone: Tensor) -> None:
    """Three wrong siblings stand between the right nodes; entries of an earlier level are stored already."""
    begin, depth = 150, 60  # deeper than the window
    pool = make_pool(lm)
    lm.forward([chain(0, 0, begin)], pool)
    nodes: list[tuple[int, int]] = []  # (token, depth)
    for level in range(depth):
        nodes += [((TEXT[begin + level] + wrong) % 96, level) for wrong in (1, 0, 2, 3)]
    right = [4 * level + 1 for level in range(depth)]
    seen = [[*right[:level], node] for node, (_, level) in enumerate(nodes)]
    positions = [begin + level for _, level in nodes]
    half = len(nodes) // 2
    passes = [
        RowGroup(
            pool.slots, begin, [t for t, _ in nodes[:half]], range(half), positions[:half], (), seen[:half]
        ),
        RowGroup(
            pool.slots,
            begin,
            [t for t, _ in nodes[half:]],
            range(half),
            positions[half:],
            positions[:half],
            seen[half:],
        ),
    ]
    logits = torch.cat([lm.forward([rows], pool).logits for rows in passes])
    assert torch.equal(logits[right], alone[begin : begin + depth])


def test_a_tree_below_a_chunk_has_the_bits_of_its_path(lm: CausalLM, alone: Tensor) -> None:
    begin, end = 40, 170  # the chunk is longer than the window
    pool = make_pool(lm)
    lm.forward([chain(0, 0, begin)], pool)
    wrong = [(token + 1) % 96 for token in TEXT]
    tree = Proposal((wrong[end], TEXT[end], wrong[end + 1], TEXT[end + 1]), (-1, -1, 0, 1))
    logits = lm.forward([tree_rows(pool.slots, begin, TEXT[begin:end], tree, 0)], pool).logits
    assert torch.equal(logits[: end - begin], alone[begin:end])
    assert torch.equal(logits[[end - begin + 1, end - begin + 3]], alone[end : end + 2])


def test_a_tree_below_a_long_chunk_costs_what_its_nodes_do() -> None:
    """Committed rows are a run: only nodes name the entries that they see."""
    tree = Proposal((1, 2, 3), (-1, -1, 0))

    def num_numbers(num_tokens: int) -> int:
        return len(ForwardBatch([tree_rows(range(2000), 0, [5] * num_tokens, tree, num_tokens - 1)]).buffer)

    each = (num_numbers(400) - num_numbers(200)) / 200
    assert each == (num_numbers(1900) - num_numbers(1700)) / 200 <= 8
    assert tree_rows(range(2000), 0, [5] * 1900, tree, 0).tail_seen == [[0], [1], [0, 2]]


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_number_of_threads_changes_no_bit(
    lm: CausalLM, alone: Tensor, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lm.executor, "num_threads", threads)
    assert torch.equal(lm.forward([chain(0, 0, LENGTH)], make_pool(lm)).logits, alone)


def test_timing_the_parts_of_a_pass_changes_no_bit(lm: CausalLM, alone: Tensor) -> None:
    assert isinstance(lm.executor, CpuKernels)
    pool = make_pool(lm)
    for begin, end in ((0, 1), (1, 60)):
        with lm.executor.timing_parts() as times:
            logits = lm.forward([chain(0, begin, end)], pool).logits
        assert torch.equal(logits, alone[begin:end])
        seconds = times.mean_s()
        assert (seconds >= 0).all()
        assert (seconds[:-1, [PassPart.QKV, PassPart.ATTENTION, PassPart.OUTPUT], 0] > 0).all()
        assert seconds[-1, PassPart.HEAD, 0] > 0


def test_only_the_wanted_rows_have_logits(lm: CausalLM, alone: Tensor) -> None:
    pool = make_pool(lm)
    groups = [
        RowGroup(pool.slots, 0, TEXT[:9], [8, 2]),
        RowGroup(pool.slots[LENGTH:], 0, TEXT[:4], []),
        RowGroup(pool.slots[400:], 0, TEXT[:3], [1]),
    ]
    assert torch.equal(lm.forward(groups, pool).logits, alone[[8, 2, 1]])


@pytest.mark.parametrize(("quantization", "each"), [(None, 2), ("float32", 4), ("int8", 1 + 2 / 32)])
def test_weights_are_held_once(quantization: str | None, each: float) -> None:
    lm = load_model(EMBEDDED_TARGET, quantization=quantization, cpu_kernels="native")
    assert all(parameter.is_meta for parameter in lm.model.parameters())
    assert each * lm.num_parameters <= lm.weight_bytes < each * lm.num_parameters * 1.05


def test_a_row_that_is_no_number_shows_and_harms_no_other(lm: CausalLM) -> None:
    pool = make_pool(lm)
    expected = lm.forward([chain(0, 0, 4)], pool).logits
    for tensor in pool.value_scales or pool.values:
        tensor[:, LENGTH] = float("nan")
    sick = RowGroup(pool.slots[LENGTH:], 1, TEXT[:1], [0])
    both = lm.forward([chain(0, 0, 4), sick], pool).logits
    assert torch.equal(both[:4], expected)
    assert both[4].isnan().all()


def test_two_threads_may_share_a_model() -> None:
    lm = load_model(EMBEDDED_TARGET, cpu_kernels="native")
    pools = [make_pool(lm), make_pool(lm)]
    expected = lm.forward([chain(0, 0, 64)], pools[0]).logits
    with ThreadPoolExecutor(2) as threads:
        passes = [threads.submit(lm.forward, [chain(0, 0, 64)], pools[i % 2]) for i in range(20)]
        assert all(torch.equal(done.result().logits, expected) for done in passes)


def test_layers_that_are_not_plain_are_left_to_transformers(tmp_path: Path) -> None:
    class Adapted(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    shape = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    config = LlamaConfig(**shape, num_attention_heads=2)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="slipstream").eval()
    up = model.model.layers[0].mlp.up_proj
    model.model.layers[0].mlp.up_proj = Adapted(up.in_features, up.out_features, bias=False)
    assert not isinstance(adapt(model).executor, CpuKernels)


def test_weights_that_layers_share_are_packed_for_each() -> None:
    """The pages of a packed weight are given back: not before all that read it have been packed."""
    shape = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
    config = LlamaConfig(**shape, num_attention_heads=2, initializer_range=0.2)

    def model(shares: bool) -> LlamaForCausalLM:
        torch.manual_seed(0)
        made = AutoModelForCausalLM.from_config(config, attn_implementation="slipstream").eval()
        first = made.model.layers[0]
        for layer in made.model.layers[1:]:
            for ours, theirs in ((layer.mlp, first.mlp), (layer.self_attn, first.self_attn)):
                for name, linear in theirs.named_children():
                    if isinstance(linear, nn.Linear):
                        own = getattr(ours, name)
                        own.weight = linear.weight if shares else nn.Parameter(linear.weight.detach().clone())
        return made

    shared, apart = (adapt(model(shares), canary=False) for shares in (True, False))
    assert isinstance(shared.executor, CpuKernels)
    logits = [lm.forward([chain(0, 0, 20)], make_pool(lm)).logits for lm in (shared, apart)]
    assert torch.equal(*logits)
