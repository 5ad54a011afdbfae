"""How often a drafter's first, second, third guess is accepted, at each depth: what a fixed tree is planned from."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import fields, replace
from typing import TYPE_CHECKING

from slipstream.config import check_at_least
from slipstream.core import ROOT, StepItem
from slipstream.draft.model.growth import GrowthOptions
from slipstream.draft.model.sequoia import RankAcceptance, comb
from slipstream.engine.engine import Engine
from slipstream.engine.speculation import validate
from slipstream.errors import ConfigError
from slipstream.sampling.params import SamplingParams

if TYPE_CHECKING:
    from slipstream.config import SpeculativeConfig
    from slipstream.engine.llm import LLM
    from slipstream.text.prompts import Prompt

SHAPE_KEYS = ("num_speculative_tokens", "tree_top_k", "num_draft_nodes", "tree_choices")
"""The keys of a drafter that say what its proposals look like."""
NO_SHAPE = {"tree_top_k": 1, "num_draft_nodes": None}
"""Those that a fixed tree takes the place of, for drafters that have another default."""
MIN_STEPS = 20
"""A depth that was reached less often says nothing of its own."""


class RankCounts:
    """Counts which sibling was accepted, at every node of the accepted path that had children."""

    def __init__(self, depth: int, width: int) -> None:
        self.reached = [0] * depth
        """Entry i: times that guesses at depth i + 1 were checked below an accepted path."""
        self.accepted = [[0] * width for _ in range(depth)]
        """By depth and rank."""

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
        """The shares, for the depths that were reached often enough; raises `ConfigError` where none was."""
        rows = [
            tuple(count / reached for count in accepted)
            for accepted, reached in zip(self.accepted, self.reached, strict=True)
            if reached >= MIN_STEPS
        ]
        if not rows:
            raise ConfigError(
                f"ranks were seen in {self.reached[0]} steps, and {MIN_STEPS} are needed; give more or longer prompts"
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

    `llm` lends its target; its own drafter is not used. Every deeper level hangs below the best guess of the one
    above, so the counts of a depth are of the steps whose best guesses were right so far. `params` is one for all or
    one for each. Raises `ConfigError` for a drafter that takes no `tree_choices`.
    """
    check_at_least("rank acceptance", 1, depth=depth, width=width)
    engine = Engine(llm.engine.config, with_tree(speculative, comb(depth, width)), like=llm.engine)
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
    """The same drafter with a fixed tree for its shape; `ConfigError` where it takes none."""
    cls, _ = validate(speculative)
    if not issubclass(cls.Options, GrowthOptions):
        raise ConfigError(
            f"drafter {speculative.method!r} has no fixed trees; choose one that takes tree_choices"
        )
    options = {key: value for key, value in speculative.options.items() if key not in SHAPE_KEYS}
    defaults = {field.name: field.default for field in fields(cls.Options)}
    unset = {key: value for key, value in NO_SHAPE.items() if defaults[key] != value}
    return replace(speculative, options={**options, **unset, "tree_choices": tree_choices})
