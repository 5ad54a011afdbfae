"""Draft chains that the kernels draw in one call: what they need to know of each, and what they return."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.models.cpu.native import ChainsStruct


@dataclass(frozen=True, slots=True)
class Draw:
    """How the tokens of one chain are chosen from the draft's logits."""

    temperature: float
    """0: each is the most probable token."""
    keys: Sequence[int]
    """Of the noise at each position that the chain may reach; see `slipstream.sampling.noise`."""


class Chains:
    """One chain for each row of a pass whose logits are wanted, as chain.h reads and writes them."""

    def __init__(self, draws: Sequence[Draw], num_tokens: int) -> None:
        """Tokens from id `num_tokens` on are never drafted."""
        self._lengths = array("q", [len(draw.keys) for draw in draws])
        depth = max(self._lengths)
        self._temperatures = array("f", [draw.temperature for draw in draws])
        self._keys = array("Q")
        for draw in draws:
            self._keys.extend(draw.keys)
            self._keys.extend([0] * (depth - len(draw.keys)))
        self._token_ids = array("q", [-1]) * (len(draws) * depth)
        arrays = (self._lengths, self._temperatures, self._keys, self._token_ids)
        self.struct = ChainsStruct(depth, num_tokens, *(numbers.buffer_info()[0] for numbers in arrays))

    def tokens(self) -> list[list[int]]:
        """The draft tokens; -1 in place of one whose logits are not finite, with which its chain ends."""
        depth, token_ids = self.struct.depth, self._token_ids.tolist()
        return [token_ids[i * depth : i * depth + length] for i, length in enumerate(self._lengths)]
