"""Which replica a request goes to: the one that knows most of its prompt, unless that has too much to do.

A prompt's beginning that a replica holds need not be computed. Among replicas that hold none of it, one that has
answered the same tenant's named task before is preferred, since its drafters have learned from it. Both give way to the
shortest queue where their load is more than `max_imbalance` of their capacity above the lowest.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

from slipstream.deploy.config import RouterConfig
from slipstream.deploy.fleet import NUM_LEVELS, Fleet, Health, ReplicaState
from slipstream.deploy.prefixes import FleetPrefixes
from slipstream.deploy.work import Work

MAX_LOOKED_AT = 32
"""Replicas that are compared at one place; with more holders of a block, those among the least loaded are taken."""
MAX_LEARNED = 8
"""Replicas that are remembered for a tenant's task."""
MAX_TASKS = 65_536

Allowed = Callable[[ReplicaState], bool]


class Learned:
    """Which replicas have answered a tenant's task last: their drafters know its texts."""

    def __init__(self) -> None:
        self._replicas: OrderedDict[tuple[str, str], OrderedDict[str, None]] = OrderedDict()

    def note(self, work: Work, replica: str) -> None:
        """The replica answers this. Only what callers name as a task is one."""
        if not work.task:
            return
        key = work.tenant, work.task
        known = self._replicas.setdefault(key, OrderedDict())
        self._replicas.move_to_end(key)
        known[replica] = None
        known.move_to_end(replica)
        if len(known) > MAX_LEARNED:
            known.popitem(last=False)
        if len(self._replicas) > MAX_TASKS:
            self._replicas.popitem(last=False)

    def of(self, work: Work) -> Iterable[str]:
        """Those that have answered its like, the last one first."""
        return reversed(self._replicas.get((work.tenant, work.task), OrderedDict()))

    def drop_replica(self, replica: str) -> None:
        """A replica is gone, and what its drafters knew with it."""
        for known in self._replicas.values():
            known.pop(replica, None)


class Chooser:
    """Chooses among the ready replicas of a fleet and remembers what each was given."""

    def __init__(self, fleet: Fleet, config: RouterConfig) -> None:
        self.prefixes = FleetPrefixes()
        self.learned = Learned()
        self._fleet = fleet
        self._slack = round(config.max_imbalance * NUM_LEVELS)

    def choose(self, work: Work, allowed: Allowed = lambda state: True) -> ReplicaState | None:
        """The replica for `work`; None where no ready replica that is `allowed` has room."""
        return self._affine(work, allowed) or self._practised(work, allowed) or self._shortest(work, allowed)

    def least_loaded(self, allowed: Allowed) -> ReplicaState | None:
        """The least loaded ready replica that is `allowed`, whether it has room or not."""
        return next((state for state in self._fleet.ascending() if allowed(state)), None)

    def note(self, work: Work, replica: str) -> None:
        """`work` was given to a replica."""
        self.prefixes.use(replica, work.blocks)
        self.learned.note(work, replica)

    def _affine(self, work: Work, allowed: Allowed) -> ReplicaState | None:
        """The least loaded of those that hold most of the prompt and have not too much to do."""
        for block in reversed(work.blocks):
            holders = self.prefixes.holders(block)
            if not holders:
                continue
            if len(holders) > MAX_LOOKED_AT:
                near = [state for state in self._fleet.least_loaded(MAX_LOOKED_AT) if state.id in holders]
            else:
                near = [self._fleet[name] for name in holders]
            best = self._best(work, near, allowed)
            if best is not None:
                return best
        return None

    def _practised(self, work: Work, allowed: Allowed) -> ReplicaState | None:
        known = [self._fleet[name] for name in self.learned.of(work) if name in self._fleet]
        return self._best(work, known, allowed, self._slack // 2)

    def _best(
        self, work: Work, states: Iterable[ReplicaState], allowed: Allowed, slack: int | None = None
    ) -> ReplicaState | None:
        bound = self._fleet.lowest_level + (self._slack if slack is None else slack)
        fit = [state for state in states if state.level <= bound and self._takes(state, work, allowed)]
        return min(fit, key=lambda state: (state.level, state.num_given, state.id), default=None)

    def _shortest(self, work: Work, allowed: Allowed) -> ReplicaState | None:
        for state in self._fleet.ascending():
            if state.level >= NUM_LEVELS:
                return None  # this one and all that follow are full
            if self._takes(state, work, allowed):
                return state
        return None

    def _takes(self, state: ReplicaState, work: Work, allowed: Allowed) -> bool:
        return state.health is Health.READY and state.has_room(work.num_answers) and allowed(state)
