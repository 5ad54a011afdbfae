"""A proposal under a grammar: without what it refuses, with the tokens that it leaves no choice about."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from slipstream.core import ROOT, Proposal
from slipstream.sampling.grammars.grammar import Grammar


def under_grammar(proposal: Proposal, grammar: Grammar, output: Seq[int], max_nodes: int) -> Proposal:
    """`proposal`, at most `max_nodes` nodes, after the answer `output`; itself where there is nothing to change.

    Forced tokens are certain, so those behind the text come first, then what the drafter guessed, then those behind its
    leaves. They are what the target itself must say, not a text that would be tokenised anew. A drawn proposal stays as
    it is: dropping what was drawn for what it turned out to be would bias a classical verifier, and whoever draws by
    `LogitsProcessor` has drawn under the grammar already.
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
    """Nodes with the tokens on their paths."""

    def __init__(self, grammar: Grammar, output: Seq[int], max_nodes: int) -> None:
        self._grammar = grammar
        self._output = output
        self._max_nodes = max_nodes
        self._places: dict[tuple[int, int], int] = {}
        self.token_ids: list[int] = []
        self.parents: list[int] = []
        self.paths: dict[int, tuple[int, ...]] = {ROOT: ()}

    def add(self, token_id: int, parent: int) -> int | None:
        """The node that says `token_id` below `parent`; None where there is no room for it."""
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
