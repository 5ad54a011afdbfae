"""The router: which request runs where, and where it goes on. It has no clock, no sockets and no tensors of its own.

Callers tell it what happened and when; it returns orders, which they carry out. So the same code runs behind HTTP, in
tests and in a simulation of a thousand replicas.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from slipstream.deploy.choice import Allowed, Chooser
from slipstream.deploy.config import RouterConfig
from slipstream.deploy.counts import Ledger
from slipstream.deploy.fleet import Fleet, Health, ReplicaInfo, ReplicaReport, ReplicaState
from slipstream.deploy.orders import Cancel, Fail, Order, SetPaused, Start
from slipstream.deploy.pace import Pace
from slipstream.deploy.queue import FrontQueue
from slipstream.deploy.work import Phase, Ticket, Work
from slipstream.errors import OverloadedError

MAX_TRIED = 16


@dataclass(slots=True)
class RouterCounts:
    """What the router has done since it was made."""

    submitted: int = 0
    finished: int = 0
    abandoned: int = 0
    refused: int = 0
    late: int = 0
    failed: int = 0
    moved: int = 0
    lost_replicas: int = 0
    silent_replicas: int = 0
    drained_replicas: int = 0
    crossed_unlike: int = 0
    prompt_blocks: int = 0
    known_blocks: int = 0
    """Blocks of prompts that the chosen replica held."""


class Router:
    """Requests and replicas. Every method takes the time in seconds of one clock and returns what is to be done."""

    def __init__(self, config: RouterConfig | None = None) -> None:
        self.config = config or RouterConfig()
        self.fleet = Fleet()
        self.chooser = Chooser(self.fleet, self.config)
        self.queue = FrontQueue()
        self.pace = Pace()
        self.counts = RouterCounts()
        self.ledger = Ledger()
        self.num_paused = 0
        """Answers at replicas that are paused; they are no load."""
        self._tickets: dict[str, Ticket] = {}
        self._running: Counter[str] = Counter()
        """By account, answers at replicas that are not paused."""

    # --- replicas ---------------------------------------------------------------------------------------------

    def join(self, info: ReplicaInfo, now_s: float) -> list[Order]:
        """A replica is there; raises `DeployError` where it serves another model. One that was known by its id has
        begun anew: what it had goes on elsewhere."""
        orders = self.leave(info.id, now_s) if info.id in self.fleet else []
        self.fleet.add(info, now_s)
        self.chooser.prefixes.add_replica(info.id, info.num_slots // self.config.block_tokens)
        return [*orders, *self._dispatch(now_s)]

    def leave(self, replica: str, now_s: float) -> list[Order]:
        """A replica is gone, and what it held with it; its requests go on elsewhere. Unknown ones are ignored."""
        state = self.fleet.get(replica)
        if state is None:
            return []
        self.counts.lost_replicas += state.health is not Health.DRAINING or bool(state.requests)
        self.fleet.set_health(state, Health.SILENT)  # it gets nothing while what it had is shared out
        orders = self._take_all(state, now_s)
        self.fleet.remove(replica)
        self.ledger.forget(len(self.fleet))
        self.chooser.prefixes.drop_replica(replica)
        self.chooser.learned.drop_replica(replica)
        return [*orders, *self._dispatch(now_s)]

    def drain(self, replica: str, now_s: float) -> list[Order]:
        """A replica will go: it gets nothing new, and its requests go on elsewhere as soon as there is room; until then
        it goes on with them."""
        state = self.fleet.get(replica)
        if state is None or state.health is Health.DRAINING:
            return []
        self.fleet.set_health(state, Health.DRAINING)
        self.counts.drained_replicas += 1
        return self._dispatch(now_s)

    def hear(self, replica: str, report: ReplicaReport, now_s: float) -> list[Order]:
        """A replica's report; a silent one that speaks again is ready."""
        state = self.fleet.get(replica)
        if state is None:
            return []
        state.heard_s, state.report = now_s, report
        self.ledger.hear(replica, report.engine, report.counts)
        if state.health is not Health.SILENT:
            return []
        self.fleet.set_health(state, Health.READY)
        return self._dispatch(now_s)

    # --- requests ---------------------------------------------------------------------------------------------

    def submit(self, work: Work, now_s: float) -> list[Order]:
        """A new request. Raises `OverloadedError` where too many wait or are paused, or its deadline cannot be met."""
        if work.id in self._tickets:
            raise ValueError(f"request {work.id!r} is under way")
        self.counts.submitted += 1
        self._check_deadline(work, now_s)
        ticket = Ticket(work, now_s, waiting_since_s=now_s)
        orders: list[Order] = []
        if self.num_paused:  # without paused answers there is always room for what can start at once
            self._check_room(work, self.num_paused - self.fleet.num_free)
        is_next = next(self.queue.first(), None) is None or not self._running[work.account]
        if not is_next or not self._start(ticket, orders, now_s):
            self._check_room(work, self.num_paused + self.queue.num_answers)
            self.queue.add(ticket)
        self._tickets[work.id] = ticket
        return orders

    def passed_on(self, request: str, attempt: int, num_tokens: int, now_s: float) -> bool:
        """The request's replica has said something of it, with so many tokens; False where it has no say any more, and
        what it said must be dropped."""
        ticket = self._tickets.get(request)
        if ticket is None or ticket.attempt != attempt or ticket.phase is not Phase.RUNNING:
            return False
        state = self.fleet[ticket.replica or ""]
        state.heard_s = max(state.heard_s, now_s)
        if num_tokens:
            if ticket.num_tokens == 0:
                ticket.begun_on = state.info.fingerprint
                self.pace.first_token(now_s - ticket.heard_s)
            else:
                self.pace.tokens(now_s - ticket.heard_s, num_tokens)
            ticket.num_tokens += num_tokens
            ticket.num_fruitless = 0
            ticket.heard_s = now_s
        return True

    def finish(self, request: str, now_s: float) -> list[Order]:
        """The request's last token was passed on."""
        self.counts.finished += 1
        return self._end(request, now_s, cancels=False)

    def abandon(self, request: str, now_s: float) -> list[Order]:
        """No caller waits for the request any more; ignored for one that is over."""
        if request not in self._tickets:
            return []
        self.counts.abandoned += 1
        return self._end(request, now_s, cancels=True)

    def set_paused(self, request: str, paused: bool, now_s: float) -> list[Order]:
        """What the request has made is not read, or is read again; ignored for one that is over.

        A paused answer keeps its replica and its deadline and leaves its place to others. Where it goes on, the replica
        may have more to do than it steps at once: its engine lets what has no place wait.
        """
        ticket = self._tickets.get(request)
        if ticket is None or ticket.is_paused is paused:
            return []
        state, orders = self.fleet.get(ticket.replica), list[Order]()
        if state is None:
            ticket.is_paused = paused
        else:
            self._count(ticket, state, -1)
            ticket.is_paused = paused
            self._count(ticket, state, 1)
            ticket.heard_s = now_s
            orders.append(SetPaused(request, state.id, ticket.attempt, paused))
        return [*orders, *self._dispatch(now_s)]

    def give_back(self, request: str, attempt: int, now_s: float) -> list[Order]:
        """The replica cannot go on with the request, though it lives."""
        ticket = self._tickets.get(request)
        if ticket is None or ticket.attempt != attempt or ticket.phase is not Phase.RUNNING:
            return []
        return [*self._take(ticket, now_s), *self._dispatch(now_s)]

    def tick(self, now_s: float) -> list[Order]:
        """Called a few times a second: replicas that are silent, requests that stall or wait for too long."""
        orders: list[Order] = []
        for state in list(self.fleet):
            if state.health is not Health.SILENT and now_s - state.heard_s > self.config.hang_timeout_s:
                self.counts.silent_replicas += 1
                self.fleet.set_health(state, Health.SILENT)
                orders += self._take_all(state, now_s)
        for ticket in list(self._tickets.values()):
            deadline_s = ticket.work.deadline_s
            if deadline_s is not None and now_s >= deadline_s:
                self.counts.late += 1
                orders += self._end(ticket.work.id, now_s, cancels=True)
                orders.append(Fail(ticket.work.id, "the answer was not complete by its deadline", True))
            elif self._stalls(ticket, now_s):
                orders += self._take(ticket, now_s, cancels=True)
                orders += self._dispatch(now_s)  # else the next one would go by a place that this one takes
            elif self._waits_in_vain(ticket, now_s):
                orders += self._give_up(ticket, now_s, "no replica was there to go on with the answer")
        return [*orders, *self._dispatch(now_s)]

    def ticket(self, request: str) -> Ticket | None:
        """The request's state, None once it is over."""
        return self._tickets.get(request)

    @property
    def num_under_way(self) -> int:
        """Requests that wait or run."""
        return len(self._tickets)

    def integrity(self) -> list[str]:
        """Violated invariants, a sentence each."""
        faults = []
        running = [t for t in self._tickets.values() if t.phase is Phase.RUNNING]
        for state in self.fleet:
            own = [t for t in running if t.replica == state.id]
            if {t.work.id for t in own} != set(state.requests):
                faults.append(f"replica {state.id} has other requests than say that they run there")
            loads: Counter[str] = Counter()
            for one in own:
                loads[one.work.account] += one.work.num_answers * (not one.is_paused)
            if state.load != loads.total() or state.accounts != +loads:
                faults.append(f"replica {state.id} has load {state.load}, by account {state.accounts}")
        if {t.work.id for t in self.queue} != {t.work.id for t in self._tickets.values() if t not in running}:
            faults.append("the queue holds other requests than wait")
        if self.queue.num_answers != sum(t.work.num_answers for t in self.queue):
            faults.append(f"the queue counts {self.queue.num_answers} answers")
        if self.num_paused != sum(t.work.num_answers for t in running if t.is_paused):
            faults.append(f"{self.num_paused} answers are counted as paused")
        by_account: Counter[str] = Counter()
        for ticket in running:
            by_account[ticket.work.account] += ticket.work.num_answers * (not ticket.is_paused)
        if self._running != by_account:
            faults.append("accounts have other answers running than are counted")
        return faults

    # --- inside -----------------------------------------------------------------------------------------------

    def _check_room(self, work: Work, num_answers: int) -> None:
        """Raise `OverloadedError` where so many answers wait or are paused that the request is one too many."""
        if num_answers + work.num_answers > self.config.max_waiting:
            self.counts.refused += 1
            again_s = self.pace.retry_after_s(self.queue.num_answers + work.num_answers)
            raise OverloadedError("too many requests are waiting; try again soon", again_s)

    def _check_deadline(self, work: Work, now_s: float) -> None:
        if work.deadline_s is None:
            return
        waits = self.queue and self._running[work.account]
        waiting = self.queue.num_answers + work.num_answers if waits else 0
        # What was measured is believed while it is being measured: else one slow answer could bar all others.
        needed_s = self.pace.wait_s(waiting) + self.pace.needs_s(work.min_tokens) if self._tickets else 0.0
        if now_s + needed_s > work.deadline_s or now_s >= work.deadline_s:
            self.counts.late += 1
            left_s = max(work.deadline_s - now_s, 0.0)
            message = (
                f"the answer cannot be complete in {left_s:.3g} s: it would take {needed_s:.3g} s at least"
            )
            raise OverloadedError(message, self.pace.retry_after_s(waiting), is_deadline=True)

    def _allowed(self, ticket: Ticket, state: ReplicaState) -> bool:
        begun = ticket.begun_on
        like = begun is None or begun.same_bits(state.info.fingerprint)
        return like or self.config.unlike_replicas == "say"

    def _replica_for(self, ticket: Ticket) -> ReplicaState | None:
        """A replica that has room for the request, or takes it all the same; those of equal arithmetic come first."""
        begun = ticket.begun_on
        if begun is not None and self.config.unlike_replicas == "say":
            state = self._find(ticket, lambda state: begun.same_bits(state.info.fingerprint))
            if state is not None:
                return state
        return self._find(ticket, partial(self._allowed, ticket))

    def _find(self, ticket: Ticket, allowed: Allowed) -> ReplicaState | None:
        found = self.chooser.choose(ticket.work, allowed)
        if found is not None:
            return found
        if ticket.is_paused:  # it needs no room
            return self.chooser.least_loaded(allowed)
        # An account that has nothing running gets its share from a full replica's engine, but not before answers that
        # have begun and wait for room to go on.
        if self._running[ticket.work.account] or self.queue.has_begun:
            return None
        return self.chooser.least_loaded(lambda state: state.is_open_to_accounts and allowed(state))

    def _start(self, ticket: Ticket, orders: list[Order], now_s: float) -> bool:
        """Give the request to a replica, if there is one for it."""
        state, begun = self._replica_for(ticket), ticket.begun_on
        if state is None:
            return False
        if begun is not None and not begun.same_bits(state.info.fingerprint):
            self.counts.crossed_unlike += not ticket.crossed_unlike
            ticket.crossed_unlike = True
        work = ticket.work
        self.counts.prompt_blocks += len(work.blocks)
        self.counts.known_blocks += self.chooser.prefixes.num_known(state.id, work.blocks)
        self.chooser.note(work, state.id)
        self._count(ticket, state, 1)
        state.requests[work.id] = None
        state.num_given += 1
        ticket.phase, ticket.replica = Phase.RUNNING, state.id
        ticket.attempt += 1
        ticket.heard_s = now_s
        orders.append(Start(work.id, state.id, ticket.attempt))
        if ticket.is_paused:
            orders.append(SetPaused(work.id, state.id, ticket.attempt, True))
        return True

    def _dispatch(self, now_s: float) -> list[Order]:
        """Start what waits while there is room, then move what runs on draining replicas."""
        orders: list[Order] = []
        while waiting := list(self.queue.first()):
            for ticket in waiting:
                if self._start(ticket, orders, now_s):
                    self.queue.remove(ticket)
                    break
            else:
                return orders
        for state in self.fleet.draining:
            orders += self._hand_over(state, now_s)
        return orders

    def _hand_over(self, state: ReplicaState, now_s: float) -> Iterator[Order]:
        for request in list(state.requests):
            ticket = self._tickets[request]
            if self._replica_for(ticket) is None:
                continue
            cancel = Cancel(request, state.id, ticket.attempt)
            self._let_go(ticket, state)
            orders: list[Order] = []
            self._start(ticket, orders, now_s)
            self._note_move(ticket, state)
            yield cancel
            yield from orders

    def _take_all(self, state: ReplicaState, now_s: float) -> list[Order]:
        """Take all requests from a replica, which is gone and cannot be notified."""
        orders: list[Order] = []
        for request in list(state.requests):
            orders += self._take(self._tickets[request], now_s)
        return orders

    def _take(self, ticket: Ticket, now_s: float, cancels: bool = False) -> list[Order]:
        """Take a request from its replica and queue it, before those that have not begun."""
        state = self.fleet[ticket.replica or ""]
        orders: list[Order] = [Cancel(ticket.work.id, state.id, ticket.attempt)] if cancels else []
        self._let_go(ticket, state)
        self._note_move(ticket, state)
        ticket.num_fruitless += not ticket.is_paused
        ticket.phase, ticket.replica, ticket.waiting_since_s = Phase.WAITING, None, now_s
        self.queue.add(ticket)
        if ticket.num_fruitless >= self.config.max_fruitless_attempts:
            tried = ", ".join(ticket.tried[-ticket.num_fruitless :])
            return [
                *orders,
                *self._give_up(ticket, now_s, f"its replicas were lost one after another: {tried}"),
            ]
        return orders

    def _stalls(self, ticket: Ticket, now_s: float) -> bool:
        since_s = now_s - ticket.heard_s
        if ticket.phase is not Phase.RUNNING or ticket.is_paused or since_s <= self.config.stall_timeout_s:
            return False
        state = self.fleet[ticket.replica or ""]
        # Where others fill the replica it may be waiting for its turn there, which is better than to wait here.
        has_place = state.load - ticket.work.num_answers < state.info.capacity
        return has_place or self._replica_for(ticket) is not None

    def _waits_in_vain(self, ticket: Ticket, now_s: float) -> bool:
        moved = ticket.phase is Phase.WAITING and ticket.num_moves > 0
        return moved and now_s - ticket.waiting_since_s > self.config.failover_timeout_s

    def _note_move(self, ticket: Ticket, state: ReplicaState) -> None:
        self.counts.moved += 1
        ticket.num_moves += 1
        ticket.tried = [*ticket.tried, state.id][-MAX_TRIED:]

    def _let_go(self, ticket: Ticket, state: ReplicaState) -> None:
        del state.requests[ticket.work.id]
        self._count(ticket, state, -1)

    def _count(self, ticket: Ticket, state: ReplicaState, sign: int) -> None:
        """Count the request's answers at its replica, or count them no more: as load, or as paused."""
        num_answers, account = sign * ticket.work.num_answers, ticket.work.account
        if ticket.is_paused:
            self.num_paused += num_answers
            self.fleet.put_last(state)  # the next paused one goes to another replica of this level
            return
        self.fleet.add_load(state, account, num_answers)
        self._running[account] += num_answers
        if not self._running[account]:
            del self._running[account]

    def _give_up(self, ticket: Ticket, now_s: float, why: str) -> list[Order]:
        self.counts.failed += 1
        return [*self._end(ticket.work.id, now_s, cancels=True), Fail(ticket.work.id, why)]

    def _end(self, request: str, now_s: float, cancels: bool) -> list[Order]:
        ticket = self._tickets.pop(request)
        orders: list[Order] = []
        state = self.fleet.get(ticket.replica)
        if ticket.phase is Phase.WAITING:
            self.queue.remove(ticket)
        elif state is not None:
            self._let_go(ticket, state)
            if cancels:
                orders.append(Cancel(request, state.id, ticket.attempt))
            self.pace.finished(ticket.work.num_answers, now_s, bool(self.queue))
        ticket.phase = Phase.OVER
        return [*orders, *self._dispatch(now_s)]
