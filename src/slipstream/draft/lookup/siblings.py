"""Samples of one prompt draft for each other: with what the target said along them, drawn with each one's own noise.

After STAND (Song et al., "Accelerated test-time scaling with model-free speculative sampling", 2025): n-grams are kept
with the target's logits, and drafts are drawn from these with Gumbel noise. Here the noise is the one that the target's
own token is drawn with, so that a token that is likely among the siblings is drafted where this sample will choose it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from slipstream.bounded import BoundedDict
from slipstream.config import check_at_least, check_types
from slipstream.core import EMPTY_PROPOSAL, ROOT, Proposal, ProposalKind, Sequence
from slipstream.draft.base import DraftContext, Drafter, Fit, Observation
from slipstream.draft.lookup.ngram_rows import ENTRY_BYTES, LOGIT_BYTES, ORDERS, NgramRow, NgramRows
from slipstream.draft.outline import DraftOutline
from slipstream.draft.top_tokens import top_tokens
from slipstream.errors import ConfigError
from slipstream.sampling.noise import Noise, gumbel_at

LEAD = 6.0
"""Nats below the best logit, divided by the temperature: tokens below that are not drawn."""
SPREAD = {4: 0.35, 2: 0.8, 1: 1.2}
"""How far the logits behind an n-gram are off, in nats, by its length: with that the chance of each token is told."""


@dataclass(frozen=True, kw_only=True)
class SiblingsOptions:
    """Keys of `speculative_config` for `siblings`."""

    num_draft_nodes: int = 11
    """The most nodes of the tree."""
    num_speculative_tokens: int = 8
    """The most levels of the tree."""
    num_successors: int = 8
    """The target's best tokens that are kept behind each n-gram."""
    min_path_prob: float = 0.2
    """A node is drafted while the estimated chance that it is accepted is at least this."""
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
            num_speculative_tokens=self.num_speculative_tokens,
            num_successors=self.num_successors,
            max_entries=self.max_entries,
            max_stores=self.max_stores,
        )


@dataclass
class _Company:
    """What the answers that draft for each other have in common."""

    rows: NgramRows
    running: set[int] = field(default_factory=set)
    """Ids of the sequences that were met and not released."""


