"""The noise is what it says it is: uniform, Gumbel, independent. Fixed seeds, so that these tests never flicker.

A threshold of 1e-4 on the p-value is one false alarm in 10,000 for a seed chosen blindly.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from slipstream.sampling.noise import Noise, Stream, derive_seed, gumbel

ALPHA = 1e-4


def uniforms(keys: list[int], vocab_size: int) -> np.ndarray:
    """The uniforms behind the Gumbel noise."""
    return torch.exp(-torch.exp(-gumbel(keys, vocab_size))).numpy()


@pytest.mark.parametrize("seed", [0, 1, 12345, 2**63 - 1])
def test_uniform_along_the_vocabulary(seed: int) -> None:
    sample = uniforms([Noise(seed, 0).key(9)], 100_000)[0]
    assert stats.kstest(sample, "uniform").pvalue > ALPHA
    assert stats.chisquare(np.histogram(sample, bins=256, range=(0, 1))[0]).pvalue > ALPHA


@pytest.mark.parametrize("token", [0, 1, 999])
def test_uniform_along_positions_and_seeds(token: int) -> None:
    along_positions = uniforms([Noise(3, 0).key(position) for position in range(4000)], 1000)[:, token]
    along_seeds = uniforms([Noise(seed, 0).key(3) for seed in range(4000)], 1000)[:, token]
    for sample in (along_positions, along_seeds):
        assert stats.kstest(sample, "uniform").pvalue > ALPHA


def test_the_transform_is_gumbel() -> None:
    sample = gumbel([Noise(5, 0).key(position) for position in range(20)], 5000).numpy().ravel()
    assert stats.kstest(sample, "gumbel_r").pvalue > ALPHA


def test_independent_across_positions_seeds_and_streams() -> None:
    noise, size = Noise(11, 0), 20_000
    keys = {
        "base": noise.key(5),
        "next position": noise.key(6),
        "next seed": Noise(12, 0).key(5),
        "derived seed": Noise(derive_seed(11, 1), 0).key(5),
        "draft": noise.key(5, Stream.DRAFT),
        "next token": noise.key(5, Stream.NEXT_TOKEN),
        "draft of the next node": noise.key(5, Stream.DRAFT, 1),
        "draft of the next step": Noise(11, 1).key(5, Stream.DRAFT),
    }
    rows = uniforms(list(keys.values()), size)
    for (name, row), (other, column) in (
        (a, b)
        for i, a in enumerate(zip(keys, rows, strict=True))
        for b in list(zip(keys, rows, strict=True))[:i]
    ):
        cells = np.histogram2d(row, column, bins=16, range=((0, 1), (0, 1)))[0].ravel()
        assert stats.chisquare(cells).pvalue > ALPHA, (name, other)
    for lag in (1, 2, 64):
        cells = np.histogram2d(rows[0][:-lag], rows[0][lag:], bins=16, range=((0, 1), (0, 1)))[0].ravel()
        assert stats.chisquare(cells).pvalue > ALPHA, lag


@pytest.mark.parametrize("seed", [1, 2])
def test_choices_follow_the_distribution(seed: int) -> None:
    probs = torch.tensor([0.5, 0.25, 0.15, 0.07, 0.03], dtype=torch.float64)
    size = 8000
    noise = Noise(seed, 0)
    chosen = noise.choose(probs.log().expand(size, -1), range(size))
    drawn = [noise.draw(probs.log(), position, Stream.NEXT_TOKEN) for position in range(size)]
    for sample in (chosen.numpy(), np.array(drawn)):
        assert stats.chisquare(np.bincount(sample, minlength=5), probs.numpy() * size).pvalue > ALPHA


def test_draws_without_replacement_follow_the_sequential_law() -> None:
    probs = [0.6, 0.3, 0.1]
    row = torch.tensor(probs, dtype=torch.float64).log()
    size = 6000
    counts: dict[tuple[int, ...], int] = {}
    for position in range(size):
        drawn = tuple(Noise(4, position).draw_without_replacement(row, 2, position))
        counts[drawn] = counts.get(drawn, 0) + 1
    law = {(a, b): probs[a] * probs[b] / (1 - probs[a]) for a in range(3) for b in range(3) if a != b}
    observed = [counts.get(pair, 0) for pair in law]
    assert stats.chisquare(observed, [p * size for p in law.values()]).pvalue > ALPHA


@pytest.mark.parametrize("probability", [0.001, 0.3, 0.9])
def test_coins_are_fair(probability: float) -> None:
    size = 20_000
    heads = sum(Noise(6, position).accepts(probability, position, position % 3) for position in range(size))
    assert stats.binomtest(heads, size, probability).pvalue > ALPHA


def test_a_shared_position_couples_two_distributions() -> None:
    """The point of sharing: two close distributions mostly choose the same token, independent ones would not."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(1, 50, generator=generator).double()
    target = logits.log_softmax(-1).expand(4000, -1)
    draft = (logits + 0.2 * torch.randn(1, 50, generator=generator)).log_softmax(-1).expand(4000, -1)
    noise = Noise(8, 0)
    agree = (noise.choose(target, range(4000)) == noise.choose(draft, range(4000))).double().mean().item()
    overlap = torch.minimum(target[0].exp(), draft[0].exp()).sum().item()
    assert agree > 0.8 * overlap
    assert agree <= overlap + 0.03
