"""Rounds the weight of a linear layer so that its outputs on given inputs change least (GPTQ, arXiv 2210.17323).

Inputs are rounded one after another. What one rounds away is made good, as far as their correlation allows, by those
that are still to come. Without correlations this is rounding to nearest.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from slipstream.errors import ModelError

DAMPING = 0.01
"""Share of the correlations' mean diagonal that is added to each: rarely seen inputs keep their weights."""
_SHARES = (1.0, 0.94, 0.88, 0.82, 0.76)
"""Shares of a group's least and largest number that are tried as its range; what is outside is cut."""
BLOCK = 128
"""Inputs whose corrections of the ones behind them are collected for one product of matrices."""


@dataclass(frozen=True, slots=True)
class RoundedWeight:
    """A weight [out, in] as `scales * (codes - zeros)`, group by group of inputs."""

    codes: Tensor
    """uint8 [out, in], below 2 to the power of `bits`."""
    scales: Tensor
    """[out, groups], of the type that they are stored in."""
    zeros: Tensor
    """uint8 [out, groups]: a code too."""
    bits: int
    group: int

    def dequantised(self) -> Tensor:
        """float32 [out, in]"""
        scales, zeros = (
            part.float().repeat_interleave(self.group, 1)[:, : self.codes.shape[1]]
            for part in (self.scales, self.zeros)
        )
        return scales * (self.codes.float() - zeros)


def rounded(
    weight: Tensor,
    correlations: Tensor | None,
    bits: int,
    group: int,
    scale_type: torch.dtype,
    symmetric: bool = False,
) -> RoundedWeight:
    """Round `weight` [out, in] to `bits`, in groups of so many inputs.

    `correlations` [in, in] is the mean over calibration's rows of the inputs' outer products; None rounds each weight
    to the nearest. With `symmetric` every zero is the middle code. Raises `ModelError` for numbers that are not finite.
    """
    left = weight.float().clone()
    if not bool(torch.isfinite(left).all()):
        raise ModelError("it has weights that are not finite")
    num_out, num_in = left.shape
    factor = None if correlations is None else _factor(correlations)
    codes = torch.empty(num_out, num_in, dtype=torch.uint8)
    scales, zeros = [], []
    for begin in range(0, num_in, group):
        end = min(begin + group, num_in)
        scale, zero = _range_of(left[:, begin:end], bits, scale_type, symmetric)
        scales.append(scale)
        zeros.append(zero)
        for first in range(begin, end, BLOCK):
            last = min(first + BLOCK, end)
            part, errors = left[:, first:last], torch.empty(num_out, last - first)
            for column in range(last - first):
                code = _nearest(part[:, column], scale.float(), zero, bits)
                codes[:, first + column] = code
                error = part[:, column] - scale.float() * (code - zero)
                if factor is not None:
                    row = factor[first + column, first:last]
                    errors[:, column] = error / row[column]
                    part[:, column:] -= errors[:, column, None] * row[column:]
            if factor is not None:
                left[:, last:] -= errors @ factor[first:last, last:]
    of_zeros = torch.stack(zeros, 1).to(torch.uint8)
    return RoundedWeight(codes, torch.stack(scales, 1), of_zeros, bits, group)


def lost_share(weight: Tensor, found: RoundedWeight, correlations: Tensor) -> float:
    """Energy of the outputs' error over that of the outputs, on the inputs that `correlations` are of."""
    exact = weight.float()
    error = found.dequantised() - exact
    energy = float(((exact @ correlations) * exact).sum())
    return float(((error @ correlations) * error).sum()) / energy if energy > 0 else 0.0


def _factor(correlations: Tensor) -> Tensor:
    """float32 [in, in]: upper triangular U with U^T U the inverse of the damped correlations."""
    damped = correlations.double().clone()
    mean = damped.diagonal().mean().clamp_min(torch.finfo(torch.float32).tiny)
    damping = DAMPING
    while True:
        damped.diagonal().add_(damping * mean)
        try:
            inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
            factor: Tensor = torch.linalg.cholesky(inverse, upper=True).float()
            return factor
        except RuntimeError:  # not positive definite
            if damping > 1:
                raise ModelError("calibration's inputs are not finite") from None
            damping *= 10


def _range_of(numbers: Tensor, bits: int, scale_type: torch.dtype, symmetric: bool) -> tuple[Tensor, Tensor]:
    """Scale and zero [out] of a group [out, n], among ranges of several widths those of the least squared error."""
    top = 2**bits - 1
    if symmetric:
        high = numbers.abs().amax(1)
        low = -high
        trials = [(share, share) for share in _SHARES]
    else:
        low, high = numbers.amin(1).clamp_max(0), numbers.amax(1).clamp_min(0)
        trials = list(product(_SHARES, _SHARES))
    least = torch.full_like(low, torch.inf)
    best_scale, best_zero = torch.ones_like(low), torch.zeros_like(low)
    for of_low, of_high in trials:
        width = ((high * of_high - low * of_low) / top).to(scale_type)
        scale = torch.where(width > 0, width, torch.ones_like(width)).float()
        zero = torch.full_like(low, 2 ** (bits - 1))
        if not symmetric:
            zero = (-low * of_low / scale).round().clamp(0, top)
        codes = _nearest(numbers, scale[:, None], zero[:, None], bits)
        error = (scale[:, None] * (codes - zero[:, None]) - numbers).square().sum(1)
        better = error < least
        least = torch.where(better, error, least)
        best_scale = torch.where(better, scale, best_scale)
        best_zero = torch.where(better, zero, best_zero)
    return best_scale.to(scale_type), best_zero


def _nearest(numbers: Tensor, scale: Tensor, zero: Tensor, bits: int) -> Tensor:
    """float32: the code of each number."""
    return (numbers / scale + zero).round().clamp(0, 2**bits - 1)
