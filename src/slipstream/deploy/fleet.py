"""The replicas that a router knows: what they are, how they are, and how much each has to do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice

from slipstream.deploy.counts import NOTHING, ReplicaCounts
from slipstream.deploy.fingerprint import Fingerprint
from slipstream.errors import DeployError

MAX_ACCOUNTS_A_PLACE = 2
NUM_LEVELS = 64
"""Loads are compared in this many parts of a replica's capacity."""


@dataclass(frozen=True, slots=True)
class ReplicaInfo:
    """What a replica says of itself when it joins."""

    id: str
    fingerprint: Fingerprint
    capacity: int
    """Answers that it steps at once."""
    num_slots: int
    """Tokens that its cache holds."""


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """What a replica says now and then, which is also how it is heard to be alive."""

    num_running: int = 0
    num_waiting: int = 0
    cache_usage: float = 0.0
    num_retained_slots: int = 0
    """Slots of the cache that hold finished answers."""
    num_drafted_sequences: int = 0
    """Answers for which drafters keep state."""
    retired_drafters: tuple[str, ...] = ()
    """Drafters that are not called any more, or not for now."""
    tokens_per_s: float = 0.0
    """Emitted since the last report."""
    acceptance_length: float = 0.0
    """Mean tokens a target pass since the last report; 0 where there was none."""
    engine: str = ""
    """Names the engine that counts: another one counts from zero."""
    counts: ReplicaCounts = NOTHING


class Health(StrEnum):
    """What a replica may be given."""

    READY = "ready"
    DRAINING = "draining"
    """Goes on with what it has, takes nothing new, and goes."""
    SILENT = "silent"
    """Not heard of: what it had went on elsewhere. It is ready again once it is heard of."""


@dataclass(slots=True, eq=False)
class ReplicaState:
    """A replica behind the router."""

    info: ReplicaInfo
    heard_s: float
    health: Health = Health.READY
    report: ReplicaReport = ReplicaReport()
    load: int = 0
    """Answers that it was given and has not finished, without paused ones. It may exceed the capacity: what has no
    place waits in the replica's engine."""
    accounts: Counter[str] = field(default_factory=Counter)
    """The load by account."""
    requests: dict[str, None] = field(default_factory=dict)
    """In the order in which they came."""
    num_given: int = 0

    @property
    def id(self) -> str:
        return self.info.id

    @property
    def level(self) -> int:
        """Load over capacity, in parts of `NUM_LEVELS`."""
        return self.load * NUM_LEVELS // self.info.capacity

    @property
    def is_open_to_accounts(self) -> bool:
        """True where, even if it is full, it takes an answer of an account that has nothing running."""
        return len(self.accounts) < MAX_ACCOUNTS_A_PLACE * self.info.capacity

    def has_room(self, num_answers: int) -> bool:
        """True where it would step them at once; a request larger than the replica gets an empty one."""
        return self.load + num_answers <= self.info.capacity or self.load == 0


class Fleet:
    """Replicas by id, and the ready ones by load."""

    def __init__(self) -> None:
        self._replicas: dict[str, ReplicaState] = {}
        self._levels: dict[int, dict[str, None]] = {}
        self._lowest = 0
        self._draining: dict[str, ReplicaState] = {}

    def __getitem__(self, replica: str) -> ReplicaState:
        return self._replicas[replica]

    def __contains__(self, replica: object) -> bool:
        return replica in self._replicas

    def __iter__(self) -> Iterator[ReplicaState]:
        return iter(self._replicas.values())

    def __len__(self) -> int:
        return len(self._replicas)

    def get(self, replica: str | None) -> ReplicaState | None:
        """The replica, None for one that is not known."""
        return None if replica is None else self._replicas.get(replica)

    def add(self, info: ReplicaInfo, now_s: float) -> ReplicaState:
        """A new replica, ready. Raises `DeployError` where it serves another model than the others."""
        other = next(iter(self), None)
        if other is not None and not info.fingerprint.same_model(other.info.fingerprint):
            raise DeployError(
                f"replica {info.id} serves another model than replica {other.id} (fingerprints "
                f"{info.fingerprint.model[:12]} and {other.info.fingerprint.model[:12]}); "
                "give all replicas of a deployment the same model and tokenizer"
            )
        state = self._replicas[info.id] = ReplicaState(info, now_s)
        self._place(state)
        return state

    def remove(self, replica: str) -> None:
        """Forget a replica."""
        state = self._replicas.pop(replica)
        self._draining.pop(replica, None)
        self._unplace(state)

    def set_health(self, state: ReplicaState, health: Health) -> None:
        """Only ready ones are found by load."""
        self._unplace(state)
        state.health = health
        self._draining.pop(state.id, None)
        if health is Health.DRAINING:
            self._draining[state.id] = state
        if health is Health.READY:
            self._place(state)

    def add_load(self, state: ReplicaState, account: str, num_answers: int) -> None:
        """Give a replica more to do for an account, or less."""
        self._unplace(state)
        state.load += num_answers
        state.accounts[account] += num_answers
        if not state.accounts[account]:
            del state.accounts[account]
        if state.health is Health.READY:
            self._place(state)

    def put_last(self, state: ReplicaState) -> None:
        """The replica comes after all others of its level."""
        if state.health is Health.READY:
            self._unplace(state)
            self._place(state)

    @property
    def lowest_level(self) -> int:
        """The level of the least loaded ready replica; 0 where none is ready."""
        if not self._levels:
            return 0
        while self._lowest not in self._levels:
            self._lowest += 1
        return self._lowest

    def least_loaded(self, most: int) -> Iterable[ReplicaState]:
        """Ready replicas of the lowest level, at most so many of them; those that came to it first are first."""
        return (self._replicas[name] for name in islice(self._levels.get(self.lowest_level, {}), most))

    def ascending(self) -> Iterator[ReplicaState]:
        """Ready replicas from the least loaded one on."""
        for level in sorted(self._levels):
            for name in self._levels[level]:
                yield self._replicas[name]

    @property
    def draining(self) -> list[ReplicaState]:
        """Replicas that will go."""
        return list(self._draining.values())

    @property
    def num_ready(self) -> int:
        return sum(map(len, self._levels.values()))

    @property
    def num_free(self) -> int:
        """Answers that the ready replicas would step besides what they have."""
        ready = (state for state in self if state.health is Health.READY)
        return sum(max(state.info.capacity - state.load, 0) for state in ready)

    def _place(self, state: ReplicaState) -> None:
        self._levels.setdefault(state.level, {})[state.id] = None
        self._lowest = min(self._lowest, state.level)

    def _unplace(self, state: ReplicaState) -> None:
        at = self._levels.get(state.level)
        if at is not None and state.id in at:
            del at[state.id]
            if not at:
                del self._levels[state.level]
