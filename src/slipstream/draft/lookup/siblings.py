"""Samples of one prompt draft for each other: with what the target said along them, drawn with each one's own noise.

After STAND (Song et al., "Accelerated test-time scaling with model-free speculative sampling", 2025): n-grams are kept
with the target's logits, and drafts are drawn from these with Gumbel noise. Here the noise is the one that the target's
own token is drawn with, so that a token that is likely among the siblings is drafted where this sample will choose it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, NamedTuple

from slipstream.config import check_at_least, check_types
from slipstream.core.bounded import BoundedDict
from slipstream.core.proposal import EMPTY_PROPOSAL, ROOT, Proposal, ProposalKind
from slipstream.core.sequence import Sequence
from slipstream.draft.base import DraftContext, Drafter, Observation
from slipstream.draft.lookup.ngram_rows import ENTRY_BYTES, LOGIT_BYTES, ORDERS, NgramRow, NgramRows
from slipstream.draft.top_tokens import top_tokens
from slipstream.draft.traits import DrafterTraits, TableGrowth
from slipstream.errors import ConfigError
from slipstream.sampling.noise import Noise, gumbel_at
from slipstream.sampling.params import SamplingParams

LEAD = 6.0
"""Nats below the best logit, divided by the temperature: tokens below that are not drawn."""
SPREAD = {4: 0.35, 3: 0.6, 2: 0.8, 1: 1.2}
"""How far the logits behind an n-gram are off, in nats, by its length: the probability of each token is computed with
it."""
TRUST = {4: 0.85, 3: 0.8, 2: 0.6, 1: 0.45}
"""How often an n-gram of this length says what comes at all, before anything was seen: measured on the embedded pair,
eight samples at temperature 0.7."""
PRIOR_WEIGHT = 16.0
MOST_WEIGHT = 4000.0
"""Promised acceptances that count."""


@dataclass(frozen=True, kw_only=True)
class SiblingsOptions:
    """Keys of `speculative_config` for `siblings`."""

    num_draft_nodes: int = 11
    """The most nodes of the tree."""
    num_speculative_tokens: int = 8
    """The most levels of the tree."""
    num_successors: int = 8
    """The target's best tokens that are kept behind each n-gram."""
    min_path_prob: float = 0.35
    """A node is drafted while the estimated chance that it is accepted is at least this."""
    max_draft_rows: int = 32
    """The most nodes of a step, of all samples together: the likeliest are drafted."""
    share: str = "request"
    """Who drafts for each other: `request`, the answers of one request with `n` above 1, or `tenant`, all requests of
    a tenant."""
    max_entries: int = 16_384
    """N-grams kept for each request or tenant."""
    max_stores: int = 8
    """Requests or tenants whose n-grams are kept, the most recently served ones."""

    def __post_init__(self) -> None:
        check_types(self, "siblings")
        if self.share not in ("request", "tenant"):
            raise ConfigError(f"siblings share must be 'request' or 'tenant', got {self.share!r}")
        if not 0 < self.min_path_prob <= 1:
            raise ConfigError(
                f"siblings min_path_prob must be above 0 and at most 1, got {self.min_path_prob}"
            )
        check_at_least(
            "siblings",
            1,
            num_draft_nodes=self.num_draft_nodes,
            max_draft_rows=self.max_draft_rows,
            num_speculative_tokens=self.num_speculative_tokens,
            num_successors=self.num_successors,
            max_entries=self.max_entries,
            max_stores=self.max_stores,
        )


class _Likeliest(NamedTuple):
    """The likeliest token behind a text."""

    length: int
    """Tokens of the text."""
    token: int
    order: int
    """Order of the n-gram that it follows."""
    promised: float
    """The chance of it, as the n-gram's row says."""


