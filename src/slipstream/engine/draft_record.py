"""What was drafted in one step, until the policy is told what became of it."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from slipstream.control.policy import Policy
from slipstream.control.types import DraftCall, StepRequest
from slipstream.core.proposal import Proposal
from slipstream.core.sequence import Sequence
from slipstream.core.step import StepItem
from slipstream.draft.base import Observation
from slipstream.draft.combine.merging import depth_along, share_of

MOST_REPEATS = 15
"""Steps in a row that do as the one before them chose: the policy looks for better and measures between them."""


@dataclass(slots=True)
class DraftRecord:
    """One step's drafts. A step may be launched before the policy has been told of the one before it."""

    requests: dict[int, StepRequest] = field(default_factory=dict)
    """By sequence, those that decode, as the policy knows them; none without a policy."""
    calls: list[DraftCall] = field(default_factory=list)
    called: list[tuple[int, StepItem]] = field(default_factory=list)
    """Drafters that have to compute a text to draft, and for whom they were called."""
    num_prompt_rows: int = 0
    num_repeats: int = 0
    """Steps up to this one that do as one before them chose; 0: the policy chose for it."""

    @property
    def speculates(self) -> bool:
        """Whether something was to be drafted."""
        return any(request.choice.drafts for request in self.requests.values())

    def may_be_repeated(self, policy: Policy) -> bool:
        """Whether the next step may choose as this one."""
        return self.num_repeats < MOST_REPEATS and policy.may_repeat

    def repeated(self) -> DraftRecord:
        """The next step with the same choices, of which nothing is drafted yet."""
        requests = {
            number: StepRequest(number, each.task, each.limit, allowed=each.allowed, choice=each.choice)
            for number, each in self.requests.items()
        }
        return DraftRecord(requests, num_repeats=self.num_repeats + 1)

    def tell_begin(self, policy: Policy, items: Seq[StepItem]) -> None:
        """Tell the policy of a step that was launched before the one before it was over. Of its sequences only those of
        `items` are left."""
        self.requests = {item.sequence.id: self.requests[item.sequence.id] for item in items}
        if self.num_repeats:
            policy.repeat(self.speculates)
            for drafter, item in self.called:
                if item.sequence.id in self.requests:
                    policy.note_called(drafter, item.sequence.id, item.length_before)


class UncheckedDrafts:
    """Drafts of lookups that were not checked, until the text has grown past them."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Sequence, int, Proposal, int]] = []
        """Whose, the lookup, what it proposed, and the length of the text then."""

    def add(self, sequence: Sequence, lookup: int, proposal: Proposal, length: int) -> None:
        """One more, proposed behind so many tokens."""
        self._waiting.append((sequence, lookup, proposal, length))

    def score(self, policy: Policy, task_of: Callable[[Sequence], str]) -> None:
        """See whether what was looked up came true; a text that has not grown past it yet is waited for."""
        waiting: list[tuple[Sequence, int, Proposal, int]] = []
        for unchecked in self._waiting:
            sequence, lookup, proposal, length = unchecked
            grown = sequence.token_ids[length : length + proposal.depth]
            accepted = depth_along(proposal, grown)
            if accepted == len(grown) < proposal.depth and not sequence.finished:
                waiting.append(unchecked)
            else:
                policy.score(lookup, task_of(sequence), len(proposal), accepted)
        self._waiting = waiting

    def forget(self, sequence: Sequence) -> None:
        """Its text is over."""
        self._waiting = [each for each in self._waiting if each[0] is not sequence]


def own_share(item: StepItem, seen: Observation) -> Observation:
    """The observation for the drafter of an item's draft; the tree that was checked may hold only a part of it."""
    if item.proposal is item.drafted or not (len(item.proposal) or len(item.drafted)):
        return seen
    return share_of(seen, item.drafted, item.length_before)
