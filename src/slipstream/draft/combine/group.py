"""Several drafters as one: what they hold, read and forget together."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence as Seq
from typing import Any

from slipstream.config import SpeculativeConfig
from slipstream.core.metrics.worker import WorkerStats
from slipstream.core.proposal import ProposalKind
from slipstream.core.sequence import Sequence
from slipstream.draft.base import DraftContext, Drafter
from slipstream.draft.guarded.guard import Guard
from slipstream.draft.outline import DraftOutline
from slipstream.draft.registry import create_drafter, validate
from slipstream.kv.cache import KVCache
from slipstream.models.causal_lm import CausalLM


def outline_members(configs: Seq[SpeculativeConfig], context: DraftContext) -> DraftOutline:
    """What all members hold together; a proposal has as many nodes as the largest member's."""
    made = [validate(config) for config in configs]
    parts = [cls.outline(options, context) for cls, options in made]
    return DraftOutline.joined(parts, max((part.max_nodes for part in parts), default=0))


def member_table_bytes(
    configs: Seq[SpeculativeConfig], vocab_size: int, num_seqs: int, num_tokens: int
) -> int:
    """What all members' tables come to hold; see `Drafter.table_bytes`."""
    made = [validate(config) for config in configs]
    return sum(cls.table_bytes(options, vocab_size, num_seqs, num_tokens) for cls, options in made)


class GuardedDrafters(Drafter):
    """Guards its members: one that raises or breaks its contract is retired for that sequence, the others go on."""

    kinds = frozenset(ProposalKind)
    guards_itself = True

    @property
    @abstractmethod
    def members(self) -> list[Guard]:
        """At least one."""

    @property
    @abstractmethod
    def names(self) -> list[str]:
        """The members', in their order."""

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

    def reset(self) -> None:
        for member in self.members:
            member.drafter.reset()

    def worker_stats(self) -> Seq[WorkerStats]:
        """All members' workers."""
        return [stats for member in self.members for stats in member.drafter.worker_stats()]

    def drafting_models(self) -> Seq[CausalLM]:
        return [model for member in self.members for model in member.drafter.drafting_models()]

    def lend(self, loaded_as: tuple[object, ...]) -> CausalLM | None:
        lent = (member.drafter.lend(loaded_as) for member in self.members)
        return next((model for model in lent if model is not None), None)

    def allocate(self, num_tokens: int) -> None:
        for member in self.members:
            member.drafter.allocate(num_tokens)

    def memory_bytes(self) -> int:
        return sum(member.drafter.memory_bytes() for member in self.members)

    def num_held(self) -> int:
        """Sequences for which a member keeps anything."""
        return max(max(member.num_held(), member.num_retired) for member in self.members)

    def integrity(self) -> list[str]:
        """Violated invariants of the members' own state, without those that are paused or retired."""
        return [
            f"{name}: {fault}" if name and len(self.members) > 1 else fault
            for name, member in zip(self.names, self.members, strict=True)
            if not member.retired
            for fault in member.drafter.integrity()
        ]


class DrafterGroup(GuardedDrafters):
    """Drafters of several kinds that stay the same."""

    def __init__(self, options: Any, context: DraftContext, configs: Seq[SpeculativeConfig]) -> None:
        """`configs` are the members'; the verifier is the context's."""
        super().__init__(options, context)
        self._members = [Guard.of(create_drafter(config, context), context) for config in configs]
        self.methods = [config.method for config in configs]

    @property
    def members(self) -> list[Guard]:
        """In the order of the configurations."""
        return self._members

    @property
    def names(self) -> list[str]:
        """Methods, with a number behind those that occur more than once."""
        methods = self.methods
        return [
            method if methods.count(method) == 1 else f"{method}-{methods[:place].count(method) + 1}"
            for place, method in enumerate(methods)
        ]

    def release(self, sequence: Sequence) -> None:
        for member in self.members:
            member.release(sequence)

    def kv_bytes_per_token(self) -> int:
        return sum(member.drafter.kv_bytes_per_token() for member in self.members)

    def feature_layers(self) -> Seq[int]:
        """What one member reads, in its own order; of several, every layer that some member reads, once."""
        if len(self.members) == 1:
            return self.members[0].drafter.feature_layers()
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