class _Trust:
    """How often what follows an n-gram of some length is what its rows say, learned from what was accepted."""

    def __init__(self) -> None:
        self._promised = dict.fromkeys(ORDERS, PRIOR_WEIGHT)
        self._accepted = {order: PRIOR_WEIGHT * TRUST[order] for order in ORDERS}

    def of(self, order: int) -> float:
        """The share of promised acceptance that came true."""
        return self._accepted[order] / self._promised[order]

    def learn(self, likeliest: _Likeliest, token: int) -> None:
        """The target chose `token` where this was the likeliest, drafted or not."""
        order = likeliest.order
        self._promised[order] += likeliest.promised
        self._accepted[order] += token == likeliest.token
        if self._promised[order] > MOST_WEIGHT:  # what was long ago counts less
            self._promised[order] *= 0.5
            self._accepted[order] *= 0.5


@dataclass
class _SampleGroup:
    """What the answers that draft for each other have in common."""

    rows: NgramRows
    trust: _Trust = field(default_factory=_Trust)
    running: set[int] = field(default_factory=set)
    """Ids of the sequences that were met and not released."""


class SiblingsDrafter(Drafter):
    """Drafts trees from what the target said behind the same n-grams in this answer and its siblings.

    Under a verifier that accepts coupled drafts the tokens below a node are the best of logit / temperature + noise,
    with the target's noise at that position; under others the most probable ones, which come from no distribution.
    With `share` "request" a request of one answer gets nothing and costs nothing, and the n-grams are dropped with its
    last answer. Nothing crosses tenants.
    """

    Options = SiblingsOptions
    traits = DrafterTraits(
        kinds=frozenset({ProposalKind.ONE_HOT, ProposalKind.COUPLED}), looks_up=True, remembers=True
    )

    def __init__(self, options: SiblingsOptions, context: DraftContext) -> None:
        super().__init__(options, context)
        self._num_successors = min(options.num_successors, context.vocab_size)
        self._groups: BoundedDict[tuple[str, str | None], _SampleGroup] = BoundedDict(options.max_stores)
        """By tenant and, where answers of one request share, its id."""
        self._likeliest: dict[int, _Likeliest] = {}
        """By sequence: what was likeliest when it was drafted for."""

    @classmethod
    def configured(cls, options: Any, context: DraftContext) -> DrafterTraits:
        """With n-grams of every request or tenant, up to their bound; of running texts, those of every row."""
        what = f"n-grams with logits, at most {options.max_entries:,} for each request"
        entry_bytes = ENTRY_BYTES + LOGIT_BYTES * min(options.num_successors, context.vocab_size)
        most = options.max_entries * options.max_stores * entry_bytes
        if options.share == "request":
            num_rows = len(ORDERS) * (1 + options.num_draft_nodes)
            table = TableGrowth(what=what, bytes_per_token=num_rows * entry_bytes, max_bytes=most)
        else:
            table = TableGrowth(what=what, fixed_bytes=most)
        own = super().configured(options, context)
        return replace(own, max_nodes=options.num_draft_nodes, tables=(table,))

    def _key(self, sequence: Sequence) -> tuple[str, str | None] | None:
        """Return whose n-grams serve the sequence; None for a lone answer, which has no siblings."""
        if self.options.share == "tenant":
            return sequence.tenant, None
        return (sequence.tenant, sequence.request_id) if sequence.params.n > 1 else None

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Proposal]:
        """One tree a sequence: the nodes that are most likely to be accepted, whosever they are.

        The empty proposal where nothing is known behind a text's last tokens.
        """
        trees = [self._tree(sequence, budget) for sequence, budget in zip(sequences, budgets, strict=True)]
        frontier: list[_DraftNode] = []
        for tree in trees:
            if tree is not None:
                frontier += tree.roots()
                if tree.likeliest is not None:
                    self._likeliest[tree.sequence.id] = tree.likeliest
        heapq.heapify(frontier)
        num_left = self.options.max_draft_rows
        while frontier and num_left:
            candidate = heapq.heappop(frontier)
            if candidate.tree.is_full():
                continue
            num_left -= 1
            for below in candidate.tree.take(candidate):
                heapq.heappush(frontier, below)
        return [EMPTY_PROPOSAL if tree is None else self._drafted(tree) for tree in trees]

    def _tree(self, sequence: Sequence, budget: int) -> _SiblingTree | None:
        key = self._key(sequence) if budget > 0 else None
        group = None if key is None else self._groups.get(key)
        if group is None:
            return None
        options = self.options
        max_nodes = min(budget, options.num_draft_nodes)
        max_depth = min(budget, options.num_speculative_tokens)
        coupled = self.context.verifier.accepts_coupled
        return _SiblingTree(
            sequence, group.rows, coupled, group.trust, options.min_path_prob, max_nodes, max_depth
        )

    def _drafted(self, tree: _SiblingTree) -> Proposal:
        if not tree.token_ids:
            return EMPTY_PROPOSAL
        kind = ProposalKind.COUPLED if self.context.verifier.accepts_coupled else ProposalKind.ONE_HOT
        return Proposal(tuple(tree.token_ids), tuple(tree.parents), kind)

    def observe(self, observations: Seq[Observation]) -> None:
        """Keep what the target said behind every checked row of answers that have siblings."""
        for seen in observations:
            key = self._key(seen.sequence)
            if key is None:
                continue
            group = self._groups.touch(key, lambda: _SampleGroup(NgramRows(self.options.max_entries)))
            group.running.add(seen.sequence.id)
            best = top_tokens(seen.logits, self._num_successors)  # [1 + n, successors]
            best_ids, best_logits = best.tolist(), seen.logits.gather(1, best).tolist()
            end = tuple(seen.sequence.token_ids[: seen.length_before][-max(ORDERS) :])
            texts = {ROOT: end}
            group.rows.add(end, NgramRow(tuple(best_ids[0]), tuple(best_logits[0])))
            likeliest = self._likeliest.pop(seen.sequence.id, None)
            came = seen.sequence.token_ids[seen.length_before :]
            if likeliest is not None and likeliest.length == seen.length_before and came:
                group.trust.learn(likeliest, came[0])
            proposal = seen.proposal
            for node, (token, parent) in enumerate(zip(proposal.token_ids, proposal.parents, strict=True)):
                text = texts[node] = (*texts[parent], token)[-max(ORDERS) :]
                group.rows.add(text, NgramRow(tuple(best_ids[node + 1]), tuple(best_logits[node + 1])))

    def release(self, sequence: Sequence) -> None:
        """With the last running answer of a request its n-grams are dropped; a tenant's stay."""
        self._likeliest.pop(sequence.id, None)
        key = self._key(sequence)
        group = None if key is None else self._groups.get(key)
        if key is None or group is None:
            return
        group.running.discard(sequence.id)
        if self.options.share == "request" and not group.running:
            del self._groups[key]

    def reset(self) -> None:
        """Drop all n-grams."""
        self._groups.clear()
        self._likeliest.clear()

    def num_held(self) -> int:
        """Answers that draft for each other now."""
        return sum(len(group.running) for group in self._groups.values())

    def memory_bytes(self) -> int:
        """Bytes of all n-grams."""
        return sum(group.rows.memory_bytes() for group in self._groups.values())


