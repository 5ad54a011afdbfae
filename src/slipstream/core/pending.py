"""Numbers of a draft, such as its tokens, that a device has computed and the host has not read."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, overload

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class PendingTail:
    """What a step in flight adds to a text, which the device knows and the host does not."""

    most: int
    """The most tokens that it adds. The next step is prepared for the text with all of them."""
    tokens: PendingNumbers
    """The last tokens of the text, `most` and at least two of them; the last alone where nothing is drafted."""
    shift: torch.Tensor | None
    """int64 [1]: by how much positions that are counted from the end of the text are to be moved, 0 or less; None: by
    nothing, it adds one token."""


class PendingNumbers(Seq[int]):
    """Reads its numbers, and waits for the device, when one of them is asked for; but for that a tuple.

    A pass takes them from `tensor` as they are, and `resolve` is told what they were once the pass's result is read.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        """`tensor` is int64 [n], and is not written to anymore."""
        self.tensor = tensor
        self._numbers: tuple[int, ...] | None = None

    @property
    def is_pending(self) -> bool:
        """Whether the host does not know them yet."""
        return self._numbers is None

    def resolve(self, numbers: Seq[int]) -> None:
        """What they are, from someone who has read them with others."""
        self._numbers = tuple(numbers)

    def known(self) -> tuple[int, ...]:
        """The numbers; waits for the device where they are pending."""
        if self._numbers is None:
            self._numbers = tuple(self.tensor.tolist())
        return self._numbers

    def __len__(self) -> int:
        return self.tensor.shape[0]

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...
    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        return self.known()[index]

    def __eq__(self, other: object) -> bool:
        return self.known() == (other.known() if isinstance(other, PendingNumbers) else other)

    def __hash__(self) -> int:
        return hash(self.known())

    def __repr__(self) -> str:
        return f"PendingNumbers of {len(self)}" if self.is_pending else repr(self.known())
