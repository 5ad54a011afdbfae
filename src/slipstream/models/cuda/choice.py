"""The target's own token of each row as one operator, so that a recorded pass can end with tokens instead of logits.

`slipstream::choose` runs in Triton on a CUDA device; on a CPU in PyTorch, or in Triton's interpreter where
TRITON_INTERPRET is 1: for tests.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.models.cuda.triton_use import runs_triton
from slipstream.sampling.noise import gumbel_of_bits, token_counters, uniform_bits

BLOCK = 1024
"""Tokens of a block of the vocabulary."""


@torch.library.custom_op("slipstream::choose", mutates_args=())
def choose(logits: Tensor, keys: Tensor, temperatures: Tensor) -> Tensor:
    """logits [rows, vocab], keys int64 [rows], temperatures float32 [rows] -> tokens int64 [rows].

    argmax(logits / temperature + Gumbel noise of the row's key), where the temperature is 0 argmax(logits); the lowest
    id among equals.
    """
    if not runs_triton(logits):
        return _in_pytorch(logits, keys, temperatures)
    from triton import next_power_of_2

    from slipstream.models.cuda.choice_kernels import choose_among_blocks, choose_in_blocks

    num_rows, vocab_size = logits.shape
    num_blocks = -(-vocab_size // BLOCK)
    best = torch.empty(num_rows, num_blocks, dtype=torch.float64, device=logits.device)
    best_ids = torch.empty(num_rows, num_blocks, dtype=torch.int32, device=logits.device)
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    choose_in_blocks[(num_rows, num_blocks)](
        logits,
        keys,
        temperatures,
        best,
        best_ids,
        logits.stride(0),
        vocab_size,
        BLOCK,
        enable_fp_fusion=False,
    )
    choose_among_blocks[(num_rows,)](best, best_ids, tokens, num_blocks, next_power_of_2(num_blocks))
    return tokens


@choose.register_fake
def _(logits: Tensor, keys: Tensor, temperatures: Tensor) -> Tensor:
    return keys.new_empty(len(logits))


def _in_pytorch(logits: Tensor, keys: Tensor, temperatures: Tensor) -> Tensor:
    is_greedy = (temperatures == 0)[:, None]
    scores = logits.float() / torch.where(temperatures == 0, 1.0, temperatures)[:, None]
    noise = gumbel_of_bits(uniform_bits(keys[:, None] + token_counters(logits.shape[1], logits.device)))
    return torch.where(is_greedy, scores.double(), noise + scores).argmax(-1)
