"""Several drafters in one: all at once, one after the other, or each for its own kind of request."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from slipstream.config import SpeculativeConfig, check_at_least, check_types, reject_unknown
from slipstream.core import EMPTY_PROPOSAL, Proposal, ProposalKind, Sequence
from slipstream.draft.base import DraftContext, Observation
from slipstream.draft.combine.group import DrafterGroup
from slipstream.draft.combine.merging import TrackRecord, merge, share_of
from slipstream.draft.registry import validate
from slipstream.errors import ConfigError

MODES = ("merge", "first", "vote", "route")
UNITING = ("merge", "vote")
"""The modes that make one tree of all members' guesses."""


@dataclass(frozen=True, kw_only=True)
class EnsembleOptions:
    """Keys of `speculative_config` for `ensemble`."""

    members: list[Any]
    """The drafters, each as a `speculative_config` of its own; the verifier is the ensemble's."""
    mode: str = "merge"
    """`merge`: all guesses in one tree, the most probable first. `vote`: the same, guesses of more members first.
    `first`: members are asked in order until one has a guess, so cheap ones come first. `route`: one member a request,
    by its `task`."""
    num_draft_nodes: int | None = None
    """The most nodes of a proposal; None is the largest member's own number."""
    min_tokens: int = 1
    """With `first`: a guess of fewer tokens than this in depth does not keep the next member from being asked; the
    deepest guess wins if no member has as many."""
    routes: Mapping[str, Any] | None = None
    """With `route`: a request's `task` to the member's number, from 0, or its `method`."""
    default_route: int | str = 0
    """With `route`: the member for every other task."""

    def __post_init__(self) -> None:
        check_types(self, "ensemble")
        reject_unknown([self.mode], MODES, "ensemble mode")
        check_at_least("ensemble", 1, min_tokens=self.min_tokens)
        if self.num_draft_nodes is not None:
            check_at_least("ensemble", 1, num_draft_nodes=self.num_draft_nodes)
        if not self.members:
            raise ConfigError('ensemble members is empty; list drafters such as {"method": "suffix"}')
        for config in self.configs():
            validate(config)
        if self.routes is not None and self.mode != "route":
            raise ConfigError(f"ensemble routes are for mode 'route', and mode is {self.mode!r}")
        for member in [self.default_route, *(self.routes or {}).values()]:
            self.number(member)

    def configs(self) -> list[SpeculativeConfig]:
        """The members' configurations; raises `ConfigError` where one is none."""
        for member in self.members:
            if isinstance(member, Mapping) and "verifier" in member:
                raise ConfigError("an ensemble's members share its verifier; set it beside members")
        return [SpeculativeConfig.from_mapping(member) for member in self.members]

    def number(self, member: Any) -> int:
        """Which member a number or a method names; raises `ConfigError` where that is none or several."""
        methods = [config.method for config in self.configs()]
        if type(member) is int and 0 <= member < len(methods):
            return member
        if isinstance(member, str) and methods.count(member) == 1:
            return methods.index(member)
        raise ConfigError(
            f"ensemble route {member!r} names no single member; give a number below {len(methods)} "
            f"or one of {', '.join(methods)}"
        )


@dataclass(slots=True)
class _Round:
    """What the members proposed for one sequence in one step."""

    length: int
    """Tokens of the text then."""
    proposals: dict[int, Proposal] = field(default_factory=dict)
    """By member; those that were not asked, or had nothing, are absent."""


