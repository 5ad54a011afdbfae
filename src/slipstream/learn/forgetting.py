"""Forgets a tenant: its records, and every version that learned from them."""

from __future__ import annotations

import shutil
import time
from collections.abc import Collection
from dataclasses import dataclass, replace

from slipstream.learn.disk_ring import remove_from_ring
from slipstream.learn.events import EventLog
from slipstream.learn.folder import LearnFolder
from slipstream.learn.forgotten import Forgotten
from slipstream.learn.privacy import belongs_to
from slipstream.learn.records import tenant_key
from slipstream.learn.state import LearnState, StateFile
from slipstream.learn.versions import Version, VersionStore


@dataclass(frozen=True, slots=True)
class Forgetting:
    """What was deleted."""

    num_records: int
    versions: tuple[str, ...]
    """Removed, and to be built anew from what remains."""


def forget(folder: LearnFolder, tenant: str) -> Forgetting:
    """Delete a tenant's records, the versions that learned from them, and its own lane.

    A server and a learner that run need not be stopped: answers in the making and versions in training are refused.
    Interrupted at any instant, the same call again completes it; from its first write on, nothing of the tenant is
    read. Raises `LearnError` where something cannot be written.
    """
    key = tenant_key(tenant)
    Forgotten(folder).add(tenant)
    num_records = remove_from_ring(folder, tenant)

    def learned_from_it(version: Version) -> bool:
        return key in version.taught_by or (version.tenant is not None and belongs_to(version.tenant, tenant))

    def retire(versions: Collection[str]) -> None:
        def without(state: LearnState) -> LearnState:
            state = state.retire(dict.fromkeys(versions, "learned from records that are forgotten"))
            lanes = tuple(
                lane for lane in state.lanes if lane.tenant is None or not belongs_to(lane.tenant, tenant)
            )
            if not versions and lanes == state.lanes:
                return state
            return replace(state, lanes=lanes, rebuild_since_s=time.time())

        if versions or folder.state.is_file():
            StateFile(folder).change(without)

    store = VersionStore(folder)
    gone = store.remove_where(learned_from_it, retire)
    folder.clear_leftovers()
    _remove_checkpoints(folder, store)
    EventLog(folder).add("forgot", tenant_key=key, num_records=num_records, versions=gone)
    return Forgetting(num_records, gone)


def _remove_checkpoints(folder: LearnFolder, store: VersionStore) -> None:
    """Delete what a server that was killed while it loaded a version left of versions that are gone."""
    there = {one.id for one in store.all()}
    for checkpoint in folder.lanes.glob("v*"):
        if checkpoint.name not in there:
            shutil.rmtree(checkpoint, ignore_errors=True)
