"""Which replica has computed which beginnings of prompts.

A prompt is cut into blocks of tokens; a block's hash covers all before it, and the tenant: what a tenant says never
decides where another's requests go. A replica's blocks are kept as its cache keeps them: the last used ones, as many as
its slots hold.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Set
from collections.abc import Sequence as Seq
from functools import lru_cache

MAX_BLOCKS = 1024
"""Longer prompts are distinguished by their beginning."""
_NO_REPLICA: frozenset[str] = frozenset()


@lru_cache(maxsize=4096)
def _salt(tenant: str) -> int:
    return int.from_bytes(hashlib.blake2b(tenant.encode(), digest_size=8).digest(), "big")


def blocks_of(token_ids: Seq[int], tenant: str, block_tokens: int) -> tuple[int, ...]:
    """One hash for each whole block of the prompt; equal in every process, as those of integers are."""
    state, blocks = _salt(tenant), []
    for end in range(block_tokens, len(token_ids) + 1, block_tokens):
        state = hash((state, *token_ids[end - block_tokens : end]))
        blocks.append(state)
        if len(blocks) == MAX_BLOCKS:
            break
    return tuple(blocks)


class FleetPrefixes:
    """Blocks by replica and replicas by block.

    A replica that holds a block holds those before it: they are used together, and the last ones are forgotten first.
    """

    def __init__(self) -> None:
        self._blocks: dict[str, OrderedDict[int, None]] = {}
        self._most: dict[str, int] = {}
        self._holders: dict[int, set[str]] = {}

    def add_replica(self, replica: str, num_blocks: int) -> None:
        """A replica that holds at most so many blocks, and none yet."""
        self.drop_replica(replica)
        self._blocks[replica] = OrderedDict()
        self._most[replica] = num_blocks

    def drop_replica(self, replica: str) -> None:
        """Forget a replica and all that it held."""
        for block in self._blocks.pop(replica, ()):
            self._forget(replica, block)
        self._most.pop(replica, None)

    def use(self, replica: str, blocks: Seq[int]) -> None:
        """The replica computes these blocks, or has them: they are its last used ones."""
        held = self._blocks.get(replica)
        if held is None:
            return
        for block in reversed(blocks):  # so that the first ones are forgotten last
            if block in held:
                held.move_to_end(block)
            else:
                held[block] = None
                self._holders.setdefault(block, set()).add(replica)
        while len(held) > self._most[replica]:
            block, _ = held.popitem(last=False)
            self._forget(replica, block)

    def holders(self, block: int) -> Set[str]:
        """The replicas that hold a block."""
        return self._holders.get(block, _NO_REPLICA)

    def num_known(self, replica: str, blocks: Seq[int]) -> int:
        """How many of the first blocks a replica holds."""
        held = self._blocks.get(replica, ())
        return next((number for number, block in enumerate(blocks) if block not in held), len(blocks))

    def known_anywhere(self, blocks: Iterable[int]) -> int:
        """How many of the first blocks any replica holds."""
        number = 0
        for block in blocks:
            if block not in self._holders:
                break
            number += 1
        return number

    def num_blocks(self, replica: str) -> int:
        """Blocks that a replica holds."""
        return len(self._blocks.get(replica, ()))

    def _forget(self, replica: str, block: int) -> None:
        holders = self._holders[block]
        holders.discard(replica)
        if not holders:
            del self._holders[block]
