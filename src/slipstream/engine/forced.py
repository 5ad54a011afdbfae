"""A proposal under a grammar: without the tokens that it forbids, with the tokens that it forces."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from slipstream.core.proposal import ROOT, Proposal
from slipstream.sampling.grammars.grammar import Grammar


def under_grammar(proposal: Proposal, grammar: Grammar, output: Seq[int], max_nodes: int) -> Proposal:
    """`proposal` under `grammar`, after the answer `output`, at most `max_nodes` nodes; the same object if unchanged.

    Forced tokens are always accepted, so those after the text come first, then the drafter's own, then those after its
    leaves. A sampled proposal is returned as it is: dropping a sampled token because of its value would bias a
    classical verifier, and drafters that sample with `LogitsProcessor` respect the grammar already.
    """
    if proposal.draft_probs is not None:
        return proposal
    tree = _Tree(grammar, output, max_nodes)
    tree.force(ROOT)
    place = {ROOT: ROOT}
    for node, (token_id, parent) in enumerate(zip(proposal.token_ids, proposal.parents, strict=True)):
        above = place.get(parent)
        if above is not None and grammar.mask(output, tree.paths[above]) >> token_id & 1:
            at = tree.add(token_id, above)
            if at is not None:
                place[node] = at
    for leaf in set(range(len(tree.token_ids))) - set(tree.parents):
        tree.force(leaf)
    grown = Proposal(tuple(tree.token_ids), tuple(tree.parents), proposal.kind)
    return proposal if grown == proposal else grown


class _Tree:
    """A tree of draft tokens under construction, with the path of each node."""

    def __init__(self, grammar: Grammar, output: Seq[int], max_nodes: int) -> None:
        self._grammar = grammar
        self._output = output
        self._max_nodes = max_nodes
        self._places: dict[tuple[int, int], int] = {}
        self.token_ids: list[int] = []
        self.parents: list[int] = []
        self.paths: dict[int, tuple[int, ...]] = {ROOT: ()}

    def add(self, token_id: int, parent: int) -> int | None:
        """The node for `token_id` below `parent`, added if need be; None where there is no room for it."""
        at = self._places.get((parent, token_id))
        if at is None and len(self.token_ids) < self._max_nodes:
            at = self._places[parent, token_id] = len(self.token_ids)
            self.token_ids.append(token_id)
            self.parents.append(parent)
            self.paths[at] = (*self.paths[parent], token_id)
        return at

    def force(self, node: int | None) -> None:
        """Add the forced tokens that follow `node`."""
        while node is not None and len(self.token_ids) < self._max_nodes:
            token_id = self._grammar.forced(self._output, self.paths[node])
            node = None if token_id is None else self.add(token_id, node)
