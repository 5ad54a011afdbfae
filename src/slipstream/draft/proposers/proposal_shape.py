"""Which tree a drafter may propose, and how its tokens are chosen.

Dynamic trees: Li, Wei, Zhang and Zhang, "EAGLE-2: faster inference of language models with dynamic draft trees" (EMNLP
2024). Fixed trees are written as in Medusa (Cai et al., ICML 2024): a node is the list of ranks on its path.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

from slipstream.config import check_at_least, reject_unknown
from slipstream.core.proposal import ProposalKind, VerifierTraits
from slipstream.draft.traits import DrafterTraits
from slipstream.errors import ConfigError

METHOD_KINDS = {
    "greedy": frozenset({ProposalKind.ONE_HOT}),
    "coupled": frozenset({ProposalKind.COUPLED}),
    "probabilistic": frozenset(ProposalKind) - {ProposalKind.COUPLED},
}
"""How draft tokens are chosen, to the proposal kinds that come of it."""
SAMPLE_METHODS = ("auto", *METHOD_KINDS)


@dataclass(frozen=True, kw_only=True)
class ShapeOptions:
    """The keys of `speculative_config` that shape a proposal; drafters with probabilities inherit them."""

    num_speculative_tokens: int = 4
    """Depth: draft tokens in a chain, levels in a tree."""
    tree_top_k: int = 1
    """Draft tokens kept at each level; 1 is a chain."""
    confidence_threshold: float = 0.0
    """A chain ends before the product of the drafter's highest probabilities falls below this. The product is known
    before a token is sampled. 0 always drafts the full chain."""
    num_draft_nodes: int | None = None
    """Nodes of a dynamic tree; None is `num_speculative_tokens * tree_top_k`."""
    tree_choices: list[Any] | None = None
    """A fixed tree instead: one list of ranks a node. `[[0], [1], [0, 0]]` is the two best tokens, and the best token's
    best continuation. It replaces the three keys above."""
    draft_sample_method: str = "auto"
    """`greedy`: the most probable tokens. `coupled`: drawn with the target's own noise. `probabilistic`: drawn
    independently, siblings without replacement, for the classical verifiers; chains and fixed trees only. `auto`
    suits the verifier."""

    def check_shape(self, what: str) -> None:
        """Raise `ConfigError` for an invalid shape or method; `what` is the drafter's name in the message."""
        check_at_least(
            what, 1, num_speculative_tokens=self.num_speculative_tokens, tree_top_k=self.tree_top_k
        )
        reject_unknown([self.draft_sample_method], SAMPLE_METHODS, "draft_sample_method")
        threshold = self.confidence_threshold
        if not 0 <= threshold < 1:
            raise ConfigError(f"{what} confidence_threshold must be from 0 to below 1, got {threshold!r}")
        if threshold and (self.tree_top_k > 1 or self.tree_choices is not None):
            raise ConfigError(
                f"{what} confidence_threshold is for chains; a tree spends its nodes by confidence"
            )
        if self.num_draft_nodes is not None:
            check_at_least(what, 1, num_draft_nodes=self.num_draft_nodes)
            if self.tree_top_k == 1:
                raise ConfigError(f"{what} num_draft_nodes is for trees; set tree_top_k above 1")
        if self.tree_choices is not None:
            check_choices(what, self.tree_choices)
            if self.tree_top_k > 1:
                raise ConfigError(f"{what} has tree_choices and tree_top_k; a tree is fixed or dynamic")
        elif self.draft_sample_method == "probabilistic" and self.tree_top_k > 1:
            raise ConfigError("probabilistic drafts are chains or tree_choices; set tree_top_k to 1")


def check_choices(what: str, choices: Seq[Any]) -> None:
    """Raise `ConfigError` unless `choices` is a tree: every node's parent and better-ranked siblings are nodes too."""
    nodes: set[tuple[int, ...]] = set()
    for choice in choices:
        if not isinstance(choice, list | tuple) or not choice:
            raise ConfigError(f"{what} tree_choices must be lists of ranks such as [[0], [1], [0, 0]]")
        if any(type(rank) is not int or rank < 0 for rank in choice):
            raise ConfigError(f"{what} tree_choices: a rank is a whole number from 0, got {choice!r}")
        nodes.add(tuple(choice))
    for node in nodes:
        needed = [node[:-1]] if len(node) > 1 else []
        needed += [(*node[:-1], node[-1] - 1)] if node[-1] else []
        for other in needed:
            if other not in nodes:
                raise ConfigError(f"{what} tree_choices has {list(node)} but not {list(other)}")
    if not nodes:
        raise ConfigError(f"{what} tree_choices is empty; omit it for a chain")


@dataclass(frozen=True)
class ProposalShape:
    """Depth, width and sampling method of a drafter's proposals."""

    depth: int
    top_k: int
    num_nodes: int
    method: str
    """`greedy`, `coupled` or `probabilistic`."""
    widths: dict[tuple[int, ...], int] | None = None
    """A fixed tree: a node's path of ranks, () for the root, to its number of children."""

    @classmethod
    def of(cls, options: ShapeOptions, verifier: VerifierTraits) -> ProposalShape:
        """The shape that `options` request; raises `ConfigError` where the verifier cannot judge it."""
        dynamic = options.tree_top_k > 1
        method = options.draft_sample_method
        judged = [each for each, kinds in METHOD_KINDS.items() if kinds <= verifier.kinds]
        if method == "auto":
            preferred = ("coupled", "greedy") if dynamic else ("coupled", "probabilistic")
            method = next((each for each in preferred if each in judged), "greedy")
        if method not in judged:
            others = " or ".join(each for each in ("probabilistic", "greedy") if each in judged)
            raise ConfigError(
                f"verifier {verifier.name!r} cannot judge {method} drafts; "
                + (f"set draft_sample_method to {others}" if others else "use verifier 'coupled'")
            )
        if options.tree_choices is None:
            depth, top_k = options.num_speculative_tokens, options.tree_top_k
            return cls(depth, top_k, options.num_draft_nodes or depth * top_k, method)
        nodes = {tuple(choice) for choice in options.tree_choices}
        widths: dict[tuple[int, ...], int] = {}
        for node in nodes:
            widths[node[:-1]] = max(widths.get(node[:-1], 0), node[-1] + 1)
        return cls(max(map(len, nodes)), max(widths.values()), len(nodes), method, widths)

    def traits(self, own: DrafterTraits, options: ShapeOptions) -> DrafterTraits:
        """The traits of a drafter whose proposals have this shape, from what else it says of itself."""
        return replace(
            own,
            max_nodes=self.num_nodes,
            kinds=self.kinds,
            chain_length=self.depth if self.is_chain else None,
            ends_early=options.confidence_threshold > 0,
        )

    @property
    def is_chain(self) -> bool:
        return self.top_k == 1

    @property
    def is_dynamic(self) -> bool:
        """True for a tree whose nodes depend on their probabilities."""
        return not self.is_chain and self.widths is None

    @property
    def kinds(self) -> frozenset[ProposalKind]:
        """The proposal kinds that this shape and method can give."""
        return METHOD_KINDS[self.method]

    @property
    def logit_rows(self) -> int:
        """Rows of the drafter's logits and distributions that exist at once for one sequence."""
        level = 1 if self.is_chain else self.top_k
        return level + (self.num_nodes if self.method == "probabilistic" else 0)

    @property
    def max_stored(self) -> int:
        """The most nodes that are fed back to the drafter: all but those of the deepest level."""
        if self.widths is not None:
            return sum(1 for ranks in self.widths if ranks)
        return (self.depth - 1) * self.top_k
