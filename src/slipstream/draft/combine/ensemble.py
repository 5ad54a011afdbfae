"""Several drafters combined: united in one tree, tried in order, or routed by a request's task."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any

from slipstream.config import SpeculativeConfig, check_at_least, check_types, reject_unknown
from slipstream.core.proposal import EMPTY_PROPOSAL, Proposal, ProposalKind
from slipstream.core.sequence import Sequence
from slipstream.draft.base import DraftContext, Observation
from slipstream.draft.combine.group import DrafterGroup, member_footprints
from slipstream.draft.combine.merging import AcceptanceRecord, merge, share_of
from slipstream.draft.footprint import Footprint
from slipstream.draft.registry import validate
from slipstream.draft.traits import DrafterTraits
from slipstream.errors import ConfigError

MODES = ("merge", "first", "vote", "route")
UNITING = ("merge", "vote")
"""The modes that unite all members' draft tokens in one tree."""


@dataclass(frozen=True, kw_only=True)
class EnsembleOptions:
    """Keys of `speculative_config` for `ensemble`."""

    members: list[Any]
    """The drafters, each as a `speculative_config` of its own; the verifier is the ensemble's."""
    mode: str = "merge"
    """`merge`: one tree of all members' draft tokens, the most probable first. `vote`: the same, tokens of more members
    first. `first`: the first member in order with a proposal, so list cheap ones first. `route`: one member a request,
    by its `task`."""
    num_draft_nodes: int | None = None
    """The most nodes of a proposal; None is the largest of the members' own maxima."""
    min_tokens: int = 1
    """With `first`: the depth from which a proposal is used without trying the next member. If no proposal is as deep,
    the deepest one is used."""
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
        """The members' configurations; raises `ConfigError` for an invalid one."""
        for member in self.members:
            if isinstance(member, Mapping) and "verifier" in member:
                raise ConfigError("an ensemble's members share its verifier; set it next to members")
        return [SpeculativeConfig.from_mapping(member) for member in self.members]

    def number(self, member: Any) -> int:
        """Index of the member that a number or a method names; raises `ConfigError` unless it is exactly one."""
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
    """The members' proposals for one sequence in one step."""

    length: int
    """Length of the committed text then."""
    proposals: dict[int, Proposal] = field(default_factory=dict)
    """Member to its proposal; without members that were not called or proposed nothing."""


class EnsembleDrafter(DrafterGroup):
    """Unites several drafters' proposals, or chooses among them.

    A member that raises or breaks its contract is retired for that sequence; the others go on. Each member observes the
    verdicts of its own draft tokens, with the target's logits behind them.
    """

    Options = EnsembleOptions

    @classmethod
    def footprint(cls, options: Any, context: DraftContext) -> Footprint:
        """All members' together."""
        members = member_footprints(options.configs(), context)
        return Footprint.joined(members, _united(options, [member.traits for member in members]))

    def __init__(self, options: EnsembleOptions, context: DraftContext) -> None:
        super().__init__(options, context, options.configs())
        for name, member in zip(self.names, self.members, strict=True):
            drawn = member.drafter.traits.kinds - {ProposalKind.ONE_HOT}
            if drawn and not context.verifier.accepts_coupled and options.mode in UNITING:
                raise ConfigError(
                    f"verifier {context.verifier.name!r} cannot verify sampled tokens of several drafters in one "
                    f"tree; for {name} set draft_sample_method to greedy, or use mode 'first' or verifier 'coupled'"
                )
        self.traits = _united(options, [drafter.traits for drafter in self.parts])
        self._routes = {task: options.number(member) for task, member in (options.routes or {}).items()}
        self._default = options.number(options.default_route)
        self._rounds: dict[int, _Round] = self.by_sequence()
        self._records: dict[int, AcceptanceRecord] = self.by_sequence()

    # --- proposing --------------------------------------------------------------------------------------------

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Proposal]:
        """One proposal a sequence, combined from the members' by `mode`."""
        rounds = [_Round(len(sequence.token_ids)) for sequence in sequences]
        requests = list(
            zip(sequences, [min(budget, self.traits.max_nodes) for budget in budgets], rounds, strict=True)
        )
        for number, member in enumerate(self.members):
            most = member.drafter.traits.max_nodes
            wanted = [
                (sequence, min(budget, most), round_)
                for sequence, budget, round_ in requests
                if member.serves(sequence) and self._wants(number, sequence, round_)
            ]
            proposals = member.propose([each[0] for each in wanted], [each[1] for each in wanted])
            for (_, _, round_), proposal in zip(wanted, proposals, strict=True):
                if len(proposal):
                    round_.proposals[number] = proposal
        result: list[Proposal] = []
        for sequence, budget, round_ in requests:
            result.append(self._unite(sequence, budget, round_) if round_.proposals else EMPTY_PROPOSAL)
            self._rounds.pop(sequence.id, None)
            if round_.proposals:
                self._rounds[sequence.id] = round_
        return result

    def _wants(self, number: int, sequence: Sequence, round_: _Round) -> bool:
        """True where the member should propose too, given the proposals of those before it."""
        if self.options.mode == "route":
            return number == self._routes.get(sequence.task, self._default)
        if self.options.mode == "first":
            return not any(self._is_enough(proposal) for proposal in round_.proposals.values())
        return True

    def _is_enough(self, proposal: Proposal) -> bool:
        """True where no further member is needed. Always true for sampled tokens: a classical verifier is exact only if
        none is dropped because of its value, and a sampled tree's depth may depend on the values."""
        drawn = proposal.draft_probs is not None
        return drawn or max(proposal.depths) >= self.options.min_tokens

    def _unite(self, sequence: Sequence, budget: int, round_: _Round) -> Proposal:
        proposals = round_.proposals
        if self.options.mode in UNITING:
            record = self._records.setdefault(sequence.id, AcceptanceRecord())
            return merge(proposals, record, budget, by_votes=self.options.mode == "vote")
        enough = [proposal for proposal in proposals.values() if self._is_enough(proposal)]
        return enough[0] if enough else max(proposals.values(), key=lambda proposal: max(proposal.depths))

    # --- learning ---------------------------------------------------------------------------------------------

    def observe(self, observations: Seq[Observation]) -> None:
        """Pass each member the verdicts of its own nodes, and count its acceptance."""
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

    def record(self, sequence: Sequence) -> AcceptanceRecord | None:
        """What became of the members' draft tokens in this sequence; None before its first proposal."""
        return self._records.get(sequence.id)


def _united(options: EnsembleOptions, members: Seq[DrafterTraits]) -> DrafterTraits:
    """An ensemble's traits: at most `num_draft_nodes` nodes, and at most all that the members propose together."""
    joined = DrafterTraits.joined(members)
    kinds = joined.kinds
    if options.mode in UNITING and kinds != {ProposalKind.ONE_HOT}:
        kinds = frozenset({ProposalKind.ONE_HOT, ProposalKind.COUPLED})
    most = sum(member.max_nodes for member in members)
    return replace(joined, kinds=kinds, max_nodes=min(options.num_draft_nodes or joined.max_nodes, most))


def _own(number: int, seen: Observation, round_: _Round | None) -> Observation:
    """One member's part of an observation."""
    proposal = EMPTY_PROPOSAL if round_ is None else round_.proposals.get(number, EMPTY_PROPOSAL)
    return share_of(seen, proposal, seen.num_before if round_ is None else round_.length)
