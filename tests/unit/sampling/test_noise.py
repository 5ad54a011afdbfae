"""Position-keyed noise as a function: same key, same bits, however it is asked for."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from slipstream.sampling import noise as noise_module
from slipstream.sampling.noise import (
    Noise,
    Stream,
    choose_rows,
    derive_seed,
    draw_seed,
    gumbel,
    perturb_rows,
)

VOCAB = 1003


def random_log_probs(rows: int, vocab: int = VOCAB, spread: float = 3.0, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, vocab, generator=generator) * spread).log_softmax(-1)


def splitmix64(state: int, number: int) -> int:
    """Output `number` (from 1) of the generator that starts at `state`, in plain integers."""
    z = (state + number * 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def test_splitmix64_is_the_published_one() -> None:
    assert splitmix64(1234567, 1) == 6457827717110365317  # the reference implementation's first output


@pytest.mark.parametrize("key", [0, 1, 2**63 - 1, 2**63, 2**64 - 1, 0x123456789ABCDEF])
def test_tensor_hash_equals_integer_arithmetic(key: int) -> None:
    row = gumbel([key], 64)[0]
    for token in range(64):
        uniform = ((splitmix64(key, token + 1) >> 11) | 1) / 2**53
        assert 0 < uniform < 1
        assert row[token].item() == pytest.approx(-math.log(-math.log(uniform)), rel=1e-12)


def test_uniforms_are_never_0_or_1() -> None:
    bits = noise_module.uniform_bits(torch.arange(-5000, 5000))
    assert bool((bits % 2 == 1).all())
    assert bool(((bits > 0) & (bits < 2**53)).all())
    extremes = torch.tensor([1, 2**53 - 1])
    assert noise_module.gumbel_of_bits(extremes).isfinite().all()


def test_rows_equal_lone_rows_bitwise() -> None:
    keys = [random.Random(1).getrandbits(64) for _ in range(65)]
    together = gumbel(keys, VOCAB)
    assert together.dtype == torch.float64
    for row, key in enumerate(keys):
        assert torch.equal(together[row], gumbel([key], VOCAB)[0])
    assert torch.equal(gumbel(keys, 7), together[:, :7])  # a draft with fewer tokens sees the same noise


@pytest.fixture(autouse=True, params=["dense", "pruned"])
def route(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small vocabularies take the dense route by themselves; the pruned one must say the same."""
    if request.param == "pruned":
        monkeypatch.setattr(noise_module, "SMALL_VOCABULARY", 0)


