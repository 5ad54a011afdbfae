"""Several drafters as one: what they hold, read and forget together."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

from slipstream.config import SpeculativeConfig
from slipstream.core import ProposalKind, Sequence
from slipstream.draft.base import DraftContext, Drafter
from slipstream.draft.guard import Guard
from slipstream.draft.registry import create_drafter
from slipstream.kv.cache import KVCache


class DrafterGroup(Drafter):
    """Guards its members: one that raises or breaks its contract is retired for that sequence, the others go on."""

    kinds = frozenset(ProposalKind)
    guards_itself = True

    def __init__(self, options: Any, context: DraftContext, configs: Seq[SpeculativeConfig]) -> None:
        """`configs` are the members'; the verifier is the context's."""
        super().__init__(options, context)
        judged = self.kinds if context.verifier == "coupled" else self.kinds - {ProposalKind.COUPLED}
        self.methods = [config.method for config in configs]
        self.names = _numbered(self.methods)
        """Methods, with a number behind those that occur more than once."""
        self.members = [
            Guard(
                create_drafter(replace(config, verifier=context.verifier), context),
                context.vocab_size,
                judged,
                context.draft_timeout_s,
            )
            for config in configs
        ]

    @property
    def num_failures(self) -> int:
        """How often members have been retired for a sequence."""
        return sum(member.num_failures for member in self.members)

    def remembers(self) -> bool:
        """As some member does."""
        return any(member.drafter.remembers() for member in self.members)

    def kinds_made(self) -> frozenset[ProposalKind]:
        return frozenset[ProposalKind]().union(*(member.drafter.kinds_made() for member in self.members))

    def max_nodes(self) -> int:
        """The largest member's."""
        return max(member.drafter.max_nodes() for member in self.members)

    def release(self, sequence: Sequence) -> None:
        for member in self.members:
            member.release(sequence)

    def reset(self) -> None:
        for member in self.members:
            member.drafter.reset()

    def kv_bytes_per_token(self) -> int:
        return sum(member.drafter.kv_bytes_per_token() for member in self.members)

    def feature_layers(self) -> Seq[int]:
        """Every layer that some member reads, once."""
        layers = (layer for member in self.members for layer in member.drafter.feature_layers())
        return tuple(dict.fromkeys(layers))

    def attach(self, cache: KVCache) -> None:
        """Give each member the cache with the features that it asked for, in its own order."""
        layers = tuple(self.feature_layers())
        width = cache.feature_width // max(len(layers), 1)
        for member in self.members:
            own = tuple(member.drafter.feature_layers())
            starts = [layers.index(layer) * width for layer in own]
            columns = [column for start in starts for column in range(start, start + width)]
            member.attach(cache if own == layers else cache.view(columns))

    def allocate(self, num_tokens: int) -> None:
        for member in self.members:
            member.drafter.allocate(num_tokens)

    def memory_bytes(self) -> int:
        return sum(member.drafter.memory_bytes() for member in self.members)

    def num_held(self) -> int:
        return max(max(member.num_held(), member.num_retired) for member in self.members)

    def integrity(self) -> list[str]:
        return [
            f"{name}: {fault}"
            for name, member in zip(self.names, self.members, strict=True)
            if not member.retired
            for fault in member.drafter.integrity()
        ]


def _numbered(methods: list[str]) -> list[str]:
    return [
        method if methods.count(method) == 1 else f"{method}-{methods[:place].count(method) + 1}"
        for place, method in enumerate(methods)
    ]
