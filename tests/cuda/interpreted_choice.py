"""Run by `test_choice.py` in a process with TRITON_INTERPRET=1: the choice of tokens, interpreted."""

from __future__ import annotations

import interpreter
import pytest
import torch

from slipstream.models.cuda.choice import choose
from slipstream.sampling.noise import Noise, Stream, choose_rows

interpreter.mend()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [50, 1024, 2500])
def test_the_kernels_choose_as_the_host_does(vocab_size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = (torch.randn(6, vocab_size, generator=generator) * 3).to(dtype)
    temperatures = torch.tensor([0.0, 1.0, 0.7, 0.0, 1.4, 1.0])
    keys = [Noise(7, 100).key(position, Stream.TARGET) for position in range(6)]
    signed = torch.tensor([key - 2**64 if key >= 2**63 else key for key in keys])
    ours = choose(logits, signed, temperatures)
    for row, temperature in enumerate(temperatures.tolist()):
        scores = logits[row].float() / (temperature or 1.0)
        expected = choose_rows(scores[None], [keys[row] if temperature else None])
        assert int(ours[row]) == int(expected), row


def test_the_lowest_id_among_equals() -> None:
    logits = torch.zeros(2, 3000)
    logits[0, [1500, 2047, 2900]] = 1.0
    assert choose(logits, torch.zeros(2, dtype=torch.int64), torch.zeros(2)).tolist() == [1500, 0]


def test_a_row_that_is_not_a_number_is_no_token_beyond_the_vocabulary() -> None:
    logits = torch.zeros(2, 1100)
    logits[0, 7] = float("nan")
    logits[1] = float("-inf")
    assert choose(logits, torch.zeros(2, dtype=torch.int64), torch.zeros(2)).tolist() == [7, 0]