SIZES = {1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65}
"""Numbers of rows around those at which vectorised loops change; some others are left to the long tests."""
OTHERS = (6, 11, 20, 25, 37, 42, 54, 61)


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(rows, marks=[] if rows in SIZES else pytest.mark.long)
        for rows in (*sorted(SIZES), *OTHERS)
    ],
)
def test_choose_is_the_argmax_of_perturb(rows: int) -> None:
    noise = Noise(seed=rows, root_position=5)
    positions = [5 + row // 2 for row in range(rows)]
    for spread in (0.0, 3.0, 12.0):
        log_probs = random_log_probs(rows, spread=spread, seed=rows)
        log_probs[:, 7:9] = -math.inf
        expected = noise.perturb(log_probs, positions).argmax(-1)
        assert torch.equal(noise.choose(log_probs, positions), expected)
        lone = [int(noise.choose(log_probs[row : row + 1], [positions[row]])) for row in range(rows)]
        assert lone == expected.tolist()


@pytest.mark.parametrize("support", [1, 2, 50, 500])
def test_choose_on_a_filtered_row(support: int) -> None:
    log_probs = random_log_probs(8)
    log_probs = log_probs.masked_fill(log_probs < log_probs.topk(support).values[:, -1:], -math.inf)
    noise = Noise(3, 0)
    assert torch.equal(noise.choose(log_probs, range(8)), noise.perturb(log_probs, range(8)).argmax(-1))


def test_choose_all_equals_choose_one_by_one() -> None:
    steps = [
        (Noise(1, 4), random_log_probs(3, seed=1), [4, 5, 5]),
        (Noise(2, 9, greedy=True), random_log_probs(2, seed=2), [9, 10]),
        (Noise(3, 0), random_log_probs(1, seed=3), [0]),
    ]
    expected = [noise.choose(rows, positions).tolist() for noise, rows, positions in steps]
    assert Noise.choose_all(steps) == expected
    assert Noise.choose_all(steps[1:2]) == expected[1:2]


def test_greedy_takes_the_argmax_everywhere() -> None:
    noise = Noise(1, 0, greedy=True)
    log_probs = random_log_probs(4)
    assert noise.perturb(log_probs, range(4)) is log_probs
    assert torch.equal(noise.choose(log_probs, range(4)), log_probs.argmax(-1))
    assert noise.draw(log_probs[0], 0, Stream.NEXT_TOKEN) == int(log_probs[0].argmax())
    assert noise.draw_without_replacement(log_probs[0], 3, 0) == log_probs[0].topk(3).indices.tolist()


def test_mixed_rows_leave_the_greedy_ones_alone() -> None:
    log_probs = random_log_probs(3)
    perturbed = perturb_rows(log_probs, [11, None, 12])
    assert torch.equal(perturbed[1], log_probs[1].double())
    assert torch.equal(perturbed[[0, 2]], log_probs[[0, 2]] + gumbel([11, 12], VOCAB))


def test_rows_without_any_finite_entry_do_not_raise() -> None:
    hopeless = torch.full((1, 5), -math.inf)
    assert choose_rows(hopeless, [3]).tolist() == [0]
    assert choose_rows(hopeless[:0], []).shape == (0,)


def test_the_target_stream_knows_nothing_of_steps() -> None:
    early, late = Noise(7, root_position=3), Noise(7, root_position=6)
    assert early.key(6) == late.key(6)
    for stream in (Stream.ACCEPTANCE, Stream.NEXT_TOKEN, Stream.DRAFT):
        assert early.key(6, stream) != late.key(6, stream)


def test_keys_differ_in_every_coordinate() -> None:
    keys = [
        Noise(seed, root).key(position, stream, index)
        for seed in (0, 1, 2**63 - 1)
        for stream in (Stream.ACCEPTANCE, Stream.NEXT_TOKEN, Stream.DRAFT)
        for root in range(4)
        for position in range(root, root + 4)
        for index in range(4)
    ]
    assert len(set(keys)) == len(keys)
    assert len({Noise(seed, 0).key(position) for seed in range(50) for position in range(50)}) == 2500


def test_a_key_never_changes() -> None:
    """A seed that was reported with an answer must replay it in every later version."""
    assert Noise(42, 0).key(17) == 0xDEE3D6F2736F2D92
    assert Noise(42, 3).key(17, Stream.DRAFT, 2) == 0xFA05389EAA1078DA
    assert derive_seed(42, 1) == 8560785262482024
    assert choose_rows(torch.zeros(1, 1000), [Noise(42, 0).key(17)]).tolist() == [157]


def test_accepts_at_the_ends() -> None:
    noise = Noise(1, 0)
    assert not any(noise.accepts(0.0, position, 0) for position in range(200))
    assert all(noise.accepts(1.0, position, 0) for position in range(200))
    assert noise.accepts(0.5, 3, 1) == noise.accepts(0.5, 3, 1)
    coins = [noise.accepts(0.5, 3, candidate) for candidate in range(64)]
    assert 16 < sum(coins) < 48


def test_siblings_and_cousins_draw_for_themselves() -> None:
    row = torch.zeros(VOCAB)
    draws = {Noise(1, 0).draw(row, 5, Stream.DRAFT, index=index) for index in range(20)}
    assert len(draws) > 15
    other = [Noise(1, 0).draw_without_replacement(row, 5, 5, index=index) for index in range(4)]
    assert len({tuple(tokens) for tokens in other}) == 4


def test_draw_without_replacement_returns_only_what_is_possible() -> None:
    row = torch.tensor([0.0, -math.inf, -1.0, -math.inf])
    drawn = Noise(1, 0).draw_without_replacement(row, 4, 0)
    assert sorted(drawn) == [0, 2]
    assert Noise(1, 0).draw_without_replacement(row, 1, 0) == drawn[:1]
    assert Noise(1, 0).draw(row, 0, Stream.DRAFT) == drawn[0]


def test_unnormalised_rows_draw_the_same() -> None:
    row = random_log_probs(1)[0].double()
    for position in range(50):
        noise = Noise(9, position)
        assert noise.draw(row, position, Stream.NEXT_TOKEN) == noise.draw(
            row - 3, position, Stream.NEXT_TOKEN
        )


def test_derived_seeds() -> None:
    seeds = [derive_seed(2**63 - 1, index) for index in range(1000)]
    assert seeds[0] == 2**63 - 1
    assert all(0 <= seed < 2**53 for seed in seeds[1:])
    assert len(set(seeds)) == 1000
    assert derive_seed(1, 1) != derive_seed(2, 1)


def test_drawn_seeds() -> None:
    generator: Any = random.Random(3)
    seeds = [draw_seed(generator) for _ in range(100)]
    assert seeds[0] == draw_seed(random.Random(3))
    assert all(0 <= seed < 2**53 for seed in [*seeds, draw_seed()])
    assert draw_seed() != draw_seed()