@dataclass(order=True, slots=True)
class _DraftNode:
    """A node that may be drafted; the likeliest is the smallest."""

    minus_chance: float
    number: int
    """Tells equal chances apart, so that trees are the same each time."""
    tree: _SiblingTree = field(compare=False)
    parent: int = field(compare=False)
    depth: int = field(compare=False)
    token: int = field(compare=False)
    text: tuple[int, ...] = field(compare=False)
    """The last tokens before it."""


class _SiblingTree:
    """The growing tree of one sequence."""

    def __init__(
        self,
        sequence: Sequence,
        rows: NgramRows,
        coupled: bool,
        trust: _Trust,
        min_path_prob: float,
        max_nodes: int,
        max_depth: int,
    ) -> None:
        self.sequence = sequence
        self.token_ids: list[int] = []
        self.parents: list[int] = []
        self.likeliest: _Likeliest | None = None
        """The likeliest token behind the text, where anything is known of it."""
        self._rows, self._trust = rows, trust
        self._min_path_prob, self._max_nodes = min_path_prob, max_nodes
        length = len(sequence.token_ids)
        noise = Noise(sequence.seed, length) if coupled and sequence.params.temperature > 0 else None
        self._keys = [None if noise is None else noise.key(length + depth) for depth in range(max_depth)]
        self._num_candidates = 0

    def is_full(self) -> bool:
        return len(self.token_ids) == self._max_nodes

    def roots(self) -> list[_DraftNode]:
        """The candidates behind the text."""
        return self._below(1.0, ROOT, 0, tuple(self.sequence.token_ids[-max(ORDERS) :]))

    def take(self, candidate: _DraftNode) -> list[_DraftNode]:
        """Draft it; returns the candidates below it."""
        self.token_ids.append(candidate.token)
        self.parents.append(candidate.parent)
        text = (*candidate.text, candidate.token)[-max(ORDERS) :]
        return self._below(-candidate.minus_chance, len(self.token_ids) - 1, candidate.depth + 1, text)

    def _below(self, chance: float, node: int, depth: int, text: tuple[int, ...]) -> list[_DraftNode]:
        found = self._rows.find(text) if depth < len(self._keys) else None
        if found is None:
            return []
        row, order = found
        trust = self._trust.of(order)
        drawn = _drawn(row, order, self.sequence.params, self._keys[depth])
        if node == ROOT:
            self.likeliest = _Likeliest(len(self.sequence.token_ids), drawn[0][0], order, drawn[0][1])
        candidates = []
        for token, promised in drawn:
            whole = chance * promised * trust
            if whole < self._min_path_prob:
                break
            self._num_candidates += 1
            number = self._num_candidates
            candidates.append(_DraftNode(-whole, number, self, node, depth, token, text))
        return candidates


