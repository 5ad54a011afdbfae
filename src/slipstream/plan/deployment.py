"""The plan of a deployment: every part of its memory, at one batch and one context."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from slipstream.plan.sizes import format_bytes


class PartKind(StrEnum):
    """What bytes are for."""

    TARGET = "target"
    DRAFTER = "drafter"
    CACHE = "cache"
    PASS = "pass"
    PROCESS = "process"


@dataclass(frozen=True, slots=True)
class PlannedPart:
    """Some of the bytes that are there while requests run."""

    name: str
    kind: PartKind
    num_bytes: int
    detail: str = ""
    """How they come about, in a few words."""


@dataclass(frozen=True, slots=True)
class LoadingStage:
    """What the process holds at one moment of its start."""

    name: str
    num_bytes: int


@dataclass(frozen=True)
class DeploymentPlan:
    """What a process will hold that serves `batch` requests of `context` tokens at once."""

    batch: int
    context: int
    """Prompt and answer together, in tokens."""
    num_slots: int
    """Tokens whose keys and values the cache has room for."""
    kv_bytes_per_token: int
    """Bytes a token of target and drafter together, features included."""
    parts: tuple[PlannedPart, ...]
    stages: tuple[LoadingStage, ...]
    """Before the first request."""
    encoded_bytes: int = 0
    """What is kept of encoders' outputs for all requests."""
    notes: tuple[str, ...] = ()
    """What could not be known from the configurations."""

    @property
    def running_bytes(self) -> int:
        """All parts together."""
        return sum(part.num_bytes for part in self.parts)

    @property
    def loading_bytes(self) -> int:
        """The largest stage of the start."""
        return max((stage.num_bytes for stage in self.stages), default=0)

    @property
    def peak_bytes(self) -> int:
        """The most that the process will hold at any time."""
        return max(self.running_bytes, self.loading_bytes)

    @property
    def kv_cache_bytes(self) -> int:
        """What to set `kv_cache_bytes` to, so that the engine makes room for exactly these requests."""
        return self.num_slots * self.kv_bytes_per_token + self.encoded_bytes

    def of_kind(self, kind: PartKind) -> int:
        """Bytes of one kind while requests run."""
        return sum(part.num_bytes for part in self.parts if part.kind is kind)

    def lines(self) -> Iterator[tuple[str, str, str]]:
        """Name, bytes and detail of every part, the largest first within its kind."""
        for kind in PartKind:
            own = [part for part in self.parts if part.kind is kind and part.num_bytes]
            for part in sorted(own, key=lambda part: -part.num_bytes):
                yield part.name, format_bytes(part.num_bytes), part.detail
