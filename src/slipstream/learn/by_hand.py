"""What an operator decides: which version serves, and whether anything else may change that."""

from __future__ import annotations

from dataclasses import replace

from slipstream.errors import LearnError
from slipstream.learn.disk_ring import ring_identity
from slipstream.learn.events import EventLog
from slipstream.learn.folder import LearnFolder
from slipstream.learn.records import tenant_key
from slipstream.learn.segments import RingIdentity
from slipstream.learn.state import LearnLane, LearnState, StateFile
from slipstream.learn.versions import Version, VersionStore

FLOOR = "floor"
"""The name of the drafter that the server was started with, where a version is asked for."""


def freeze(folder: LearnFolder, frozen: bool) -> LearnState:
    """Let nothing be trained, tried or promoted any more, or let it again; what serves goes on serving."""
    state = StateFile(folder).change(lambda state: replace(state, frozen=frozen))
    EventLog(folder).add("frozen" if frozen else "thawed", by="hand")
    return state


def promote(
    folder: LearnFolder, version_id: str, tenant: str | None = None, task: str | None = None
) -> LearnLane:
    """Have a version serve its lane from the next step on, or another lane if asked; `floor` is the drafter itself.

    No test is made but that it is whole and of the ring's model. Raises `LearnError` for a version that is not there,
    damaged, retired or of another model, and for one of a tenant that is to serve others.
    """
    version: Version | None = None
    if version_id != FLOOR:
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
        return state.with_lane(state.lane(tenant, task).promoted("" if version is None else version.id))

    lane = StateFile(folder).change(promoted).lane(tenant, task)
    _log(folder, "promoted", lane)
    return lane


def roll_back(folder: LearnFolder, tenant: str | None = None, task: str | None = None) -> LearnLane:
    """Have what served before serve again, in the end the floor. Raises `LearnError` where the floor serves already."""

    def rolled_back(state: LearnState) -> LearnState:
        lane = state.lane(tenant, task)
        if not lane.serving and lane.canary is None:
            raise LearnError("the floor serves already; there is nothing to roll back")
        # A canary alone is withdrawn: what serves was not in question.
        return state.with_lane(
            lane.rolled_back() if lane.canary is None else replace(lane, canary=None, canary_share=0.0)
        )

    lane = StateFile(folder).change(rolled_back).lane(tenant, task)
    _log(folder, "rolled back", lane)
    return lane


def _log(folder: LearnFolder, event: str, lane: LearnLane) -> None:
    whose = {} if lane.tenant is None else {"tenant_key": tenant_key(lane.tenant)}
    whose |= {} if lane.task is None else {"task": lane.task}
    EventLog(folder).add(event, version=lane.serving or FLOOR, by="hand", **whose)
