"""What encoders have made is kept once, found again for the same input alone, and never runs out of room."""

from __future__ import annotations

import random

import torch

from slipstream.kv.encoded import EncodedEntries, encoded_slots
from slipstream.kv.pool import KVPool, LayerShape

SHAPES = [LayerShape(2, 4, 6), LayerShape(2, 4, 6)]
LONGEST = 90


def entries(num_sequences: int) -> EncodedEntries:
    size = num_sequences * encoded_slots(LONGEST)
    return EncodedEntries(KVPool(SHAPES, size, torch.float32, torch.device("cpu")))


def made(number: int, length: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    drawn = torch.Generator().manual_seed(number)
    return [
        (torch.randn(2, length, 4, generator=drawn), torch.randn(2, length, 6, generator=drawn))
        for _ in SHAPES
    ]


def test_any_history_of_as_many_sequences_fits_and_reads_its_own() -> None:
    drawn, encoded, open_now = random.Random(3), entries(4), dict[int, tuple[int, int]]()
    num_reused = 0
    for owner in range(400):
        if len(open_now) == 4 or (open_now and drawn.random() < 0.3):
            encoded.close(gone := drawn.choice(list(open_now)))
            del open_now[gone]
        number = drawn.randrange(9)
        length = 1 + (number * 37) % LONGEST
        if encoded.open(owner, length, f"tenant {number}"):
            num_reused += 1
        else:
            encoded.write(owner, made(number, length))
        open_now[owner] = number, length
        for other, (which, size) in open_now.items():
            for layer, (keys, values) in enumerate(made(which, size)):
                held = encoded.read(other, layer)
                assert torch.equal(held[0], keys)
                assert torch.equal(held[1], values)
        assert encoded.accounting.integrity() == []
    assert num_reused > 20
    for owner in open_now:
        encoded.close(owner)
    encoded.close(12345)
    assert encoded.accounting.num_held == 0


def test_another_length_or_account_is_another_input() -> None:
    encoded = entries(3)
    assert not encoded.open(1, 40, "a")
    encoded.write(1, made(1, 40))
    assert not encoded.open(2, 40, "b")
    encoded.write(2, made(2, 40))
    encoded.close(2)
    assert not encoded.open(3, 50, "a")
    encoded.write(3, made(3, 50))
    assert torch.equal(encoded.read(3, 0)[0], made(3, 50)[0][0])
    assert encoded.open(4, 40, "a")
    assert torch.equal(encoded.read(4, 1)[1], made(1, 40)[1][1])
