"""Versions of one drafter side by side: each request is drafted for by one of them.

The base drafter is there from the start and never replaced. Other versions come and go between two steps while requests
run: they are loaded in another thread (`prepare`) and then only entered (`change`). A request keeps the version that it
began with, even when new requests get another one, so that no draft entry of old weights is ever read by new ones.
Where a version is revoked its requests move to the base drafter, which computes their texts as it does any text that it
meets late: at most `max_num_batched_tokens` rows a step. Nothing here can change the text: which version drafts is a
function of the request, and every verifier judges a proposal by what it is.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from slipstream.config import SpeculativeConfig, check_at_least, check_types
from slipstream.core.proposal import EMPTY_PROPOSAL, Proposal
from slipstream.core.sequence import Sequence
from slipstream.draft.base import DraftContext, Observation
from slipstream.draft.combine.group import GuardedDrafters
from slipstream.draft.footprint import Footprint
from slipstream.draft.guarded.guard import Guard
from slipstream.draft.registry import create_drafter, validate
from slipstream.draft.traits import DrafterTraits
from slipstream.errors import ConfigError
from slipstream.kv.cache import KVCache
from slipstream.models.causal_lm import CausalLM

BASE = ""
"""The name of the version that is always there."""
_NUM_TIMES = 32
"""Calls whose time is averaged."""
_LONGEST = 2.0
"""A call that takes longer than so many means counts as so many."""
_MOST_TIMED = 64

Choose = Callable[[Sequence], str]
"""A request's version, by name. Called once a sequence; a name that is not there, or not its tenant's, is the base
drafter."""


@dataclass(frozen=True, kw_only=True)
class VersionsOptions:
    """Keys of `speculative_config` for `versions`."""

    drafter: Mapping[str, Any]
    """The base drafter, as a `speculative_config` of its own; the verifier is set next to it."""
    versions: Mapping[str, Any] | None = None
    """Other drafters of the same kind by name, each a `speculative_config`: a request is given to one of them, or to
    the base drafter, by a hash of its id. Versions that are learned come and go while the server runs instead."""
    num_versions: int = 3
    """The most versions in addition to the base drafter at a time; keys and values are planned for that many."""

    def __post_init__(self) -> None:
        check_types(self, "versions")
        check_at_least("versions", 1, num_versions=self.num_versions)
        if len(self.versions or ()) > self.num_versions:
            raise ConfigError(
                f"versions has {len(self.versions or ())} versions and num_versions {self.num_versions}; raise "
                "num_versions"
            )
        if BASE in (self.versions or ()):
            raise ConfigError(
                "versions has an entry with an empty name, which is the base drafter's; name the version"
            )
        for config in (self.base(), *self.configs().values()):
            if config.method in ("off", "auto", "versions", "remote"):
                raise ConfigError(
                    f"versions cannot hold {config.method!r}; name a drafter such as draft_model"
                )
            validate(config)

    def base(self) -> SpeculativeConfig:
        """The base drafter's configuration; raises `ConfigError` where it is none."""
        return _config(self.drafter)

    def configs(self) -> dict[str, SpeculativeConfig]:
        """The configurations of `versions`, by name."""
        return {name: _config(one) for name, one in (self.versions or {}).items()}


@dataclass(eq=False, slots=True)
class DraftVersion:
    """One version, and whom it drafts for."""

    name: str
    guard: Guard
    tenant: str | None = None
    """Whose requests it may draft for, and no other's; None for everyone's."""
    is_open: bool = True
    """Whether requests that begin may be given to it."""
    sequences: dict[int, Sequence] = field(default_factory=dict)
    """Those that it drafts for."""
    num_calls: NDArray[np.int64] = field(default_factory=lambda: np.zeros(_MOST_TIMED + 1, np.int64))
    """By the number of sequences that it drafted for; more than `_MOST_TIMED` count as so many."""
    call_s: NDArray[np.float64] = field(default_factory=lambda: np.zeros(_MOST_TIMED + 1))
    """Mean seconds of the last calls, in the same order."""

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Proposal]:
        """Return its proposals; the call is timed."""
        began_s = time.perf_counter()
        proposals = self.guard.propose(sequences, budgets)
        taken_s, number = time.perf_counter() - began_s, min(len(sequences), _MOST_TIMED)
        self.num_calls[number] += 1
        num, mean_s = self.num_calls[number], self.call_s[number]
        if num > 1:  # a prompt's call takes many times as long
            taken_s = min(taken_s, _LONGEST * mean_s)
        self.call_s[number] = mean_s + (taken_s - mean_s) / min(num, _NUM_TIMES)
        return proposals

    def may_serve(self, sequence: Sequence) -> bool:
        """Whether the sequence is its tenant's, or everyone's."""
        owner = self.tenant
        return (
            owner is None
            or sequence.tenant == owner
            or (bool(owner) and sequence.tenant.startswith(owner + "/"))
        )


