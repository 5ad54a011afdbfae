"""The versions that the drafter holds: which versions are loaded, and which of them drafts for a request."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar

from slipstream.core.sequence import Sequence
from slipstream.draft.combine.versions import DraftVersion, VersionsDrafter
from slipstream.engine.engine import Engine
from slipstream.learn.background.concurrent import run_concurrently
from slipstream.learn.decisions.loop import VersionLoop
from slipstream.learn.records.privacy import belongs_to
from slipstream.learn.records.served import share_of
from slipstream.learn.storage.state import LearnState, ScopeVersions
from slipstream.learn.versions.loading import BaseVersions
from slipstream.learn.versions.scope import EVERYONES, Scope

T = TypeVar("T")

_FADES = 0.99
"""Factor by which a scope's traffic fades with every request."""
_STAYS = 2.0
"""By how much busier than a scope whose versions are loaded another one must be to take its place."""


class SteppedEngine(Protocol):
    """An engine that somebody steps, in this process."""

    @property
    def engine(self) -> Engine:
        """For what does not change, and for hooks."""
        ...

    def between_steps(self, change: Callable[[Engine], T]) -> T:
        """What `change` returns, called between two steps; waits for that. Raises `EngineStoppedError`."""
        ...


class ServedVersions:
    """`choose` and `key_of` are called in the engine's thread, all else in the session's."""

    def __init__(
        self, stepped: SteppedEngine, drafter: VersionsDrafter, versions: BaseVersions, state: LearnState
    ) -> None:
        self._stepped, self._drafter, self._versions = stepped, drafter, versions
        self.state = state
        """The state that is served."""
        self.loops: dict[Scope, VersionLoop] = {}
        """What decides on the versions of a scope; a scope without one is changed by hand alone."""
        self._traffic: dict[Scope, float] = {}
        """Requests of each tenant or task with versions of its own, the latest weighing most."""
        self._loaded: set[str] = set()

    def choose(self, sequence: Sequence) -> str:
        """Who drafts for a request: its tenant's or task's version, else who serves everyone."""
        key = self.key_of(sequence)
        loop = self.loops.get(key)
        if loop is None:  # promoted by hand
            return self.state.scope(*key).serving
        # Another salt than this word, from when scopes were called so, would give requests to others in an update.
        return loop.version_for(share_of(sequence.request_id, "lane"))

    def key_of(self, sequence: Sequence) -> Scope:
        """The scope that a sequence belongs to: its tenant's or task's own where it has one, else everyone's."""
        found: tuple[int, Scope] = (0, EVERYONES)
        for scope in self.state.scopes:
            fits_tenant = scope.tenant is None or belongs_to(sequence.tenant, scope.tenant)
            if fits_tenant and scope.task in (None, sequence.task):
                rank = 2 * (scope.tenant is not None) + (scope.task is not None)
                if rank > found[0]:
                    found = rank, scope.key
        return found[1]

    def count(self, key: Scope) -> None:
        """Count a request of a scope."""
        if key != EVERYONES:
            self._traffic = {one: _FADES * num for one, num in self._traffic.items()}
            self._traffic[key] = self._traffic.get(key, 0.0) + 1

    def are_loaded(self, state: LearnState) -> bool:
        """Whether the versions that are to be loaded for `state` are."""
        return set(self._wanted(state)) == self._loaded

    def enter(self, state: LearnState) -> dict[str, str]:
        """Load what `state` wants and is not there, and have the drafter take it between two steps.

        Returns what could not be loaded, and why.
        """
        self.state = state
        wanted = self._wanted(state)
        loaded: list[DraftVersion] = []
        damaged: dict[str, str] = {}
        num_threads = self._stepped.engine.config.num_threads
        for version, tenant in wanted.items():
            if version not in self._drafter.names:
                try:
                    loaded.append(
                        run_concurrently(partial(self._versions.load, version, tenant), num_threads)
                    )
                except Exception as error:  # tensors of other names or shapes fail anywhere
                    damaged[version] = str(error)
        keep = self._loaded = set(wanted) - set(damaged)
        revoke = [name for name in self._drafter.names if name in state.retired]
        self._stepped.between_steps(lambda engine: self._drafter.change(loaded, keep, self.choose, revoke))
        return damaged

    def _wanted(self, state: LearnState) -> dict[str, str | None]:
        """The versions that are to be loaded, and whose each is: everyone's, then those of the busiest scopes.

        The requests of others are the base drafter's meanwhile.
        """

        def rank(scope: ScopeVersions) -> tuple[bool, float]:
            loaded = {scope.serving, scope.canary} & self._loaded
            return scope.key == EVERYONES, self._traffic.get(scope.key, 0.0) * (_STAYS if loaded else 1)

        wanted: dict[str, str | None] = {}
        for scope in sorted(state.scopes, key=rank, reverse=True):
            for version in (scope.serving, scope.canary):
                if version and version not in state.retired and self._versions.has(version):
                    wanted[version] = scope.tenant if version not in wanted else None
        return dict(list(wanted.items())[: self._drafter.options.num_versions])
