"""Measures a drafter's acceptance by depth and rank among siblings, for planning fixed trees."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import fields, replace
from typing import TYPE_CHECKING

from slipstream.config import check_at_least
from slipstream.core.proposal import ROOT
from slipstream.core.step import StepItem
from slipstream.draft.model.sequoia import RankAcceptance, comb
from slipstream.draft.proposers.proposal_shape import ShapeOptions
from slipstream.engine.factory import create_engine
from slipstream.engine.speculation import ParsedSpeculation
from slipstream.errors import ConfigError
from slipstream.sampling.params import SamplingParams

if TYPE_CHECKING:
    from slipstream.config import SpeculativeConfig
    from slipstream.engine.llm import LLM
    from slipstream.text.prompts import Prompt

SHAPE_KEYS = ("num_speculative_tokens", "tree_top_k", "num_draft_nodes", "tree_choices")
"""A drafter's keys that determine the shape of its proposals."""
NO_SHAPE = {"tree_top_k": 1, "num_draft_nodes": None}
"""Values of the keys that a fixed tree replaces, for drafters with other defaults."""
MIN_STEPS = 20
"""Depths that fewer steps reached are ignored."""


class RankCounts:
    """Counts the rank of the accepted sibling at every node of the accepted path that has children."""

    def __init__(self, depth: int, width: int) -> None:
        self.reached = [0] * depth
        """Entry i: number of times that draft tokens at depth i + 1 were verified below an accepted path."""
        self.accepted = [[0] * width for _ in range(depth)]
        """Accepted draft tokens by depth and rank."""

    def add(self, items: Seq[StepItem]) -> None:
        """Count one step."""
        for item in items:
            node, level = ROOT, 0
            for token in item.emitted_token_ids:
                children = item.proposal.children.get(node, [])
                if not children:
                    break
                self.reached[level] += 1
                ranks = [item.proposal.token_ids[child] for child in children]
                if token not in ranks:
                    break
                self.accepted[level][ranks.index(token)] += 1
                node, level = children[ranks.index(token)], level + 1

    def rates(self) -> RankAcceptance:
        """Acceptance rates of the depths with enough steps; raises `ConfigError` where there are none."""
        rows = [
            tuple(count / reached for count in accepted)
            for accepted, reached in zip(self.accepted, self.reached, strict=True)
            if reached >= MIN_STEPS
        ]
        if not rows:
            raise ConfigError(
                f"only {self.reached[0]} steps had drafts, and {MIN_STEPS} are needed; give more or longer prompts"
            )
        return RankAcceptance(tuple(rows))


def measure_rank_acceptance(
    llm: LLM,
    speculative: SpeculativeConfig,
    prompts: Seq[Prompt],
    params: SamplingParams | Seq[SamplingParams],
    *,
    depth: int = 6,
    width: int = 8,
) -> RankCounts:
    """Answer `prompts` with the drafter of `speculative` and a tree of `width` siblings at each of `depth` levels.

    The target is that of `llm`, whose own drafter is not used. Every deeper level is below the best-ranked node of the
    level above, so the counts of a depth are of steps whose best-ranked tokens were accepted so far. `params` is one
    for all prompts or one for each. Raises `ConfigError` for a drafter without `tree_choices`.
    """
    check_at_least("rank acceptance", 1, depth=depth, width=width)
    engine = create_engine(llm.engine.config, with_tree(speculative, comb(depth, width)), like=llm.engine)
    counts = RankCounts(depth, width)
    engine.on_observe = counts.add
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    for number, (prompt, own) in enumerate(zip(prompts, each, strict=True)):
        engine.add_request(str(number), prompt, own)
    while engine.has_unfinished:
        engine.step()
    if engine.stats().num_draft_failures:
        raise ConfigError(f"drafter {speculative.method!r} failed; run it alone with --debug to see why")
    return counts


def with_tree(speculative: SpeculativeConfig, tree_choices: list[list[int]]) -> SpeculativeConfig:
    """The same drafter with a fixed tree; raises `ConfigError` where it does not support one."""
    cls = ParsedSpeculation.of(speculative).drafter
    if not issubclass(cls.Options, ShapeOptions):
        raise ConfigError(f"drafter {speculative.method!r} has no fixed trees; choose one with tree_choices")
    options = {key: value for key, value in speculative.options.items() if key not in SHAPE_KEYS}
    defaults = {field.name: field.default for field in fields(cls.Options)}
    unset = {key: value for key, value in NO_SHAPE.items() if defaults[key] != value}
    return replace(speculative, options={**options, **unset, "tree_choices": tree_choices})
