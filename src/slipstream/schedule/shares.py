"""How running places and steps are shared between accounts. No tensors.

Each account is due as many running places as any other that has work for them. The one with the fewest is next; among
equals, the one that was served the fewest rows. What one account does not use, the others have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from itertools import zip_longest

from slipstream.core.sequence import Sequence

TURN_TOKENS = 512
"""Tokens that a sequence may add before its place goes to an account that has none. Where there are more accounts than
places, each preemption is paid by so many tokens."""


class Shares:
    """The accounts that have sequences waiting or running, and the rows that each was served.

    An account that comes back starts with the least that another one has been served: absence saves nothing up.
    """

    def __init__(self) -> None:
        self._num_sequences: Counter[str] = Counter()
        self._num_served: dict[str, int] = {}

    @property
    def is_one(self) -> bool:
        """True while at most one account has work."""
        return len(self._num_sequences) <= 1

    def enter(self, account: str) -> None:
        """The account has one sequence more that waits or runs."""
        if account not in self._num_sequences:
            self._num_served[account] = min(self._num_served.values(), default=0)
        self._num_sequences[account] += 1

    def leave(self, account: str) -> None:
        """One of the account's sequences has ended or is paused."""
        self._num_sequences[account] -= 1
        if not self._num_sequences[account]:
            del self._num_sequences[account], self._num_served[account]

    def serve(self, account: str, num_rows: int) -> None:
        """A step computes so many rows for the account."""
        self._num_served[account] += num_rows

    def next(self, first: Iterable[Sequence], running: Seq[Sequence]) -> Sequence | None:
        """Which one of the sequences that are first in their accounts' lines is to be admitted; None of none."""
        places = Counter(sequence.account for sequence in running)
        return min(first, key=lambda s: (places[s.account], self._num_served[s.account]), default=None)

    def victim(self, running: Seq[Sequence], account: str) -> Sequence | None:
        """The running sequence whose place is due to `account`, None where it has its share or must wait.

        It is the newest one of an account that has at least two places more. An account with no place at all gets the
        only one of another account, too, when that has had its turn.
        """
        newest = {sequence.account: sequence for sequence in running}  # in the order of admission
        places = Counter(sequence.account for sequence in running)
        most = max(places.values(), default=0)
        found = [sequence for holder, sequence in newest.items() if places[holder] == most]
        if most - places[account] < 2:
            found = (
                [] if places[account] else [s for s in found if s.num_tokens_since_admission >= TURN_TOKENS]
            )
        return max(found, key=lambda s: self._num_served[s.account], default=None)

    def last(self, running: Seq[Sequence]) -> Sequence:
        """The one to preempt where the cache is full: the newest of the accounts with the most places."""
        places = Counter(sequence.account for sequence in running)
        most = max(places.values())
        return next(sequence for sequence in reversed(running) if places[sequence.account] == most)

    def in_turn(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """In turn by account, the one that was served least first; the order within an account stays."""
        by_account: dict[str, list[Sequence]] = {}
        for sequence in sequences:
            by_account.setdefault(sequence.account, []).append(sequence)
        lines = sorted(by_account.values(), key=lambda line: self._num_served[line[0].account])
        return [sequence for row in zip_longest(*lines) for sequence in row if sequence is not None]


def even_shares(wanted: Seq[int], total: int) -> list[int]:
    """`total` shared evenly, one entry for each of `wanted`: never more than that, and all of it while any wants more.

    At least 1 each as far as there is enough.
    """
    shares = [0] * len(wanted)
    for number, place in enumerate(sorted(range(len(wanted)), key=wanted.__getitem__)):
        shares[place] = min(wanted[place], max(total // (len(wanted) - number), 1), total)
        total -= shares[place]
    return shares
