"""Which version serves whom, which one is tried on whom, what is retired, and whether anything may change."""

from __future__ import annotations

import json
import shlex
import sqlite3
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from slipstream.errors import LearnError
from slipstream.learn.storage.database import LearnDatabase
from slipstream.learn.storage.folder import LearnFolder
from slipstream.learn.storage.tables import document, put_document

FORMAT = 2
"""1 called the scopes `lanes`."""
NUM_PREVIOUS = 8


@dataclass(frozen=True, slots=True)
class ScopeVersions:
    """The versions of everyone's requests, or of one tenant's or task's. An empty id is the base drafter."""

    tenant: str | None = None
    task: str | None = None
    """None for all."""
    serving: str = ""
    previous: tuple[str, ...] = ()
    """What served before, the latest last; what a rollback goes back to."""
    canary: str | None = None
    """The candidate that serves a share of the requests; None without one."""
    canary_share: float = 0.0

    @property
    def key(self) -> tuple[str | None, str | None]:
        return self.tenant, self.task

    @property
    def in_use(self) -> set[str]:
        """The versions that it names."""
        return {one for one in (self.serving, self.canary, *self.previous) if one}

    def promoted(self, version_id: str) -> ScopeVersions:
        """Return it with `version_id` serving everyone, and no canary."""
        if version_id == self.serving:
            return replace(self, canary=None, canary_share=0.0)
        previous = (*self.previous, self.serving)[-NUM_PREVIOUS:]
        return replace(self, serving=version_id, previous=previous, canary=None, canary_share=0.0)

    def rolled_back(self) -> ScopeVersions:
        """Return it with what served before, in the end the base drafter, and no canary."""
        serving = self.previous[-1] if self.previous else ""
        return replace(self, serving=serving, previous=self.previous[:-1], canary=None, canary_share=0.0)

    def without(self, version_ids: set[str]) -> ScopeVersions:
        """Return it with none of `version_ids`: what served before takes their place."""
        previous = tuple(one for one in self.previous if one not in version_ids)
        left = replace(self, previous=previous)
        if self.canary in version_ids:
            left = replace(left, canary=None, canary_share=0.0)
        if self.serving in version_ids:
            left = replace(
                left,
                serving=previous[-1] if previous else "",
                previous=previous[:-1],
            )
        return left


@dataclass(frozen=True, slots=True)
class LearnState:
    """All that is said of versions in use."""

    number: int = 0
    """Counts the changes, so that a reader sees that there was one."""
    scopes: tuple[ScopeVersions, ...] = (ScopeVersions(),)
    """One for everyone, and those of tenants and tasks that have one."""
    frozen: bool = False
    """While it is, nothing is trained, tried, promoted or rolled back but by hand."""
    retired: Mapping[str, str] = field(default_factory=dict)
    """Versions that must not serve any more, and why."""
    rebuild_since_s: float = 0.0
    """When versions were last retired because of forgotten records: the learner builds new ones from what remains."""

    def scope(self, tenant: str | None = None, task: str | None = None) -> ScopeVersions:
        """The versions of exactly this tenant and task; without an entry the base drafter serves."""
        return next((one for one in self.scopes if one.key == (tenant, task)), ScopeVersions(tenant, task))

    def with_scope(self, versions: ScopeVersions) -> LearnState:
        """Return it with `versions` in place of those of the same tenant and task."""
        others = tuple(one for one in self.scopes if one.key != versions.key)
        return replace(self, scopes=(*others, versions))

    def retire(self, reasons: Mapping[str, str]) -> LearnState:
        """Return it without the versions of `reasons` in any scope."""
        scopes = tuple(one.without(set(reasons)) for one in self.scopes)
        return replace(self, scopes=scopes, retired={**self.retired, **reasons})

    @property
    def in_use(self) -> set[str]:
        """The versions that a scope names: those that must stay on disk."""
        return set().union(*(one.in_use for one in self.scopes))

    def as_json(self) -> dict[str, Any]:
        plain = asdict(self)
        return {"format": FORMAT, **plain, "lanes": plain["scopes"]}  # the name before, for one more release

    @classmethod
    def from_json(cls, value: Any) -> LearnState:
        """Read it from a file; raises `LearnError`."""
        try:
            found = dict(value)
            written = found.pop("format")
            lanes = found.pop("lanes", None)
            if written == 1:
                found["scopes"], written = lanes, FORMAT
            if written != FORMAT:
                raise LearnError("it was written by another release of slipstream")
            scopes = tuple(
                ScopeVersions(**{**one, "previous": tuple(one["previous"])}) for one in found.pop("scopes")
            )
            state = cls(scopes=scopes, **found)
            return state.retire(
                state.retired
            )  # a scope may name some where states of two releases were merged
        except (TypeError, KeyError, ValueError) as error:
            raise LearnError(f"it is damaged: {error}") from None


class StateStore:
    """The state of a folder. Server, learner and `slipstream learn` change it, one after another."""

    def __init__(self, folder: LearnFolder) -> None:
        self._folder = folder
        self._database = LearnDatabase(folder)

    def read(self) -> LearnState:
        """The state; that of a new server where there is none. Raises `LearnError` for one that cannot be read."""
        with self._database.reading() as connection:
            return self._found(connection)

    def change(self, change: Callable[[LearnState], LearnState]) -> LearnState:
        """Replace the state by what `change` makes of it; returns that. Raises `LearnError`, and what `change` does."""
        with self._database.writing() as connection:
            before = self._found(connection)
            after = change(before)
            if after == before:
                return before
            after = replace(after, number=before.number + 1)
            put_document(connection, "state", json.dumps(after.as_json()))
        return after

    def _found(self, connection: sqlite3.Connection) -> LearnState:
        text = document(connection, "state")
        try:
            return LearnState() if text is None else LearnState.from_json(json.loads(text))
        except (ValueError, LearnError) as error:
            file = str(self._folder.database)
            raise LearnError(
                f"the state in {file!r} cannot be used: {error}; to serve the base drafter and keep all else, run "
                f"sqlite3 {shlex.quote(file)} \"DELETE FROM documents WHERE name = 'state'\""
            ) from None
