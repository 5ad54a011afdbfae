"""The CPU kernels that go a walk over states, against PyTorch: any sizes, trees, copies and several sequences.

That they give the same bits in every build, for any split of a text and any number of threads is `odd_shapes.cpp`'s.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from slipstream.kv.state import StatePass, StatePool, StateRoom, StateShape
from slipstream.kv.walk import OWN_STATE, Walk
from slipstream.models import RowGroup, load_model
from slipstream.models.cpu import native
from slipstream.models.mixers.native import NativeWalk
from slipstream.models.mixers.outer_products import OuterProducts
from tests.kit.marks import needs_kernels
from tests.parity.tiny_models import RECURRENT, save_tiny

pytestmark = needs_kernels


def random_walk(draw: random.Random) -> Walk:
    """Of up to three sequences: certain steps, an uncertain chain, a tree below it; some steps leave copies."""
    walk = Walk()
    count = draw.randint(1, 3)
    for slot in range(count):
        first = len(walk.inputs)
        certain, chain, nodes = draw.randint(0, 5), draw.randint(0, 3), draw.randint(0, 6)
        if not certain + chain + nodes:
            certain = 1
        given = [*range(first, first + certain + chain + nodes)]
        last = walk.chain(given[:certain], -1, OWN_STATE, OWN_STATE)
        last = walk.chain(given[certain : certain + chain], last, OWN_STATE, OWN_STATE + 1)
        paths: list[list[int]] = [[]]
        for node in range(nodes):
            paths.append([*draw.choice(paths), node])
        walk.tree(given[certain + chain :], paths, last, min(chain, 1))
        walk.end(slot)
    steps = range(len(walk.inputs))
    for place, step in enumerate(draw.sample(steps, draw.randint(0, min(3, len(steps))))):
        walk.copies[step] = count + place
    return walk


def random_pass(walk: Walk, shape: StateShape) -> tuple[StatePool, StatePass]:
    """The walk over random states."""
    pool = StatePool([shape], StateRoom(len(walk.slots), len(walk.copies), 1), torch.device("cpu"))
    for state in pool.states(0):
        state.normal_()
    return pool, StatePass(pool, walk, [], len(walk.inputs))


@pytest.mark.parametrize("has_beta", [True, False])
@pytest.mark.parametrize("decays", ["heads", "rows", "numbers", "rates"])
@pytest.mark.parametrize(
    ("heads", "key_heads", "key_dim", "value_dim"),
    [(1, 1, 1, 1), (3, 3, 8, 20), (4, 2, 24, 37), (6, 1, 16, 128), (2, 2, 128, 128)],
)
def test_outer_products_are_pytorchs(
    heads: int, key_heads: int, key_dim: int, value_dim: int, decays: str, has_beta: bool
) -> None:
    shape = StateShape(((heads, key_dim, value_dim),), 1)
    rows = key_dim if decays in ("rows", "numbers") else 1
    columns = value_dim if decays in ("numbers", "rates") else 1
    for seed in range(8):
        torch.manual_seed(seed)
        walk = random_walk(random.Random(seed))
        pool, states = random_pass(walk, shape)
        num_steps = len(walk.inputs)

        def numbers(*size: int, num_steps: int = num_steps) -> Tensor:
            return torch.randn(num_steps, *size)

        products = OuterProducts(
            query=numbers(key_heads, key_dim),
            key=torch.nn.functional.normalize(numbers(key_heads, key_dim), dim=-1),
            value=numbers(heads, value_dim),
            decay=numbers(heads, rows, columns).sigmoid(),
            beta=numbers(heads).sigmoid() if has_beta else None,
            rates=-torch.rand(heads, key_dim, value_dim) if decays == "rates" else None,
        )
        (state,) = pool.states(0)
        in_double, in_float = state.double(), state.clone()
        fields = {name: getattr(products, name) for name in OuterProducts.__dataclass_fields__}
        double = OuterProducts(
            **{name: each if each is None else each.double() for name, each in fields.items()}
        )
        expected = double.run(walk, in_double)
        assert torch.allclose(products.run(walk, in_float), expected.float(), atol=2e-5)
        made = NativeWalk(states, 1 + seed % 3).outer_products(products, state)
        assert torch.allclose(made, expected.float(), atol=2e-5)
        assert torch.allclose(state, in_double.float(), atol=2e-6)
        assert torch.allclose(in_float, in_double.float(), atol=2e-6)


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("channels", [1, 7, 16, 63, 64, 200])
@pytest.mark.parametrize("taps", [2, 4, 7])
def test_convolutions_are_pytorchs(taps: int, channels: int, has_bias: bool) -> None:
    shape = StateShape(((taps - 1, channels),), channels)
    for seed in range(6):
        torch.manual_seed(seed)
        walk = random_walk(random.Random(seed))
        pool, states = random_pass(walk, shape)
        inputs, weight = torch.randn(len(walk.inputs), channels), torch.randn(channels, taps)
        bias = torch.randn(channels) if has_bias else None
        (window,) = pool.states(0)
        expected_window = window.clone()
        expected = states.convolve(expected_window, inputs, weight, bias)
        made = NativeWalk(states, 1 + seed % 3).convolve(window, inputs, weight, bias)
        assert torch.allclose(made, expected, atol=2e-6)
        assert torch.equal(window, expected_window)


def test_where_there_is_no_memory_no_state_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """More buffers than any machine has room for."""
    walk = random_walk(random.Random(0))
    pool, states = random_pass(walk, StateShape(((2, 16, 32),), 1))
    monkeypatch.setattr(walk, "num_buffers", 2**31 - 1)
    products = OuterProducts(
        *(torch.randn(len(walk.inputs), 2, *size) for size in ((16,), (16,), (32,), (1, 1)))
    )
    (state,) = pool.states(0)
    before = state.clone()
    with pytest.raises(MemoryError, match="max_num_batched_tokens"):
        NativeWalk(states, 1).outer_products(products, state)
    assert torch.equal(state, before)
    assert native.unavailable() is None


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_the_kernels_go_the_walks_where_they_are_in_use(
    kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny(RECURRENT["qwen3.5"](), tmp_path)
    lm = load_model(str(tmp_path), cpu_kernels=kernels)
    seen: list[str] = []
    for kind, name in ((NativeWalk, "native"), (OuterProducts, "torch")):
        method = "outer_products" if kind is NativeWalk else "run"
        stock = getattr(kind, method)
        monkeypatch.setattr(
            kind, method, lambda *given, name=name, stock=stock: seen.append(name) or stock(*given)
        )
    cache = lm.new_cache(64)
    cache.accounting.open(3, [0] * 8)
    lm.forward(
        [RowGroup(cache.accounting.slots(3), 0, [*range(3, 8)], [4], num_certain=5, owner=3)], cache.pool
    )
    assert seen
    assert set(seen) == {kernels}


@pytest.mark.parametrize(
    "family", ["qwen3.5", "mamba", "mamba2", "lfm2", "minimax", "recurrent-gemma", "zamba"]
)
def test_a_models_rows_are_pytorchs(family: str, tmp_path: Path) -> None:
    """With the same linear layers: a chunk of a prompt, then a draft behind it."""
    save_tiny(RECURRENT[family](), tmp_path)
    logits = []
    for kernels in ("native", "torch"):
        lm = load_model(str(tmp_path), cpu_kernels=kernels)
        cache = lm.new_cache(64)
        cache.accounting.open(3, [0] * 20)
        slots = cache.accounting.slots(3)
        first = RowGroup(slots, 0, [*range(3, 12)], [0, 8], num_certain=9, owner=3)
        seen = [[0], [0, 1], [0, 2], [0, 2, 3]]
        tree = RowGroup(
            slots,
            9,
            [4, 5, 6, 7, 8],
            [0, 1, 2, 3, 4],
            positions=[9, 10, 11, 11, 12],
            tail_seen=seen,
            num_chain=1,
            num_certain=10,
            owner=3,
        )
        logits.append([lm.forward([rows], cache.pool).logits for rows in (first, tree)])
    for ours, theirs in zip(*logits, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-3)
