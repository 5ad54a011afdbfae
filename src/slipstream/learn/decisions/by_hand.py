"""What an operator decides: which version serves, whether anything else may change that, and what is forgotten."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Collection
from dataclasses import dataclass, replace

from slipstream.errors import LearnError
from slipstream.learn.records.privacy import belongs_to
from slipstream.learn.records.served import tenant_key
from slipstream.learn.storage.events import EventLog
from slipstream.learn.storage.folder import LearnFolder
from slipstream.learn.storage.ring import RingIdentity, forget_records, ring_identity
from slipstream.learn.storage.state import LearnState, ScopeVersions, StateStore
from slipstream.learn.versions.store import Version, VersionStore

logger = logging.getLogger(__name__)

BASE = "base"
"""The name of the drafter that the server was started with, where a version is named."""


def freeze(folder: LearnFolder, frozen: bool) -> LearnState:
    """Let nothing be trained, tried or promoted any more, or let it again; what serves goes on serving."""
    state = StateStore(folder).change(lambda state: replace(state, frozen=frozen))
    EventLog(folder).add("frozen" if frozen else "thawed", by="hand")
    return state


def promote(
    folder: LearnFolder, version_id: str, tenant: str | None = None, task: str | None = None
) -> ScopeVersions:
    """Have a version serve its own scope from the next step on, or the scope that is given; `base` is the drafter
    itself.

    No test is made but that it is whole and of the ring's model. Raises `LearnError` for a version that is not there,
    damaged, retired or of another model, and for one of a tenant that is to serve others.
    """
    version: Version | None = None
    if version_id == "floor":
        logger.warning("floor is now called %s", BASE)
        version_id = BASE
    if version_id != BASE:
        version = VersionStore(folder).verify(version_id)
        identity = ring_identity(folder)
        if identity is not None:
            identity.check(RingIdentity(version.model_hash, version.template_hash), f"version {version_id!r}")
        if version.tenant is not None and tenant not in (None, version.tenant):
            raise LearnError(f"version {version_id!r} learned from one tenant alone, and serves no other one")
        tenant = version.tenant if tenant is None else tenant
        task = version.task if task is None else task

    def promoted(state: LearnState) -> LearnState:
        if version_id in state.retired:
            raise LearnError(f"version {version_id!r} is retired: {state.retired[version_id]}")
        return state.with_scope(state.scope(tenant, task).promoted("" if version is None else version.id))

    scope = StateStore(folder).change(promoted).scope(tenant, task)
    _log(folder, "promoted", scope)
    return scope


def roll_back(folder: LearnFolder, tenant: str | None = None, task: str | None = None) -> ScopeVersions:
    """Have what served before serve again, in the end the base drafter. Raises `LearnError` where the base drafter
    serves already."""

    def rolled_back(state: LearnState) -> LearnState:
        scope = state.scope(tenant, task)
        if not scope.serving and scope.canary is None:
            raise LearnError("the base drafter serves already; there is nothing to roll back")
        # A canary alone is withdrawn: what serves was not in question.
        return state.with_scope(
            scope.rolled_back() if scope.canary is None else replace(scope, canary=None, canary_share=0.0)
        )

    scope = StateStore(folder).change(rolled_back).scope(tenant, task)
    _log(folder, "rolled back", scope)
    return scope


def _log(folder: LearnFolder, event: str, scope: ScopeVersions) -> None:
    whose = {} if scope.tenant is None else {"tenant_key": tenant_key(scope.tenant)}
    whose |= {} if scope.task is None else {"task": scope.task}
    EventLog(folder).add(event, version=scope.serving or BASE, by="hand", **whose)


@dataclass(frozen=True, slots=True)
class Forgetting:
    """What was deleted."""

    num_records: int
    versions: tuple[str, ...]
    """Removed, and to be built anew from what remains."""


def forget(folder: LearnFolder, tenant: str) -> Forgetting:
    """Delete a tenant's records, the versions that learned from them, and its own scope.

    A server and a learner that run need not be stopped: answers in the making and versions in training are refused.
    Interrupted at any instant, the same call again completes it; from its first write on, nothing of the tenant is
    read. Raises `LearnError` where something cannot be written.
    """
    key = tenant_key(tenant)
    num_records = forget_records(folder, tenant)

    def learned_from_it(version: Version) -> bool:
        return key in version.taught_by or (version.tenant is not None and belongs_to(version.tenant, tenant))

    def retire(versions: Collection[str]) -> None:
        def without(state: LearnState) -> LearnState:
            state = state.retire(dict.fromkeys(versions, "learned from records that are forgotten"))
            scopes = tuple(
                one for one in state.scopes if one.tenant is None or not belongs_to(one.tenant, tenant)
            )
            if not versions and scopes == state.scopes:
                return state
            return replace(state, scopes=scopes, rebuild_since_s=time.time())

        StateStore(folder).change(without)

    store = VersionStore(folder)
    gone = store.remove_where(learned_from_it, retire)
    folder.clear_leftovers()
    _remove_checkpoints(folder, store)
    EventLog(folder).add("forgot", tenant_key=key, num_records=num_records, versions=gone)
    return Forgetting(num_records, gone)


def _remove_checkpoints(folder: LearnFolder, store: VersionStore) -> None:
    """Delete what a server that was killed while it loaded a version left of versions that are gone."""
    there = {one.id for one in store.all()}
    for checkpoint in folder.checkpoints.glob("v*"):
        if checkpoint.name not in there:
            shutil.rmtree(checkpoint, ignore_errors=True)