def _drawn(row: NgramRow, order: int, params: SamplingParams, key: int | None) -> list[tuple[int, float]]:
    """The likely tokens behind an n-gram of `order` tokens with the chance of each, best first.

    With a `key` they are ranked as the target would draw them, were these its logits; the chance says how far the best
    is ahead, given how far off such logits are. Of the request's rules, bias, top-k, top-p and min-p are applied, over
    the tokens that are kept.
    """
    temperature, bias = params.temperature, params.logit_bias
    scale = 1 / temperature if temperature > 0 else 1.0
    scores = [
        ((logit + (bias.get(token, 0.0) if bias else 0.0)) * scale, token)
        for token, logit in zip(row.token_ids, row.logits, strict=True)
    ]
    scores.sort(reverse=True)
    scores = _allowed(scores, params)
    if key is not None:
        scores = sorted(((score + gumbel_at(key, token), token) for score, token in scores), reverse=True)
    spread = SPREAD[order] if key is not None or temperature == 0 else max(1.0, SPREAD[order])
    weights = [math.exp((score - scores[0][0]) / spread) for score, _ in scores]
    total = sum(weights)
    return [(token, weight / total) for (_, token), weight in zip(scores, weights, strict=True)]


def _allowed(scores: list[tuple[float, int]], params: SamplingParams) -> list[tuple[float, int]]:
    """Those of `scores`, logits over temperature with the best first, from which a token may be drawn."""
    scores = [one for one in scores if one[0] >= scores[0][0] - LEAD]
    if params.temperature == 0:
        return scores
    if params.top_k > 0:
        scores = scores[: params.top_k]
    if params.min_p > 0:
        least = scores[0][0] + math.log(params.min_p)
        scores = [one for one in scores if one[0] >= least]
    if params.top_p < 1:
        weights = [math.exp(score - scores[0][0]) for score, _ in scores]
        before = [0.0, *accumulate(weights)]
        scores = [
            one
            for one, sum_before in zip(scores, before, strict=False)
            if sum_before < params.top_p * before[-1]
        ]
    return scores
