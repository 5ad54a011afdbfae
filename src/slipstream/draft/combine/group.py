"""Several drafters as one: what they hold, read and forget together."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence as Seq
from typing import Any

from slipstream.config import SpeculativeConfig
from slipstream.core.proposal import ProposalKind
from slipstream.core.sequence import Sequence
from slipstream.draft.base import DraftContext, Drafter
from slipstream.draft.footprint import Footprint
from slipstream.draft.guarded.guard import Guard
from slipstream.draft.registry import create_drafter, validate
from slipstream.draft.traits import DrafterTraits
from slipstream.kv.cache import KVCache


def member_footprints(configs: Seq[SpeculativeConfig], context: DraftContext) -> list[Footprint]:
    """What each member will hold."""
    made = [validate(config) for config in configs]
    return [cls.footprint(options, context) for cls, options in made]


class GuardedDrafters(Drafter):
    """Guards its members: one that raises or breaks its contract is retired for that sequence, the others go on."""

    traits = DrafterTraits(kinds=frozenset(ProposalKind), guards_itself=True)

    @property
    @abstractmethod
    def members(self) -> list[Guard]:
        """At least one."""

    @property
    @abstractmethod
    def names(self) -> list[str]:
        """The members', in their order."""

    @property
    def parts(self) -> list[Drafter]:
        """The members."""
        return [member.drafter for member in self.members]

    @property
    def num_failures(self) -> int:
        """How often members have been retired for a sequence."""
        return sum(member.num_failures for member in self.members)

    def num_held(self) -> int:
        """Sequences for which the group, or a member that is not retired, keeps anything."""
        members = (max(member.num_held(), member.num_retired) for member in self.members)
        return max(self._num_in_tables, *members)

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
        self.traits = DrafterTraits.joined([drafter.traits for drafter in self.parts])
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
        super().release(sequence)
        for member in self.members:
            member.release(sequence)

    def attach(self, cache: KVCache) -> None:
        """Give each member the cache with the features that it reads, in its own order."""
        layers = self.traits.feature_layers
        width = cache.feature_width // max(len(layers), 1)
        for member in self.members:
            own = member.drafter.traits.feature_layers
            starts = [layers.index(layer) * width for layer in own]
            columns = [column for start in starts for column in range(start, start + width)]
            member.attach(cache if own == layers else cache.view(columns))