class VersionsDrafter(GuardedDrafters):
    """A base drafter and versions of it, each guarded; every sequence has one of them."""

    Options = VersionsOptions

    @classmethod
    def footprint(cls, options: Any, context: DraftContext) -> Footprint:
        """The base drafter's as often as there may be versions."""
        made, base_options = validate(options.base())
        part = made.footprint(base_options, context)
        count = 1 + options.num_versions
        return Footprint.joined([part] * count, _versioned(part.traits, count))

    @classmethod
    def configured_depth(cls, options: Any) -> int | None:
        """The base drafter's."""
        made, base_options = validate(options.base())
        return made.configured_depth(base_options)

    def __init__(self, options: VersionsOptions, context: DraftContext) -> None:
        super().__init__(options, context)
        self._num_slots: int | None = None
        self._cache: KVCache | None = None
        self._num_failures = 0
        """Failures of versions that are gone."""
        self.base = self._made(BASE, options.base(), None)
        self.traits = _versioned(self.base.guard.drafter.traits, 1 + options.num_versions)
        self._versions: dict[str, DraftVersion] = {BASE: self.base}
        self._of: dict[int, DraftVersion] = self.by_sequence()
        """Sequence id to version."""
        self._choose: Choose = self._spread
        for name, config in options.configs().items():
            self._enter(self.prepare(name, config))

    # --- versions ------------------------------------------------------------------------------------------------

    @property
    def members(self) -> list[Guard]:
        """The versions' guards, the base drafter's first."""
        return [version.guard for version in self._versions.values()]

    @property
    def names(self) -> list[str]:
        """The versions that are there, the base drafter's empty name first."""
        return list(self._versions)

    def prepare(self, name: str, config: SpeculativeConfig, tenant: str | None = None) -> DraftVersion:
        """Load a version, which drafts for no request yet; may be called from any thread, and takes as long as loading
        does.

        Raises `ConfigError` where it cannot run with the base drafter, and what loading raises.
        """
        version = self._made(name, config, tenant)
        base, own = self.base.guard.drafter.traits, version.guard.drafter.traits
        if own.kinds != base.kinds or own.max_nodes > base.max_nodes:
            raise ConfigError(
                f"version {name!r} drafts in another way than the base drafter; give it the base drafter's options"
            )
        if own.feature_layers != base.feature_layers:
            raise ConfigError(f"version {name!r} reads other hidden states than the base drafter")
        if own.kv_bytes_per_token > base.kv_bytes_per_token:
            raise ConfigError(
                f"version {name!r} keeps more for a token than the base drafter, for which memory was planned"
            )
        if self._num_slots is not None:
            version.guard.drafter.allocate(self._num_slots)
        return version

    def change(
        self,
        enter: Collection[DraftVersion],
        keep: Collection[str],
        choose: Choose,
        revoke: Collection[str] = (),
    ) -> list[str]:
        """Between two steps: add `enter`, give requests that begin to those of `keep` by `choose`, and take `revoke`
        from those that run too. Returns the versions that are gone.

        A version that is neither kept nor revoked goes with the last of its requests, or when room is needed: then the
        one with the fewest is revoked.
        """
        wanted = {*keep, *(version.name for version in enter)} - set(revoke)
        gone = [name for name in revoke if self._revoke(name)]
        for name, version in self._versions.items():
            version.is_open = name in wanted or version is self.base
        gone += self._drop_empty()
        for version in enter:
            if version.name not in wanted or version.name in self._versions:
                continue
            while len(self._versions) > self.options.num_versions:
                closed = [each for each in self._versions.values() if not each.is_open]
                if not closed:
                    raise ConfigError(
                        f"there is no room for another version in addition to {self.options.num_versions}"
                    )
                gone.append(min(closed, key=lambda each: len(each.sequences)).name)
                self._revoke(gone[-1])
            self._enter(version)
        self._choose = choose
        return gone

    def version_of(self, sequence: Sequence) -> str:
        """The version of a sequence; the base drafter's empty name where it has none yet."""
        version = self._of.get(sequence.id)
        return BASE if version is None else version.name

    def features(self, sequence: Sequence) -> Tensor | None:
        """[n - 1, width]: the hidden states that heads read, of all of the sequence's tokens but the last; None where
        some are not there."""
        num = len(sequence.token_ids) - 1
        if self._cache is None or not self._cache.feature_width or sequence.num_computed < num:
            return None
        return self._cache.features(sequence.id, 0, num)

    def times_of(self, name: str) -> dict[int, tuple[int, float]]:
        """A version's calls and their mean seconds, by the number of sequences; may be called from any thread."""
        version = self._versions.get(name)
        if version is None:
            return {}
        return {
            int(number): (int(version.num_calls[number]), float(version.call_s[number]))
            for number in np.flatnonzero(version.num_calls)
        }

    def _made(self, name: str, config: SpeculativeConfig, tenant: str | None) -> DraftVersion:
        guard = Guard.of(create_drafter(config, self.context), self.context)
        return DraftVersion(name, guard, tenant)

    def _enter(self, version: DraftVersion) -> None:
        if self._cache is not None:
            version.guard.attach(self._cache)
        self._versions[version.name] = version

    def _revoke(self, name: str) -> bool:
        """Take a version away; its requests go on with the base drafter. False where there is none such."""
        version = self._versions.get(name)
        if version is None or version is self.base:
            return False
        for sequence in list(version.sequences.values()):
            self._leave(sequence)
            self._join(sequence, self.base)
        self._remove(version)
        return True

    def _drop_empty(self) -> list[str]:
        empty = [
            version for version in self._versions.values() if not version.is_open and not version.sequences
        ]
        for version in empty:
            self._remove(version)
        return [version.name for version in empty]

    def _remove(self, version: DraftVersion) -> None:
        del self._versions[version.name]
        self._num_failures += version.guard.num_failures

    def _join(self, sequence: Sequence, version: DraftVersion) -> None:
        self._of[sequence.id] = version
        version.sequences[sequence.id] = sequence

    def _leave(self, sequence: Sequence) -> DraftVersion | None:
        version = self._of.pop(sequence.id, None)
        if version is not None:
            del version.sequences[sequence.id]
            version.guard.release(sequence)
        return version

    def _assigned(self, sequence: Sequence) -> DraftVersion:
        """The sequence's version; one is chosen for a sequence that is new."""
        version = self._of.get(sequence.id)
        if version is None:
            version = self._versions.get(self._choose(sequence), self.base)
            if not version.is_open or not version.may_serve(sequence):
                version = self.base
            self._join(sequence, version)
        return version

    def _spread(self, sequence: Sequence) -> str:
        """Requests over the base drafter and all versions alike, by a hash of their id."""
        names = list(self._versions)
        return names[zlib.crc32(sequence.request_id.encode("utf-8", "surrogatepass")) % len(names)]

    # --- the contract -----------------------------------------------------------------------------------------

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Proposal]:
        """Each sequence's own version's proposal."""
        if len(self._versions) == 1:
            versions = [self._assigned(sequence) for sequence in sequences]
            if all(version is self.base for version in versions) and not self.base.guard.num_failures:
                return self.base.propose(sequences, budgets)
        batches: dict[str, tuple[list[Sequence], list[int]]] = {}
        found: dict[int, Proposal] = {}
        for sequence, budget in zip(sequences, budgets, strict=True):
            version = self._assigned(sequence)
            if version.guard.serves(sequence):
                theirs, limits = batches.setdefault(version.name, ([], []))
                theirs.append(sequence)
                limits.append(min(budget, version.guard.drafter.traits.max_nodes))
        for name, (theirs, limits) in batches.items():
            proposals = self._versions[name].propose(theirs, limits)
            found |= {sequence.id: made for sequence, made in zip(theirs, proposals, strict=True)}
        return [found.get(sequence.id, EMPTY_PROPOSAL) for sequence in sequences]

    def observe(self, observations: Seq[Observation]) -> None:
        """Pass to each version the verdicts on its own requests, and on no others."""
        seen: dict[str, list[Observation]] = {}
        for each in observations:
            version = self._of.get(each.sequence.id)
            if version is not None:
                seen.setdefault(version.name, []).append(each)
        for name, theirs in seen.items():
            self._versions[name].guard.observe(theirs)

    def release(self, sequence: Sequence) -> None:
        """Forget it; a version that takes no new requests goes with its last one."""
        version = self._leave(sequence)
        if (
            version is not None
            and not version.is_open
            and not version.sequences
            and version.name in self._versions
        ):
            self._remove(version)

    def rewind(self, sequence: Sequence) -> None:
        version = self._of.get(sequence.id)
        if version is not None:
            version.guard.rewind(sequence)

    @property
    def num_failures(self) -> int:
        """How often versions have been retired for a sequence that they failed, those that are gone included."""
        return self._num_failures + super().num_failures

    def drafting_model(self) -> CausalLM | None:
        """The base drafter's; those of versions are of the same shape."""
        return self.base.guard.drafter.drafting_model()

    def attach(self, cache: KVCache) -> None:
        self._cache = cache
        for version in self._versions.values():
            version.guard.attach(cache)

    def allocate(self, num_tokens: int) -> None:
        self._num_slots = num_tokens
        super().allocate(num_tokens)

    def integrity(self) -> list[str]:
        faults = super().integrity()
        held = sum(len(version.sequences) for version in self._versions.values())
        if held != len(self._of):
            faults.append(f"{len(self._of)} sequences have a version and versions have {held}")
        return faults


def _versioned(base: DrafterTraits, count: int) -> DrafterTraits:
    """The traits of so many versions of a drafter, the base included."""
    return replace(
        DrafterTraits.joined([base]),
        chain_length=base.chain_length,
        ends_early=base.ends_early,
        kv_bytes_per_token=base.kv_bytes_per_token * count,
        tables=base.tables * count,
        remembers=True,  # versions are learned from other requests, which is as much as remembering them
    )


def _config(value: Any) -> SpeculativeConfig:
    if isinstance(value, Mapping) and "verifier" in value:
        raise ConfigError("the drafters of versions share its verifier; set it next to drafter")
    return SpeculativeConfig.from_mapping(value)
