"""A drafter that has others draft during decoding, and proposes nothing of theirs.

The target decodes alone, so the text, its noise and its hidden states are those without speculation. What each of the
others would have proposed is kept, or timed. Under coupled verification a draft token is right or wrong whichever
drafter runs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any

from slipstream.config import SpeculativeConfig, check_types
from slipstream.core.proposal import EMPTY_PROPOSAL, Proposal
from slipstream.core.sequence import Sequence
from slipstream.draft.base import DraftContext, Observation
from slipstream.draft.combine.group import DrafterGroup

NOT_ASKED = -1


@dataclass(frozen=True, kw_only=True)
class RecordingOptions:
    """Keys of the recording's own `speculative_config`."""

    drafters: list[Any] = field(default_factory=list)
    """Each a `speculative_config` of its own."""
    room: int = 1
    """The most draft tokens that a step may check, where steps are replayed."""

    def __post_init__(self) -> None:
        check_types(self, "recording")


@dataclass(frozen=True, slots=True)
class RecordedDraft:
    """What one drafter would have proposed at one place of one answer."""

    request_id: str
    member: int
    position: int
    """Tokens of the answer before it."""
    proposal: Proposal


@dataclass(frozen=True, slots=True)
class ReplayedStep:
    """What the next steps are to do: which drafter drafts how many levels, and how many tokens are checked."""

    member: int = NOT_ASKED
    levels: int = 0
    num_checked: int = 0
    """A sequence."""
    right: bool = False
    """Whether the checked tokens are those that come, as far as these are known."""


@dataclass(slots=True)
class DraftTimes:
    """What one step's drafting took."""

    seconds: float = 0.0
    num_sequences: int = 0
    prompt_seconds: dict[int, float] = field(default_factory=dict)
    """By drafter, for the prompts that the target computes in the step."""


class RecordingDrafter(DrafterGroup):
    """Calls all of its members for everything and proposes nothing; or replays steps of chosen sizes, timed."""

    summary = "records what other drafters would have proposed"

    Options = RecordingOptions
    traits = replace(DrafterGroup.traits, observes_all=False)

    def __init__(self, options: RecordingOptions, context: DraftContext) -> None:
        configs = [SpeculativeConfig.from_mapping(drafter) for drafter in options.drafters]
        super().__init__(options, context, configs)
        self.traits = replace(
            self.traits,
            max_nodes=max(options.room, self.traits.max_nodes),
            observes_all=False,
            remembers=False,  # nothing is proposed but what the caller says
        )
        self.replay: ReplayedStep | None = None
        """What a replayed step does; None records."""
        self.drafts: list[RecordedDraft] = []
        """What was recorded; the caller takes it out."""
        self.times = DraftTimes()
        """Times of the last replayed step."""
        self.texts: dict[str, list[int]] = {}
        """Request id to the answer that is known to come."""

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Proposal]:
        """Empty proposals while it records, those of the replay otherwise."""
        if self.replay is None:
            self._record(sequences, budgets)
            return [EMPTY_PROPOSAL] * len(sequences)
        return self._replay(self.replay, sequences, budgets)

    def observe(self, observations: Seq[Observation]) -> None:
        """Members that learn from verdicts are no candidates."""
        return

    def _record(self, sequences: Seq[Sequence], budgets: Seq[int]) -> None:
        for number, guard in enumerate(self.members):
            if guard.drafter.traits.looks_up:
                continue  # these are called again, of the text alone
            most = guard.drafter.traits.max_nodes
            proposals = guard.propose(sequences, [min(budget, most) for budget in budgets])
            self.drafts += [
                RecordedDraft(sequence.request_id, number, sequence.num_output_tokens, proposal)
                for sequence, budget, proposal in zip(sequences, budgets, proposals, strict=True)
                if budget
            ]

    def _replay(self, replay: ReplayedStep, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Proposal]:
        self.times = DraftTimes(num_sequences=sum(budget > 0 for budget in budgets))
        if any(sequence.num_pending > 1 for sequence in sequences):  # prompts: for all members, apart
            for number, guard in enumerate(self.members):
                started_s = time.perf_counter()
                guard.propose(sequences, [0] * len(sequences))
                self.times.prompt_seconds[number] = time.perf_counter() - started_s
            return [EMPTY_PROPOSAL] * len(sequences)
        if replay.member != NOT_ASKED:
            guard = self.members[replay.member]
            limit = min(replay.levels, guard.drafter.traits.max_nodes)
            started_s = time.perf_counter()
            guard.propose(sequences, [min(budget, limit) for budget in budgets])
            self.times.seconds = time.perf_counter() - started_s
        return [
            self._known(sequence, min(budget, replay.num_checked), replay.right)
            for sequence, budget in zip(sequences, budgets, strict=True)
        ]

    def _known(self, sequence: Sequence, number: int, right: bool) -> Proposal:
        """A chain of `number` tokens that are what comes, or are not."""
        if number <= 0:
            return EMPTY_PROPOSAL
        done = sequence.num_output_tokens
        coming = self.texts.get(sequence.request_id, [])[done : done + number]
        coming = coming + [0] * (number - len(coming))
        other = [token if right else (token + 1) % self.context.vocab_size for token in coming]
        return Proposal.chain(other)
