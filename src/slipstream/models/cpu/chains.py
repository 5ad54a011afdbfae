"""Draft chains that the kernels draw in one call: what they need to know of each, and what they return."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.models.cpu.structs import ChainsStruct, DrawingStruct

NOT_FINITE = -1
"""In place of a token: its logits are not finite."""
ENDED = -2
"""In place of a token: the chain ends, for lack of confidence."""


@dataclass(frozen=True, slots=True)
class Draw:
    """How the tokens of one chain are chosen from the draft's logits."""

    temperature: float
    """0: each is the most probable token."""
    keys: Sequence[int]
    """Of the noise at each position that the chain may reach; see `slipstream.sampling.noise`."""
    top_k: int = 0
    """0: no filter; the others' are 1 and 0. They are those of `SamplingParams`."""
    top_p: float = 1.0
    min_p: float = 0.0
    least_confidence: float = 0.0
    """The chain ends before the product of the highest probabilities falls below this."""
    greedy: bool = False
    """Always the most probable token: temperature and filters count for the confidence only."""

    @property
    def struct(self) -> DrawingStruct:
        return DrawingStruct(
            self.min_p,
            self.top_p,
            self.least_confidence,
            self.temperature or 1.0,
            self.top_k,
            self.temperature > 0 and not self.greedy,
        )


class Chains:
    """One chain for each row of a pass whose logits are wanted, as chain.h reads and writes them."""

    def __init__(self, draws: Sequence[Draw], num_tokens: int) -> None:
        """Tokens from id `num_tokens` on are never drafted."""
        self.lengths: Sequence[int] = [len(draw.keys) for draw in draws]
        """The most tokens of each chain."""
        self._lengths = array("q", self.lengths)
        depth = max(self.lengths)
        self._drawings = (DrawingStruct * len(draws))(*(draw.struct for draw in draws))
        self._keys = array("Q")
        for draw in draws:
            self._keys.extend(draw.keys)
            self._keys.extend([0] * (depth - len(draw.keys)))
        self._confidences = array("d", [1.0]) * len(draws)
        self._token_ids = array("q", [NOT_FINITE]) * (len(draws) * depth)
        lengths, keys, confidences, token_ids = (
            numbers.buffer_info()[0]
            for numbers in (self._lengths, self._keys, self._confidences, self._token_ids)
        )
        drawings = ctypes.addressof(self._drawings)
        self.struct = ChainsStruct(depth, num_tokens, lengths, drawings, keys, confidences, token_ids)

    def tokens(self) -> list[list[int]]:
        """The draft tokens; a chain that ends before its length ends with `NOT_FINITE` or `ENDED`."""
        depth, token_ids = self.struct.depth, self._token_ids.tolist()
        chains = [token_ids[i * depth : i * depth + length] for i, length in enumerate(self.lengths)]
        return [chain[: chain.index(ENDED) + 1] if ENDED in chain else chain for chain in chains]
