"""What replicas' engines have done, added up so that no sum falls where a replica dies or begins anew."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, fields

MAX_ENGINES = 8192
"""Engines whose last word is remembered; a thousand replicas leave room for those that come back."""
MAX_GONE = 256
"""Replicas that are gone and still have counts of their own; all of them stay in the sum."""


@dataclass(frozen=True, slots=True)
class ReplicaCounts:
    """What an engine has done since it became a replica. All of it only grows."""

    num_steps: int = 0
    num_passes: int = 0
    """Target passes that produced tokens, an answer at a time."""
    num_output_tokens: int = 0
    num_prompt_tokens: int = 0
    """Prompt tokens of requests that have begun here, those that go on here among them."""
    num_cached_tokens: int = 0
    """Those of them that were found in the engine's own cache."""
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_preemptions: int = 0
    num_draft_failures: int = 0
    num_replayed_passes: int = 0
    num_eager_passes: int = 0
    """Passes outside a recorded graph, where passes are recorded."""
    draft_s: float = 0.0
    verify_s: float = 0.0

    def plus(self, other: ReplicaCounts) -> ReplicaCounts:
        """Both together."""
        return ReplicaCounts(*(getattr(self, name) + getattr(other, name) for name in COUNTS))

    def since(self, before: ReplicaCounts) -> ReplicaCounts:
        """What came on top of `before`; nothing less than zero."""
        return ReplicaCounts(*(max(getattr(self, name) - getattr(before, name), 0) for name in COUNTS))


COUNTS = tuple(field.name for field in fields(ReplicaCounts))
NOTHING = ReplicaCounts()


class Ledger:
    """The counts of each replica and of all together, from what each reports as its whole.

    A replica that begins anew under its old name counts from zero, and one whose connection broke does not: its engine
    has a name of its own, which tells them apart.
    """

    def __init__(self) -> None:
        self.total = NOTHING
        self._engines: OrderedDict[str, ReplicaCounts] = OrderedDict()
        self._replicas: OrderedDict[str, ReplicaCounts] = OrderedDict()

    def hear(self, replica: str, engine: str, counts: ReplicaCounts) -> None:
        """An engine's counts since it became a replica; without a name of its own they are not counted."""
        if not engine:
            return
        gained = counts.since(self._engines.get(engine, NOTHING))
        self._engines[engine] = counts
        self._engines.move_to_end(engine)
        if len(self._engines) > MAX_ENGINES:
            self._engines.popitem(last=False)
        self._replicas[replica] = self._replicas.get(replica, NOTHING).plus(gained)
        self._replicas.move_to_end(replica)
        self.total = self.total.plus(gained)

    def forget(self, num_present: int) -> None:
        """Drop the counts of replicas that are gone longest, where there are many; so many are present."""
        while len(self._replicas) > num_present + MAX_GONE:
            self._replicas.popitem(last=False)

    def __iter__(self) -> Iterator[tuple[str, ReplicaCounts]]:
        return iter(self._replicas.items())

    def of(self, replica: str) -> ReplicaCounts:
        """The counts of all engines that were this replica."""
        return self._replicas.get(replica, NOTHING)