class SiblingsDrafter(Drafter):
    """Drafts trees from what the target said behind the same n-grams in this answer and its siblings.

    Under a verifier that accepts coupled drafts the tokens below a node are the best of logit / temperature + noise,
    with the target's noise at that position; under others the most probable ones, which come from no distribution.
    With `share` "request" a request of one answer gets nothing and costs nothing, and the n-grams are dropped with its
    last answer. Nothing crosses tenants.
    """

    summary = "lets samples of one prompt draft for each other, with the target's own logits along them"

    Options = SiblingsOptions
    kinds = frozenset({ProposalKind.ONE_HOT, ProposalKind.COUPLED})
    looks_up = True

    def __init__(self, options: SiblingsOptions, context: DraftContext) -> None:
        super().__init__(options, context)
        self._num_successors = min(options.num_successors, context.vocab_size)
        self._companies: BoundedDict[tuple[str, str | None], _Company] = BoundedDict(options.max_stores)
        """By tenant and, where answers of one request share, its id."""

    @classmethod
    def fit(cls, context: DraftContext) -> Fit:
        """N-grams with logits, up to their bound."""
        return Fit(grows_with=f"n-grams with logits, at most {cls.Options.max_entries:,} for each request")

    @classmethod
    def outline(cls, options: Any, context: DraftContext) -> DraftOutline:
        return DraftOutline(options.num_draft_nodes)

    @classmethod
    def table_bytes(cls, options: Any, vocab_size: int, num_seqs: int, num_tokens: int) -> int:
        """N-grams of every request or tenant, up to their bound; of running texts, those of every row."""
        num_entries = options.max_entries * options.max_stores
        if options.share == "request":
            num_entries = min(num_entries, num_tokens * len(ORDERS) * (1 + options.num_draft_nodes))
        return int(num_entries * (ENTRY_BYTES + LOGIT_BYTES * min(options.num_successors, vocab_size)))

    def remembers(self) -> bool:
        """True: other answers, of the tenant's other requests too where they share."""
        return True

    def _key(self, sequence: Sequence) -> tuple[str, str | None] | None:
        """Whose n-grams serve the sequence; None for a lone answer, which has no siblings."""
        if self.options.share == "tenant":
            return sequence.tenant, None
        return (sequence.tenant, sequence.request_id) if sequence.params.n > 1 else None

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Proposal]:
        """One tree a sequence; the empty proposal where nothing is known behind its last tokens."""
        return [self._propose(sequence, budget) for sequence, budget in zip(sequences, budgets, strict=True)]

    def _propose(self, sequence: Sequence, budget: int) -> Proposal:
        key = self._key(sequence) if budget > 0 else None
        company = None if key is None else self._companies.get(key)
        if company is None:
            return EMPTY_PROPOSAL
        options, rows = self.options, company.rows
        max_nodes = min(budget, options.num_draft_nodes)
        max_depth = min(budget, options.num_speculative_tokens)
        coupled = self.context.verifier.accepts_coupled
        temperature = sequence.params.temperature
        length = len(sequence.token_ids)
        noise = Noise(sequence.seed, length) if coupled and temperature > 0 else None
        keys = {} if noise is None else {d: noise.key(length + d) for d in range(max_depth)}
        end = tuple(sequence.token_ids[-max(ORDERS) :])
        token_ids: list[int] = []
        parents: list[int] = []
        order = 0  # tells equal chances apart, so that the tree is the same each time
        frontier: list[tuple[float, int, int, int, int, tuple[int, ...]]] = []

        def grow(chance: float, node: int, depth: int, text: tuple[int, ...]) -> None:
            nonlocal order
            found = rows.find(text)
            if found is None or depth == max_depth:
                return
            for token, prob in _drawn(*found, temperature, keys.get(depth)):
                if chance * prob < options.min_path_prob:
                    break
                order += 1
                heapq.heappush(frontier, (-chance * prob, order, node, depth, token, text))

        grow(1.0, ROOT, 0, end)
        while frontier and len(token_ids) < max_nodes:
            chance, _, parent, depth, token, text = heapq.heappop(frontier)
            token_ids.append(token)
            parents.append(parent)
            grow(-chance, len(token_ids) - 1, depth + 1, (*text, token)[-max(ORDERS) :])
        kind = ProposalKind.COUPLED if coupled else ProposalKind.ONE_HOT
        return Proposal(tuple(token_ids), tuple(parents), kind) if token_ids else EMPTY_PROPOSAL

    def max_nodes(self) -> int:
        """`num_draft_nodes`."""
        num_draft_nodes: int = self.options.num_draft_nodes
        return num_draft_nodes

    def observe(self, observations: Seq[Observation]) -> None:
        """Keep what the target said behind every checked row of answers that have siblings."""
        for seen in observations:
            key = self._key(seen.sequence)
            if key is None:
                continue
            company = self._companies.touch(key, lambda: _Company(NgramRows(self.options.max_entries)))
            company.running.add(seen.sequence.id)
            best = top_tokens(seen.logits, self._num_successors)  # [1 + n, successors]
            best_ids, best_logits = best.tolist(), seen.logits.gather(1, best).tolist()
            end = tuple(seen.sequence.token_ids[: seen.length_before][-max(ORDERS) :])
            texts = {ROOT: end}
            company.rows.add(end, NgramRow(tuple(best_ids[0]), tuple(best_logits[0])))
            proposal = seen.proposal
            for node, (token, parent) in enumerate(zip(proposal.token_ids, proposal.parents, strict=True)):
                text = texts[node] = (*texts[parent], token)[-max(ORDERS) :]
                company.rows.add(text, NgramRow(tuple(best_ids[node + 1]), tuple(best_logits[node + 1])))

    def release(self, sequence: Sequence) -> None:
        """With the last running answer of a request its n-grams are dropped; a tenant's stay."""
        key = self._key(sequence)
        company = None if key is None else self._companies.get(key)
        if key is None or company is None:
            return
        company.running.discard(sequence.id)
        if self.options.share == "request" and not company.running:
            del self._companies[key]

    def reset(self) -> None:
        """Drop all n-grams."""
        self._companies.clear()

    def num_held(self) -> int:
        """Answers that draft for each other now."""
        return sum(len(company.running) for company in self._companies.values())

    def memory_bytes(self) -> int:
        """Bytes of all n-grams."""
        return sum(company.rows.memory_bytes() for company in self._companies.values())


def _drawn(row: NgramRow, order: int, temperature: float, key: int | None) -> list[tuple[int, float]]:
    """The likely tokens behind an n-gram of `order` tokens with the chance of each, best first.

    With a `key` they are ranked as the target would draw them, were these its logits; the chance says how far the best
    is ahead, given how far off such logits are.
    """
    scale = 1 / temperature if temperature > 0 else 1.0
    least = row.logits[0] * scale - LEAD
    scores = [
        (logit * scale + (0.0 if key is None else gumbel_at(key, token)), token)
        for token, logit in zip(row.token_ids, row.logits, strict=True)
        if logit * scale >= least
    ]
    scores.sort(reverse=True)
    spread = SPREAD[order] if key is not None or temperature == 0 else max(1.0, SPREAD[order])
    weights = [math.exp((score - scores[0][0]) / spread) for score, _ in scores]
    total = sum(weights)
    return [(token, weight / total) for (_, token), weight in zip(scores, weights, strict=True)]
