"""Merges several drafters' trees into one within a budget, and splits its verdict among them again.

The union of several drafts is SpecInfer's (Miao et al., "SpecInfer: accelerating large language model serving with
tree-based speculative inference and verification", ASPLOS 2024). The nodes within the budget are chosen by each
drafter's acceptance before the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from slipstream.core.proposal import EMPTY_PROPOSAL, ROOT, Proposal, ProposalKind
from slipstream.draft.base import Observation

PRIOR_ACCEPTANCE = 0.5
"""Prior acceptance probability of a best-ranked token; each further sibling has half of it."""
PRIOR_STEPS = 2.0
"""Weight of the prior, in steps."""
DECAY = 0.95
"""Factor by which older outcomes are discounted with each new one."""
MAX_RANK = 8
"""Siblings from this one on are counted together."""


class AcceptanceRecord:
    """Acceptance in one sequence given that the parent was accepted, by drafter, depth and rank among siblings."""

    def __init__(self) -> None:
        self._counts: dict[tuple[int, int, int], tuple[float, float]] = {}
        """(member, depth, rank) to discounted (steps, accepted)."""

    def chance(self, member: int, depth: int, rank: int) -> float:
        """Acceptance probability given an accepted parent; each depth's estimate is the prior of the next."""
        rank = min(rank, MAX_RANK)
        estimate = PRIOR_ACCEPTANCE ** (rank + 1)
        for above in range(1, depth + 1):
            steps, accepted = self._counts.get((member, above, rank), (0.0, 0.0))
            estimate = (accepted + PRIOR_STEPS * estimate) / (steps + PRIOR_STEPS)
        return estimate

    def learn(self, member: int, proposal: Proposal, committed: Seq[int]) -> None:
        """Compare a member's proposal, verified or not, with the tokens committed after it."""
        node = ROOT
        for depth, token in enumerate(committed, start=1):
            children = proposal.children.get(node, [])
            node = ROOT
            for rank, child in enumerate(children):
                right = proposal.token_ids[child] == token
                key = (member, depth, min(rank, MAX_RANK))
                steps, accepted = self._counts.get(key, (0.0, 0.0))
                self._counts[key] = (steps * DECAY + 1, accepted * DECAY + right)
                if right:
                    node = child
            if node == ROOT:
                return


@dataclass(slots=True)
class _MergedNode:
    token_id: int
    parent: int
    depth: int
    members: set[int] = field(default_factory=set)
    wrong: float = 1.0
    """Probability that no member's prediction of it holds, given that the parent is accepted."""
    score: float = 0.0
    """Probability that the whole path is accepted."""


def merge(
    proposals: Mapping[int, Proposal], record: AcceptanceRecord, max_nodes: int, by_votes: bool = False
) -> Proposal:
    """One tree of the members' `proposals`; equal tokens below one parent become one node.

    The `max_nodes` nodes with the highest acceptance probability are kept; `by_votes` ranks nodes of more members
    first. Either way a child never ranks before its parent. Unless all proposals are one-hot the result is coupled, for
    the coupled verifier only.
    """
    nodes: list[_MergedNode] = []
    places: dict[tuple[int, int], int] = {}
    for member, proposal in proposals.items():
        place: list[int] = []
        for token_id, parent, depth in zip(
            proposal.token_ids, proposal.parents, proposal.depths, strict=True
        ):
            above = ROOT if parent == ROOT else place[parent]
            at = places.setdefault((above, token_id), len(nodes))
            if at == len(nodes):
                nodes.append(_MergedNode(token_id, above, depth))
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
    """The part of `proposal` that is in the `checked` tree, and its rows of the logits: the root's 0, then its
    nodes'."""
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
    """Length of the longest prefix of `token_ids` that is a path from the proposal's root."""
    node = ROOT
    for depth, token in enumerate(token_ids):
        below = [child for child in proposal.children.get(node, []) if proposal.token_ids[child] == token]
        if not below:
            return depth
        node = below[0]
    return len(token_ids)


def node_along(proposal: Proposal, token_ids: Seq[int]) -> int | None:
    """The node at the end of the path `token_ids` from the root; None where the path is not in the proposal."""
    node = ROOT
    for token in token_ids:
        children = proposal.children.get(node, [])
        below = next((child for child in children if proposal.token_ids[child] == token), None)
        if below is None:
            return None
        node = below
    return node


def share_of(seen: Observation, proposal: Proposal, num_before: int | None) -> Observation:
    """The observation for the drafter of `proposal`, of which the verified tree holds all or part.

    `num_before` is the text's length when it was proposed; None where nothing was proposed.
    """
    part, rows = part_of(seen.proposal, proposal)
    accepted = [] if num_before is None else seen.sequence.token_ids[num_before:][: seen.num_accepted]
    logits = seen.logits if rows == list(range(len(seen.logits))) else seen.logits[rows]
    return Observation(seen.sequence, part, depth_along(part, accepted), logits, num_before, seen.was_cut)


def text_of(seen: Observation) -> Observation:
    """The observation for a drafter that did not propose for the sequence: the text alone."""
    return Observation(seen.sequence, EMPTY_PROPOSAL, 0, seen.logits[:1], seen.num_before, seen.was_cut)
