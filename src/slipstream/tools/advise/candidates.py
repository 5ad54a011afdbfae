"""What may be recommended: drafters, and for those that draft chains the depths that are considered."""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from slipstream.config import SpeculativeConfig
from slipstream.draft.methods import (
    DRAFT_MODEL,
    LAYER_SKIP,
    LOOKUPS,
    METHODS,
    NGRAM,
    OWN_WEIGHTS,
    SUFFIX,
    short_name,
)
from slipstream.draft.model.self_model import DRAFT_FORMAT, no_gain
from slipstream.draft.proposers.proposal_shape import ShapeOptions
from slipstream.errors import ConfigError
from slipstream.models.outline import outline_model

DEPTHS = (1, 2, 3, 4, 6, 8)
"""Considered, as far as the drafter goes."""
CHAIN_DEPTH = 6
"""The deepest chain that is considered where the caller names none."""
HEAD_DEPTH = 4
"""Depth of heads and of the target's own weights: as `CHAIN_DEPTH`."""
NGRAM_DEPTHS = (2, 4, 8)
TREE = {"tree_top_k": 3, "num_speculative_tokens": 4, "num_draft_nodes": 8}
"""The tree that is considered in addition to the chain of each drafter that can draft one."""
OFF_NAME = "off"


class Setting(NamedTuple):
    """What is done for a request: a candidate by its place, and the levels that it drafts."""

    candidate: int = -1
    """-1 is speculation off."""
    depth: int = 0
    """0 is as deep as the candidate is configured."""

    @property
    def is_off(self) -> bool:
        return self.candidate < 0


OFF = Setting()


@dataclass(frozen=True)
class Candidate:
    """A drafter with its options."""

    name: str
    speculative: SpeculativeConfig
    depths: tuple[int, ...] = (0,)

    @property
    def is_lookup(self) -> bool:
        """True where it is called again instead of recorded."""
        return self.speculative.method in LOOKUPS

    def at(self, depth: int) -> SpeculativeConfig:
        """Return its configuration with this depth; 0 leaves it as it is."""
        if not depth:
            return self.speculative
        options = {**self.speculative.options, "num_speculative_tokens": depth}
        return replace(self.speculative, options=options)

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "name": self.name,
            "method": self.speculative.method,
            "options": dict(self.speculative.options),
            "depths": list(self.depths),
        }


def settings(candidates: Seq[Candidate]) -> list[Setting]:
    """Every setting but off."""
    return [Setting(place, depth) for place, candidate in enumerate(candidates) for depth in candidate.depths]


def setting_name(setting: Setting, candidates: Seq[Candidate]) -> str:
    """'off', 'suffix', 'draft γ=4'."""
    if setting.is_off:
        return OFF_NAME
    name = candidates[setting.candidate].name
    return f"{name} γ={setting.depth}" if setting.depth else name


def make_candidates(chosen: Seq[SpeculativeConfig], with_trees: bool) -> list[Candidate]:
    """The lookups, then each drafter in `chosen` with its chain depths, and its tree where it can draft one.

    Raises `ConfigError` for a drafter that cannot be scored on a recorded text, or whose verifier is not `coupled`.
    """
    found = [
        Candidate(
            NGRAM.name, SpeculativeConfig(NGRAM.name, options={"num_speculative_tokens": 8}), NGRAM_DEPTHS
        ),
        Candidate(SUFFIX.name, SpeculativeConfig(SUFFIX.name)),
    ]
    for config in chosen:
        if config.method == "off":
            continue
        _check(config)
        for one in _variants(config, with_trees):
            if all(one.speculative != other.speculative for other in found):
                found.append(_renamed(one, found))
    return found


def own_draft(
    quantization: str | None, device: str, model: str | None = None, **reading: Any
) -> SpeculativeConfig | None:
    """The target's own layers in int8 as its draft, which needs no other model; None where it cannot save bytes.

    `model` is a checkpoint that may hold its weights quantised, None the embedded target. `reading` has the options
    that its configuration is read with. Raises `ModelError` where that cannot be read.
    """
    if quantization is not None or device not in ("auto", "cpu"):
        return None
    if model is not None and no_gain(DRAFT_FORMAT, outline_model(model, **reading)):
        return None
    return SpeculativeConfig(LAYER_SKIP.name, options={"quantization": DRAFT_FORMAT, "skip_layers": []})


def _check(config: SpeculativeConfig) -> None:
    spec = METHODS.get(config.method)
    why = "" if spec is None else spec.unscored
    if spec is LAYER_SKIP and not {"skip_layers", "exit_layer"} & config.options.keys():
        why = "it searches its layers while it runs; give skip_layers or exit_layer"
    if why:
        raise ConfigError(
            f"{config.method!r} cannot be scored on a recorded text: {why}. `slipstream bench` measures it"
        )
    if config.verifier != SpeculativeConfig.verifier:
        raise ConfigError(
            f"advice scores drafts for the coupled verifier, which decides alike whatever was drafted; "
            f"omit verifier {config.verifier!r}"
        )


def _variants(config: SpeculativeConfig, with_trees: bool) -> list[Candidate]:
    from slipstream.engine.speculation import ParsedSpeculation

    options = ParsedSpeculation.of(config).options
    name = _name(config)
    if not isinstance(options, ShapeOptions):
        return [Candidate(name, config)]
    shaped = {"tree_top_k", "tree_choices", "num_draft_nodes"} & config.options.keys()
    is_tree = options.tree_top_k > 1 or options.tree_choices is not None
    tree = Candidate(f"{name} tree", config)
    if is_tree and shaped:
        return [tree]
    if is_tree:  # by default: `auto` would draft chains
        own = {"tree_top_k": options.tree_top_k, "num_draft_nodes": options.num_draft_nodes}
        tree = replace(tree, speculative=replace(config, options={**config.options, **own}))
    given = config.options.get("num_speculative_tokens")
    deepest = given or (CHAIN_DEPTH if config.method == DRAFT_MODEL.name else HEAD_DEPTH)
    depths = (*(depth for depth in DEPTHS if depth < deepest), deepest)
    as_chain = {"tree_top_k": 1, "num_draft_nodes": None} if is_tree else {}
    chain = replace(config, options={**config.options, **as_chain, "num_speculative_tokens": deepest})
    found = [Candidate(name, chain, depths)]
    # Where the target drafts for itself, a step of each level costs too much for more than its best token.
    if with_trees and not options.confidence_threshold and config.method not in OWN_WEIGHTS:
        found.append(tree if is_tree else replace(tree, speculative=_as_tree(config)))
    return found


def _as_tree(config: SpeculativeConfig) -> SpeculativeConfig:
    return replace(config, options={**config.options, **TREE})


def _name(config: SpeculativeConfig) -> str:
    if config.method == LAYER_SKIP.name and config.options.get("skip_layers") == []:
        return f"self {config.options.get('quantization')}"
    return short_name(config.method)


def _renamed(candidate: Candidate, others: Seq[Candidate]) -> Candidate:
    """Return it with the model's name, then a number, where another one has its name."""
    taken = {other.name for other in others}
    name = candidate.name
    if name in taken and "model" in candidate.speculative.options:
        name = f"{name} {Path(str(candidate.speculative.options['model'])).name}"
    base, number = name, 2
    while name in taken:
        name, number = f"{base} #{number}", number + 1
    return replace(candidate, name=name)


def key_of(candidates: Seq[Candidate]) -> str:
    """Equal for equal candidates; what was recorded for others is of no use."""
    return json.dumps([candidate.as_json() for candidate in candidates], sort_keys=True, default=str)
