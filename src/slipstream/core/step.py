"""What a step knows of one sequence, and what it runs."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from slipstream.core.proposal import EMPTY_PROPOSAL, ROOT, Proposal, Verdict
from slipstream.core.sequence import Sequence

if TYPE_CHECKING:
    import torch


@dataclass(slots=True, eq=False)
class StepItem:
    """All that one step knows of one sequence. Each phase of the step fills in its part.

    The scheduler makes it; from then on `sequence.token_ids` stays as it is until the verdict's tokens are appended.
    """

    sequence: Sequence
    num_rows: int
    """Pending tokens whose keys and values the step computes."""
    max_draft_tokens: int = 0
    """The most draft tokens that may be checked."""

    decodes: bool = field(init=False)
    """True when the rows reach the last committed token, so that this step yields at least one token."""
    length_before: int = field(init=False)
    """Tokens of the text when the step began."""

    # launched
    is_entered: bool = False
    """Whether the entries of the rows count as valid already, though the pass may still be running."""

    # proposed
    proposal: Proposal = EMPTY_PROPOSAL
    method: str = ""
    """The drafter that was called, by name; `off` where `auto` called none."""
    drafter: int | None = None
    """Its number among the engine's drafters; None where none was called, or a lookup had too little."""
    drafted: Proposal = EMPTY_PROPOSAL
    """What it proposed; a grammar may have changed the tree that is checked."""
    found: Proposal = EMPTY_PROPOSAL
    """What the lookup that was called first proposed, used or not."""
    is_forced: bool = False
    """All draft tokens are those that the grammar forces: no drafter proposed any."""

    # computed
    rows: torch.Tensor = field(init=False, repr=False)
    """[computed rows that matter, vocab]: the target's raw logits; see `ModelRunner.forward`."""
    logits: torch.Tensor = field(init=False, repr=False)
    """[1 + n, vocab], the last of `rows`: row 0 follows the text as it was, row i + 1 follows node i of the proposal.
    Only of a sequence that decodes. Without columns where the pass has found `chosen` alone."""

    chosen: Seq[int] | None = None
    """The target's own token of each row of `logits`, where the pass has chosen them; -1 in a row that it could not
    choose for."""
    walked: Verdict | None = None
    """What they make of the proposal that the pass checked, where the pass has walked down it. The entries of the
    accepted nodes lie behind the text then."""

    # judged
    num_given: int = 0
    """Leading nodes of the proposal, a chain, that are taken as they are: a lossy judge has kept them."""
    num_dropped_nodes: int = 0
    """Nodes that the pass computed in addition to the proposal: the question to a judge."""

    # verified
    verdict: Verdict = field(init=False, repr=False)
    """Only of a sequence that decodes."""

    # emitted: a stop rule may cut what was accepted
    num_emitted: int = 0
    """Tokens that were appended to the text."""
    kept_nodes: tuple[int, ...] = ()
    """Accepted nodes whose tokens were emitted, top down."""
    reached: int = 0
    """How many positions of the proposal were judged: the accepted ones, and the one at which nothing was accepted
    though something was proposed."""

    def __post_init__(self) -> None:
        self.decodes = self.num_rows == self.sequence.num_pending
        self.length_before = len(self.sequence.token_ids)

    def resolve(self) -> None:
        """Have its proposal known to the host."""
        if self.proposal.is_pending:
            known = self.proposal.known()
            if self.drafted is self.proposal:
                self.drafted = known
            self.proposal = known

    def record_emitted(self, num_emitted: int) -> None:
        """The first `num_emitted` tokens of the verdict were appended; a stop rule has cut off the others."""
        self.num_emitted = num_emitted
        self.kept_nodes = self.verdict.accepted[:num_emitted]
        self.reached = len(self.kept_nodes)
        if (
            not self.was_cut
        ):  # the target's own token decided the next position, if there was a proposal for it
            last = self.kept_nodes[-1] if self.kept_nodes else ROOT
            self.reached += last in self.proposal.children

    @property
    def num_accepted(self) -> int:
        """Accepted draft tokens that were emitted."""
        return len(self.kept_nodes)

    @property
    def was_cut(self) -> bool:
        """True where the target's own token was not emitted: the answer ended at an accepted draft token, or before a
        token that may not come, perhaps before any."""
        return self.num_emitted == len(self.kept_nodes)

    @property
    def emitted_token_ids(self) -> list[int]:
        """The tokens that the step appended to the text."""
        return self.sequence.token_ids[self.length_before : self.length_before + self.num_emitted]


@dataclass(slots=True)
class StepPlan:
    """Who runs in a step, and who was preempted because the cache was full."""

    scheduled: list[StepItem] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)

    @property
    def decoding(self) -> list[StepItem]:
        """Those that get at least one token."""
        return [item for item in self.scheduled if item.decodes]
