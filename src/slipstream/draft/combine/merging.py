"""Several drafters' trees in one: united below one text, cut to one budget, and taken apart again.

The union of several drafts is SpecInfer's (Miao et al., "SpecInfer: accelerating large language model serving with
tree-based speculative inference and verification", ASPLOS 2024). Which nodes survive the budget is decided by what was
known before the step: how often each drafter's guesses were right so far.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from slipstream.core import EMPTY_PROPOSAL, ROOT, Proposal, ProposalKind
from slipstream.draft.base import Observation

FIRST_GUESS = 0.5
"""The chance that a best guess is right, before anything has been seen; each further sibling has half of it."""
PRIOR_STEPS = 2.0
"""How many steps that expectation weighs."""
MEMORY = 0.95
"""What an outcome still weighs when the next one of its kind has come."""
MAX_RANK = 8
"""Siblings from this one on are counted together."""


class TrackRecord:
    """How often guesses were right in one text, by drafter, depth and rank among siblings, given their parent was."""

    def __init__(self) -> None:
        self._counts: dict[tuple[int, int, int], tuple[float, float]] = {}
        """(member, depth, rank) to (steps, accepted), old ones weighing less."""

    def chance(self, member: int, depth: int, rank: int) -> float:
        """The chance that the guess is right if its parent is. What is known of a depth is expected of the next."""
        rank = min(rank, MAX_RANK)
        estimate = FIRST_GUESS ** (rank + 1)
        for above in range(1, depth + 1):
            steps, accepted = self._counts.get((member, above, rank), (0.0, 0.0))
            estimate = (accepted + PRIOR_STEPS * estimate) / (steps + PRIOR_STEPS)
        return estimate

    def learn(self, member: int, proposal: Proposal, committed: Seq[int]) -> None:
        """Compare a member's own proposal, checked or not, with the tokens that were committed after it."""
        node = ROOT
        for depth, token in enumerate(committed, start=1):
            children = proposal.children.get(node, [])
            node = ROOT
            for rank, child in enumerate(children):
                right = proposal.token_ids[child] == token
                key = (member, depth, min(rank, MAX_RANK))
                steps, accepted = self._counts.get(key, (0.0, 0.0))
                self._counts[key] = (steps * MEMORY + 1, accepted * MEMORY + right)
                if right:
                    node = child
            if node == ROOT:
                return


@dataclass(slots=True)
class _Node:
    token_id: int
    parent: int
    depth: int
    members: set[int] = field(default_factory=set)
    wrong: float = 1.0
    """The chance that every member that guessed it is wrong, if the parent is right."""
    score: float = 0.0
    """The chance that the whole path is right."""


def merge(
    proposals: Mapping[int, Proposal], record: TrackRecord, max_nodes: int, by_votes: bool = False
) -> Proposal:
    """One tree of the members' `proposals`, equal tokens below one parent being one node.

    The `max_nodes` nodes that are most likely to be accepted stay; `by_votes` puts those first that more members
    guessed. Either way no child comes before its parent, because it has neither more voters nor a better chance. With
    anything but chosen tokens among them the result is coupled: only the coupled verifier may judge it.
    """
    nodes: list[_Node] = []
    places: dict[tuple[int, int], int] = {}
    for member, proposal in proposals.items():
        place: list[int] = []
        for token_id, parent, depth in zip(
            proposal.token_ids, proposal.parents, proposal.depths, strict=True
        ):
            above = ROOT if parent == ROOT else place[parent]
            at = places.setdefault((above, token_id), len(nodes))
            if at == len(nodes):
                nodes.append(_Node(token_id, above, depth))
            rank = proposal.children[parent].index(len(place))
            place.append(at)
            if member not in nodes[at].members:
                nodes[at].members.add(member)
                nodes[at].wrong *= 1 - record.chance(member, depth, rank)
    for node in nodes:
        node.score = (1 - node.wrong) * (1.0 if node.parent == ROOT else nodes[node.parent].score)

    def worth(at: int) -> tuple[int, float, int]:
        return (-len(nodes[at].members) if by_votes else 0, -nodes[at].score, nodes[at].depth)

    best = sorted(range(len(nodes)), key=worth)[:max_nodes]
    best.sort(key=lambda at: (nodes[at].depth, *worth(at)))
    index = {ROOT: ROOT} | {at: number for number, at in enumerate(best)}
    chosen = all(proposal.kind is ProposalKind.ONE_HOT for proposal in proposals.values() if len(proposal))
    return Proposal(
        tuple(nodes[at].token_id for at in best),
        tuple(index[nodes[at].parent] for at in best),
        ProposalKind.ONE_HOT if chosen else ProposalKind.COUPLED,
    )


def part_of(checked: Proposal, proposal: Proposal) -> tuple[Proposal, list[int]]:
    """What of `proposal` is in the tree that was `checked`, and the row of its logits, the root's 0 first."""
    places = {key: node for node, key in enumerate(zip(checked.parents, checked.token_ids, strict=True))}
    found = {ROOT: ROOT}
    for node, (token_id, parent) in enumerate(zip(proposal.token_ids, proposal.parents, strict=True)):
        at = places.get((found[parent], token_id)) if parent in found else None
        if at is not None:
            found[node] = at
    rows = [at + 1 for at in found.values()]
    del found[ROOT]
    if len(found) == len(proposal):
        return proposal, rows
    if not found:
        return EMPTY_PROPOSAL, rows
    kept = list(found)
    number = {ROOT: ROOT} | {node: i for i, node in enumerate(kept)}
    part = Proposal(
        tuple(proposal.token_ids[node] for node in kept),
        tuple(number[proposal.parents[node]] for node in kept),
        proposal.kind,
        None if proposal.draft_probs is None else proposal.draft_probs[kept],
    )
    return part, rows


def depth_along(proposal: Proposal, token_ids: Seq[int]) -> int:
    """How many of `token_ids`, one after the other, the proposal holds from its top down."""
    node = ROOT
    for depth, token in enumerate(token_ids):
        below = [child for child in proposal.children.get(node, []) if proposal.token_ids[child] == token]
        if not below:
            return depth
        node = below[0]
    return len(token_ids)


def node_along(proposal: Proposal, token_ids: Seq[int]) -> int | None:
    """The node that all of `token_ids`, one after the other, lead to from the top; None where one is missing."""
    node = ROOT
    for token in token_ids:
        children = proposal.children.get(node, [])
        below = next((child for child in children if proposal.token_ids[child] == token), None)
        if below is None:
            return None
        node = below
    return node


def share_of(seen: Observation, proposal: Proposal, num_before: int | None) -> Observation:
    """What the author of `proposal` is to learn from what was checked, a tree that holds some of it and more.

    `num_before` is how many tokens the text had when it was proposed; None where nothing was.
    """
    part, rows = part_of(seen.proposal, proposal)
    accepted = [] if num_before is None else seen.sequence.token_ids[num_before:][: seen.num_accepted]
    logits = seen.logits if rows == list(range(len(seen.logits))) else seen.logits[rows]
    return Observation(seen.sequence, part, depth_along(part, accepted), logits, num_before, seen.was_cut)
