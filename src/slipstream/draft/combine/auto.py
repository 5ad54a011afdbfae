"""Several drafters of which the engine's policy chooses one for each request and step, or none."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

from slipstream.config import SpeculativeConfig, check_types
from slipstream.core.proposal import EMPTY_PROPOSAL, Proposal
from slipstream.core.sequence import Sequence
from slipstream.draft.base import DraftContext, Observation
from slipstream.draft.combine.group import DrafterGroup, member_footprints
from slipstream.draft.combine.merging import text_of
from slipstream.draft.combine.rules import PlanRule, read_rules
from slipstream.draft.footprint import Footprint
from slipstream.draft.model.self_model import DRAFT_FORMAT, copy_pays
from slipstream.draft.model.shared_kv import check_shares
from slipstream.draft.proposers.proposal_shape import ShapeOptions
from slipstream.draft.registry import validate
from slipstream.draft.traits import DrafterTraits
from slipstream.errors import ConfigError

log = logging.getLogger(__name__)

SHAPE_KEYS = frozenset({"tree_top_k", "tree_choices", "num_draft_nodes"})
"""A drafter with one of these has a shape of its own choice."""


@dataclass(frozen=True, kw_only=True)
class AutoOptions:
    """Keys of `speculative_config` for `auto`."""

    drafters: list[Any] | None = None
    """What may be chosen from, each a `speculative_config` of its own; the verifier is theirs together. Chains are
    chosen in depth too, trees and lookups are taken or left. So an EAGLE head drafts chains here, unless `tree_top_k`
    or `tree_choices` says otherwise. None is `suffix` and, on a CPU with a target whose weights are
    wider than that, `layer_skip` in int8, unless the target has recurrent layers or cannot run some layers alone."""
    plan: list[Any] | None = None
    """What to do, instead of choosing: rules such as `{"drafter": 0, "num_speculative_tokens": 4, "max_requests": 8,
    "task": "code"}`, of which all keys may be left out. The rule with the smallest `max_requests` that a step's
    requests do not exceed holds; `drafter` counts from 0, and without it the rule does not speculate. A task with rules
    of its own takes no others. `slipstream advise` writes such plans."""

    def __post_init__(self) -> None:
        check_types(self, "auto")
        if self.drafters is not None and not self.drafters:
            raise ConfigError('auto drafters is empty; list drafters such as {"method": "suffix"}')
        for config in self.configs():
            if config.method in ("off", "auto"):
                raise ConfigError(
                    f"auto drafters has {config.method!r}; not drafting is always a choice of its own"
                )
            validate(config)
        self.rules()

    def rules(self) -> tuple[PlanRule, ...]:
        """The rules of `plan`, none without one; raises `ConfigError` where one is none."""
        if self.plan is None:
            return ()
        if self.drafters is None:
            raise ConfigError("auto plan names drafters by their place; list them as drafters")
        return read_rules(self.plan, len(self.drafters))

    def configs(self) -> list[SpeculativeConfig]:
        """The drafters' configurations; raises `ConfigError` where one is none."""
        for drafter in self.drafters or ():
            if isinstance(drafter, Mapping) and "verifier" in drafter:
                raise ConfigError("the drafters of auto share its verifier; set it next to drafters")
        return [_as_chain(SpeculativeConfig.from_mapping(drafter)) for drafter in self.drafters or ()]


class AutoDrafter(DrafterGroup):
    """The drafters from which the engine's policy chooses; its members are called directly."""

    Options = AutoOptions

    @classmethod
    def footprint(cls, options: Any, context: DraftContext) -> Footprint:
        """All members' together."""
        members = member_footprints(options.configs() or _usual(context), context)
        return Footprint.joined(members, DrafterTraits.joined([member.traits for member in members]))

    def __init__(self, options: AutoOptions, context: DraftContext) -> None:
        super().__init__(options, replace(context, is_priced=True), options.configs() or _usual(context))

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Proposal]:
        """The first drafter's proposals: outside an engine no policy chooses."""
        first = self.members[0]
        most = first.drafter.traits.max_nodes
        served = [place for place, sequence in enumerate(sequences) if first.serves(sequence)]
        answers = first.propose([sequences[n] for n in served], [min(budgets[n], most) for n in served])
        made = dict(zip(served, answers, strict=True))
        return [made.get(place, EMPTY_PROPOSAL) for place in range(len(sequences))]

    def observe(self, observations: Seq[Observation]) -> None:
        """The first drafter learns the verdicts, the others the texts."""
        self.members[0].observe(observations)
        for member in self.members[1:]:
            if member.drafter.traits.observes_all:
                member.observe([text_of(seen) for seen in observations])


def _as_chain(config: SpeculativeConfig) -> SpeculativeConfig:
    """The drafter without the tree that is its default: only a chain's depth is chosen by what it gains."""
    _, options = validate(config)
    if not isinstance(options, ShapeOptions) or options.tree_top_k == 1 or SHAPE_KEYS & config.options.keys():
        return config
    return replace(config, options={**config.options, "tree_top_k": 1, "num_draft_nodes": None})


def _usual(context: DraftContext) -> list[SpeculativeConfig]:
    """What needs no draft model and can run with the target."""
    suffix = SpeculativeConfig("suffix")
    if context.known_target is None or not copy_pays(DRAFT_FORMAT, context):
        return [suffix]
    try:
        check_shares("layer_skip", context.known_target)
    except ConfigError as error:
        log.info("auto drafts with suffix alone: %s", error)
        return [suffix]
    return [suffix, SpeculativeConfig("layer_skip", options={"quantization": DRAFT_FORMAT})]
