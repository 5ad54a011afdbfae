"""Tables of 16 numbers of 8 bits, in which a 4-bit code is the place of the number that it stands for."""

from __future__ import annotations

import torch
from torch import Tensor

CodeTable = tuple[int, ...]

FP4: CodeTable = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""The 4-bit floating-point numbers e2m1, times two: those of MXFP4 and NVFP4."""
IQ4: CodeTable = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""llama.cpp's numbers for weights that are about normal: those of IQ4_NL and IQ4_XS."""
RISING: CodeTable = tuple(range(16))
"""The codes themselves, for groups that the kernels have with a table only."""
CENTRED: CodeTable = tuple(range(-8, 8))
"""The same, with the middle taken off."""


def halves_of_e8m0(exponents: Tensor) -> Tensor:
    """uint8 -> float32: half of two to the power of each minus 127, which `FP4` is multiplied with."""
    return exponents.view(torch.float8_e8m0fnu).float() / 2
