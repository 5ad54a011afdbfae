"""What a folder of learning holds, as it is now; nothing is changed, and no server is contacted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from slipstream.learn.storage.events import EventLog
from slipstream.learn.storage.folder import LearnFolder
from slipstream.learn.storage.ring import RingIdentity, RingInfo, read_ring, ring_identity, ring_info
from slipstream.learn.storage.state import LearnState, StateStore
from slipstream.learn.versions.store import Version, VersionStore

NUM_EVENTS = 10


@dataclass(frozen=True)
class LearnStatus:
    """All that `slipstream learn status` shows."""

    ring: RingInfo
    identity: RingIdentity | None
    num_tokens: int
    """Tokens of the answers in the ring."""
    by_purpose: Mapping[str, int]
    by_tenant: Mapping[str, int]
    by_task: Mapping[str, int]
    """Records."""
    by_version: Mapping[str, float]
    """Tokens a pass of the target, by the version that drafted; an empty name is the base drafter."""
    state: LearnState
    versions: tuple[Version, ...]
    unreadable: tuple[str, ...]
    events: tuple[Mapping[str, Any], ...]

    @classmethod
    def of(cls, folder: LearnFolder) -> LearnStatus:
        """Read a folder; raises `LearnError` where there is none."""
        folder.check()
        purposes: Counter[str] = Counter()
        tenants: Counter[str] = Counter()
        tasks: Counter[str] = Counter()
        tokens: Counter[str] = Counter()
        steps: Counter[str] = Counter()
        for record in read_ring(folder):
            purposes[record.purpose] += 1
            tenants[record.tenant] += 1
            tasks[record.task] += 1
            tokens[record.draft_version] += len(record.token_ids)
            steps[record.draft_version] += record.num_steps
        store = VersionStore(folder)
        return cls(
            ring_info(folder),
            ring_identity(folder),
            sum(tokens.values()),
            dict(purposes),
            dict(tenants.most_common()),
            dict(tasks.most_common()),
            {name: tokens[name] / steps[name] for name in tokens if steps[name]},
            StateStore(folder).read(),
            tuple(store.all()),
            tuple(store.unreadable()),
            tuple(EventLog(folder).read(NUM_EVENTS)),
        )

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON, for a message or a file."""
        plain = asdict(self)
        plain["state"] = self.state.as_json()
        plain["versions"] = [one.as_json() for one in self.versions]
        return plain