class EnsembleDrafter(DrafterGroup):
    """Asks other drafters and unites or chooses among their proposals.

    A member that raises or breaks its contract is retired for that sequence; the others go on. Each member is told
    what became of its own guesses, with the target's logits behind them, whoever else had made them too.
    """

    summary = "several drafters whose drafts are united, voted on or tried in turn"

    Options = EnsembleOptions

    def __init__(self, options: EnsembleOptions, context: DraftContext) -> None:
        super().__init__(options, context, options.configs())
        for name, member in zip(self.names, self.members, strict=True):
            drawn = member.drafter.kinds_made() - {ProposalKind.ONE_HOT}
            if drawn and not context.verifier.accepts_coupled and options.mode in UNITING:
                raise ConfigError(
                    f"verifier {context.verifier.name!r} cannot judge drawn draft tokens of several drafters in one "
                    f"tree; for {name} set draft_sample_method to greedy, or use mode 'first' or verifier 'coupled'"
                )
        self._routes = {task: options.number(member) for task, member in (options.routes or {}).items()}
        self._default = options.number(options.default_route)
        self._rounds: dict[int, _Round] = {}
        self._records: dict[int, TrackRecord] = {}

    # --- proposing --------------------------------------------------------------------------------------------

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Proposal]:
        """One proposal a sequence, made of the members' as `mode` says."""
        rounds = [_Round(len(sequence.token_ids)) for sequence in sequences]
        asked = list(
            zip(sequences, [min(budget, self.max_nodes()) for budget in budgets], rounds, strict=True)
        )
        for number, member in enumerate(self.members):
            most = member.drafter.max_nodes()
            wanted = [
                (sequence, min(budget, most), round_)
                for sequence, budget, round_ in asked
                if member.serves(sequence) and self._wants(number, sequence, round_)
            ]
            proposals = member.ask([each[0] for each in wanted], [each[1] for each in wanted])
            for (_, _, round_), proposal in zip(wanted, proposals, strict=True):
                if len(proposal):
                    round_.proposals[number] = proposal
        result: list[Proposal] = []
        for sequence, budget, round_ in asked:
            result.append(self._unite(sequence, budget, round_) if round_.proposals else EMPTY_PROPOSAL)
            self._rounds.pop(sequence.id, None)
            if round_.proposals:
                self._rounds[sequence.id] = round_
        return result

    def _wants(self, number: int, sequence: Sequence, round_: _Round) -> bool:
        """True where the member is to be asked, given what those before it proposed."""
        if self.options.mode == "route":
            return number == self._routes.get(sequence.task, self._default)
        if self.options.mode == "first":
            return not any(self._is_enough(proposal) for proposal in round_.proposals.values())
        return True

    def _is_enough(self, proposal: Proposal) -> bool:
        """Drawn tokens always are: a classical verifier is exact only if none is dropped for what it turned out to be,
        and how deep a drawn tree is may depend on that."""
        drawn = proposal.draft_probs is not None
        return drawn or max(proposal.depths) >= self.options.min_tokens

    def _unite(self, sequence: Sequence, budget: int, round_: _Round) -> Proposal:
        proposals = round_.proposals
        if self.options.mode in UNITING:
            record = self._records.setdefault(sequence.id, TrackRecord())
            return merge(proposals, record, budget, by_votes=self.options.mode == "vote")
        enough = [proposal for proposal in proposals.values() if self._is_enough(proposal)]
        return enough[0] if enough else max(proposals.values(), key=lambda proposal: max(proposal.depths))

    def kinds_made(self) -> frozenset[ProposalKind]:
        made = super().kinds_made()
        united = self.options.mode in UNITING and made != {ProposalKind.ONE_HOT}
        return frozenset({ProposalKind.ONE_HOT, ProposalKind.COUPLED}) if united else made

    def max_nodes(self) -> int:
        """`num_draft_nodes`, or the largest member's."""
        members = sum(member.drafter.max_nodes() for member in self.members)
        return min(self.options.num_draft_nodes or super().max_nodes(), members)

    # --- learning ---------------------------------------------------------------------------------------------

    def observe(self, observations: Seq[Observation]) -> None:
        """Tell each member what became of its own nodes; count how often its guesses were right."""
        rounds = [self._rounds.pop(seen.sequence.id, None) for seen in observations]
        for seen, round_ in zip(observations, rounds, strict=True):
            record = self._records.get(seen.sequence.id)
            if round_ is not None and record is not None:
                for number, proposal in round_.proposals.items():
                    record.learn(number, proposal, seen.sequence.token_ids[round_.length :])
        for number, member in enumerate(self.members):
            member.observe(
                [_own(number, seen, round_) for seen, round_ in zip(observations, rounds, strict=True)]
            )

    def release(self, sequence: Sequence) -> None:
        self._rounds.pop(sequence.id, None)
        self._records.pop(sequence.id, None)
        super().release(sequence)

    def num_held(self) -> int:
        return max(super().num_held(), len(self._rounds), len(self._records))


def _own(number: int, seen: Observation, round_: _Round | None) -> Observation:
    """What one member is to learn from what was checked."""
    proposal = EMPTY_PROPOSAL if round_ is None else round_.proposals.get(number, EMPTY_PROPOSAL)
    return share_of(seen, proposal, seen.num_before if round_ is None else round_.length)
