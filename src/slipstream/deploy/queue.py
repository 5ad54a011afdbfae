"""The queue in front of the replicas: bounded, and shared between accounts turn by turn."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from itertools import islice

from slipstream.deploy.work import Ticket


class FrontQueue:
    """Waiting requests. Those that have begun come first, in their order; then each account's first one in turn, so
    that an account that sends much waits behind itself and not before others."""

    def __init__(self) -> None:
        self.num_answers = 0
        self._begun: deque[Ticket] = deque()
        self._accounts: OrderedDict[str, deque[Ticket]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._begun) + sum(map(len, self._accounts.values()))

    def __bool__(self) -> bool:
        return bool(self._begun or self._accounts)

    @property
    def has_begun(self) -> bool:
        """Whether an answer that has begun, and is not paused, waits to go on."""
        return any(not ticket.is_paused for ticket in self._begun)

    def __iter__(self) -> Iterator[Ticket]:
        """Those that have begun, then the others in the order in which their accounts take turns."""
        yield from self._begun
        rows = [iter(waiting) for waiting in self._accounts.values()]
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
            self._accounts.setdefault(ticket.work.account, deque()).append(ticket)

    def first(self) -> Iterator[Ticket]:
        """Those that may go next: all that have begun, then the first of each account in turn that is not paused. A
        paused one would make no tokens."""
        yield from list(self._begun)
        for waiting in list(self._accounts.values()):
            yield from islice((ticket for ticket in waiting if not ticket.is_paused), 1)

    def remove(self, ticket: Ticket) -> None:
        """It goes, or is given up; its account's next turn is after all others'."""
        self.num_answers -= ticket.work.num_answers
        if ticket.num_moves:
            self._begun.remove(ticket)
            return
        account = ticket.work.account
        waiting = self._accounts[account]
        waiting.remove(ticket)
        if waiting:
            self._accounts.move_to_end(account)
        else:
            del self._accounts[account]
