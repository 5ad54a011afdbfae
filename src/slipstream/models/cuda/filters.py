"""Min-p, top-k and top-p in operators that a recorded pass can hold: all sizes are fixed, and nothing is read back.

They keep what `sampling.processors.LogitsProcessor` keeps. There a nucleus is measured in float32 probabilities, and
tokens of equal probability are kept together. Here it is measured in integers, and tokens of equal scores are: sums of
integers do not depend on the order of additions, so a row's tokens depend neither on how many rows a pass has nor on
the row's place. The two differ for a token whose mass is within about 1e-7 of `top_p`.

A row is looked at through its `NUM_NUCLEUS_CANDIDATES` largest scores. Where they do not suffice the row is *short*.
That depends on its logits and parameters alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.sampling.processors import NUM_NUCLEUS_CANDIDATES

ROWS = 32
"""Rows that are filtered at once, so that the work in between takes little memory."""
ROW_BYTES = 26
"""A token takes of it meanwhile."""
ONE = 2.0**40
"""The weight of the most probable token; the weights of 2**22 tokens add up without overflow."""


NO_FILTERS = (0, 1.0, -math.inf)
"""top-k, top-p and the logarithm of min-p where nothing is left out."""


def filters_of(top_k: int, top_p: float, min_p: float) -> tuple[int, float, float]:
    """Filters of `SamplingParams` as a row has them: top-k, top-p and the logarithm of min-p."""
    return max(top_k, 0), top_p, math.log(min_p) if min_p > 0 else -math.inf


def filter_numbers(filters: Sequence[tuple[int, float, float]]) -> NDArray[np.int64]:
    """[3, rows]: top-k, and the bits of top-p and of the logarithm of min-p as float64."""
    top_k, *fractions = zip(*filters, strict=True)
    rows = [np.array(values, np.float64).view(np.int64) for values in fractions]
    return np.stack([np.array(top_k, np.int64), *rows])


def limits(numbers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """top_k, top_p and log_min_p of `filtered`, from the numbers of `filter_numbers`."""
    top_k, *fractions = numbers
    top_p, log_min_p = (part.view(torch.float64) for part in fractions)
    return top_k, top_p, log_min_p


def filtered(
    logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, log_min_p: Tensor
) -> tuple[Tensor, Tensor]:
    """logits [rows, vocab] with -inf where a token is left out, and bool [rows]: which rows are short.

    temperatures float32 [rows], 0 for greedy rows, which have no filters. top_k int64, top_p and log_min_p float64
    [rows]: 0, 1 and -inf where a row has no such filter.
    """
    temperatures = temperatures.masked_fill(temperatures == 0, 1.0)
    left, shorts = logits.clone(), []
    parts = zip(
        *(torch.split(part[:, None], ROWS) for part in (temperatures, top_k, top_p, log_min_p.float())),
        strict=True,
    )
    for rows, (own, *limits) in zip(torch.split(left, ROWS), parts, strict=True):
        scores = rows.float() / own
        cut, short = _cuts(scores, *limits)
        rows.masked_fill_(scores < cut, -math.inf)
        shorts.append(short)
    return left, torch.cat(shorts)


def _cuts(scores: Tensor, top_k: Tensor, top_p: Tensor, log_min_p: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest score that is kept, [rows, 1]; NaN, which is above no score, where a row has a NaN."""
    vocab_size = scores.shape[1]
    ranked = scores.topk(min(NUM_NUCLEUS_CANDIDATES, vocab_size)).values  # [R, C], descending
    num_ranked, peak = ranked.shape[1], ranked[:, :1]
    cut = peak + log_min_p
    ranked = _above(cut, ranked)
    has_top_k = (top_k > 0) & (top_k < vocab_size)
    last = ranked.gather(1, top_k.clamp(1, num_ranked) - 1)
    short = has_top_k & (top_k > num_ranked) & (ranked[:, -1:] > -math.inf)
    cut = torch.maximum(cut, last.masked_fill(~has_top_k, -math.inf))
    ranked = _above(cut, ranked)
    needed = top_p * _weights(_above(cut, scores), peak).sum(1, keepdim=True)
    weights = _weights(ranked, peak)
    mass = weights.cumsum(1)
    num_kept = (mass - weights < needed).sum(1, keepdim=True).clamp(min=1)
    has_top_p = top_p < 1
    short = short | (has_top_p & (mass[:, -1:] < needed))
    cut = torch.maximum(cut, ranked.gather(1, num_kept - 1).masked_fill(~has_top_p, -math.inf))
    return cut, short[:, 0]


def _above(cut: Tensor, scores: Tensor) -> Tensor:
    return scores.masked_fill(scores < cut, -math.inf)


def _weights(scores: Tensor, peak: Tensor) -> Tensor:
    """Probabilities over that of the most probable token, as integers."""
    ratios = (scores.double() - peak).exp_()
    return ratios.nan_to_num_(0.0).mul_(ONE).round_().long()
