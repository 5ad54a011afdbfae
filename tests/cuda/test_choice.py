"""The choice of tokens at the end of a pass: its operator on a CPU, and its kernels, interpreted."""

from __future__ import annotations

import pytest
import torch
from triton_process import interpreted

from slipstream.models.cuda.choice import choose
from slipstream.sampling.noise import Noise, choose_rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_operator_chooses_as_the_host_does(dtype: torch.dtype) -> None:
    noise = Noise(11, 40)
    logits = (torch.randn(64, 700, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)
    temperatures = torch.linspace(0.2, 1.5, 64)
    temperatures[::5] = 0.0
    chosen = choose(logits, torch.tensor([noise.signed_key(row) for row in range(64)]), temperatures)
    for row, temperature in enumerate(temperatures.tolist()):
        scores = logits[row : row + 1].float() / (temperature or 1.0)
        assert int(chosen[row]) == int(choose_rows(scores, [noise.key(row) if temperature else None]))


def test_the_kernels_interpreted() -> None:
    done = interpreted("interpreted_choice.py")
    assert done.returncode == 0, done.stdout
