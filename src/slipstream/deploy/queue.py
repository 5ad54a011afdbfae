"""The queue in front of the replicas: bounded, and shared between tenants turn by turn."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator

from slipstream.deploy.work import Ticket


class FrontQueue:
    """Waiting requests. Those that have begun come first, in their order; then each tenant's first one in turn, so that
    a tenant that sends much waits behind itself and not before others."""

    def __init__(self) -> None:
        self.num_answers = 0
        self._begun: deque[Ticket] = deque()
        self._tenants: OrderedDict[str, deque[Ticket]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._begun) + sum(map(len, self._tenants.values()))

    def __bool__(self) -> bool:
        return bool(self._begun or self._tenants)

    def __iter__(self) -> Iterator[Ticket]:
        """In the order in which they would go."""
        yield from self._begun
        rows = [iter(waiting) for waiting in self._tenants.values()]
        while rows:
            left = []
            for row in rows:
                ticket = next(row, None)
                if ticket is not None:
                    yield ticket
                    left.append(row)
            rows = left

    def add(self, ticket: Ticket) -> None:
        """Queue a request; one that was moved comes before all that have not begun."""
        self.num_answers += ticket.work.num_answers
        if ticket.num_moves:
            self._begun.append(ticket)
        else:
            self._tenants.setdefault(ticket.work.tenant, deque()).append(ticket)

    def first(self) -> Iterator[Ticket]:
        """Those that may go next: all that have begun, else the first of each tenant in turn."""
        yield from list(self._begun)
        for waiting in list(self._tenants.values()):
            yield waiting[0]

    def remove(self, ticket: Ticket) -> None:
        """It goes, or is given up; its tenant's next turn is after all others'."""
        self.num_answers -= ticket.work.num_answers
        if ticket.num_moves:
            self._begun.remove(ticket)
            return
        tenant = ticket.work.tenant
        waiting = self._tenants[tenant]
        waiting.remove(ticket)
        if waiting:
            self._tenants.move_to_end(tenant)
        else:
            del self._tenants[tenant]
