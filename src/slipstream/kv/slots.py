"""Which slot holds which token: what every layout of the cache can be asked. No tensors.

A *slot map* says where a sequence's tokens lie: its item i is the slot of token i, and a slice of it is the map of a
range of tokens. It is a `range` where the slots are contiguous, so that those who read them need no copy, and any other
sequence of numbers where they are not. No code outside this package computes with slots.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar, NamedTuple

SlotMap = Sequence[int]
"""Item i is the slot of token i."""

Move = Callable[[int, int, int], None]
"""`move(source, destination, count)` copies entries between slots; the ranges may overlap."""


class SharedPrefix(NamedTuple):
    """The first entries of a sequence that were copied from another one, or to it: the same bits, read from either."""

    family: int
    """Sequences of one family hold the same entries, as far as the shorter `length` of two of them."""
    length: int
    """Entries."""


class Held(NamedTuple):
    """Valid entries of a running sequence, or retained ones of a finished sequence."""

    tenant: str
    token_ids: Sequence[int]
    slots: SlotMap
    """Where the entries of these tokens are."""


class SlotAccounting(ABC):
    """Bounded memory for keys and values, in slots of one token each.

    An *owner* is the id of a running sequence. What a finished one leaves is *retained*: it is evicted as soon as room
    is needed, but a later prompt of the same tenant that begins with the same tokens reuses it. Tokens are compared by
    what they are called with here: entries that differ by more than their text have ids of their own
    (`Sequence.entry_ids`).
    """

    unit: ClassVar[int] = 1
    """Slots are given out in multiples of this many, as far as there are so many."""

    def __init__(self, num_slots: int, move: Move, prefix_caching: bool = True) -> None:
        self.num_slots = num_slots
        self._move = move
        self._prefix_caching = prefix_caching

    @property
    @abstractmethod
    def num_owners(self) -> int:
        """Running sequences that hold slots."""

    @property
    @abstractmethod
    def num_held(self) -> int:
        """Slots of running sequences; 0 when the engine is idle."""

    @property
    @abstractmethod
    def num_retained(self) -> int:
        """Slots of finished sequences, kept for prefix reuse and evicted on demand."""

    @abstractmethod
    def __contains__(self, owner: int) -> bool: ...

    @abstractmethod
    def slots(self, owner: int) -> SlotMap:
        """The slots reserved for `owner`, the first token's first. Valid until the next `open` or `reserve`.

        Later calls never change what was returned, so a kept map can be compared with a new one to see what has moved.
        """

    @abstractmethod
    def token_ids(self, owner: int) -> Sequence[int]:
        """The tokens whose entries are valid; they lie in the first of `slots(owner)`."""

    def num_valid(self, owner: int) -> int:
        """How many leading tokens of `owner` have valid entries."""
        return len(self.token_ids(owner))

    def shared(self, owner: int) -> SharedPrefix | None:
        """What `owner` holds in common with others, None for a layout that does not keep count of it.

        Only of a layout whose slots are consecutive, for a pass over rows behind these entries.
        """
        return None

    @abstractmethod
    def open(self, owner: int, token_ids: Sequence[int], tenant: str = "", reuse: bool = True) -> int | None:
        """Give `owner` room for `token_ids` and one more; returns how many leading entries are already valid.

        Never reuses the last token's entry: its row must be computed for its logits. Returns None, with nothing
        changed for running sequences, when there is no room.
        """

    @abstractmethod
    def reserve(self, owner: int, num_tokens: int) -> bool:
        """Make sure `owner` has at least `num_tokens` slots; False, with nothing lost, when there is no room.

        Valid entries, of any owner, are kept; and those of an owner behind them too, where its slots are consecutive: a
        step in flight may be writing them.
        """

    @abstractmethod
    def commit(self, owner: int, token_ids: Sequence[int]) -> None:
        """The next `len(token_ids)` entries of `owner` are valid and hold these tokens."""

    @abstractmethod
    def truncate(self, owner: int, num_tokens: int) -> None:
        """Only the first `num_tokens` entries of `owner` are valid, if there were more."""

    @abstractmethod
    def close(self, owner: int, retain: bool = True) -> None:
        """End `owner`'s claim. The entries are retained for prefix reuse when that can be of use."""

    @abstractmethod
    def clear(self) -> None:
        """Give up everything that is retained."""

    @abstractmethod
    def contents(self) -> Iterable[Held]:
        """All that is held, by running sequences and for reuse."""

    @abstractmethod
    def integrity(self) -> list[str]:
        """Violated invariants; empty when there are none."""
