"""Suffix decoding: draft what followed the same suffix in this text and in the tenant's past answers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

from slipstream.config import check_at_least
from slipstream.core.proposal import EMPTY_PROPOSAL, ROOT, Proposal
from slipstream.core.sequence import Sequence
from slipstream.draft.base import DraftContext, Drafter
from slipstream.draft.lookup.suffix_cache import SuffixCache, check_cache_file
from slipstream.draft.lookup.suffix_index import SuffixIndex
from slipstream.draft.traits import DrafterTraits, TableGrowth
from slipstream.errors import ConfigError

MAX_OCCURRENCES = 64
"""Links followed in each chain of an index: what bounds the time of a proposal."""
LIVE_TOKEN_BYTES = 170
"""A token of a running text in its own index."""
CACHED_TOKEN_BYTES = 80
"""A token of a past answer in the tenant's index."""


@dataclass(frozen=True)
class SuffixOptions:
    """Keys of `speculative_config` for `suffix`; `suffix_decoding_*` keys that vLLM has keep its defaults."""

    num_speculative_tokens: int = 16
    """The deepest draft, however long the match."""
    suffix_decoding_max_tree_depth: int = 24
    """Tokens at the text's end that are matched; longer matches are not measured."""
    suffix_decoding_max_cached_requests: int = 10_000
    """Past answers kept over all tenants; the oldest of the account that holds the most makes room. 0 searches only the
    request's own text."""
    suffix_decoding_max_cached_tokens: int = 1_000_000
    """Tokens of past answers kept over all tenants; a token costs about 80 bytes."""
    suffix_decoding_max_spec_factor: float = 1.0
    """Draft tokens for each token of the match."""
    suffix_decoding_max_spec_offset: int = 0
    """Draft tokens on top of `suffix_decoding_max_spec_factor`."""
    suffix_decoding_min_token_prob: float = 0.1
    """Draft tokens with a lower estimated path probability are not proposed."""
    tree: bool = False
    """Propose a tree, most probable nodes first, instead of the most probable path."""
    num_draft_nodes: int = 16
    """The most nodes of a tree; ignored without `tree`."""
    suffix_decoding_cache_file: str | None = None
    """File of past answers to start with, written by `SuffixDrafter.save` for this vocabulary."""

    def __post_init__(self) -> None:
        check_at_least(
            "suffix",
            1,
            num_speculative_tokens=self.num_speculative_tokens,
            suffix_decoding_max_tree_depth=self.suffix_decoding_max_tree_depth,
            suffix_decoding_max_cached_tokens=self.suffix_decoding_max_cached_tokens,
            num_draft_nodes=self.num_draft_nodes,
        )
        check_at_least(
            "suffix",
            0,
            suffix_decoding_max_cached_requests=self.suffix_decoding_max_cached_requests,
            suffix_decoding_max_spec_offset=self.suffix_decoding_max_spec_offset,
        )
        _check_number("suffix_decoding_max_spec_factor", self.suffix_decoding_max_spec_factor, float("inf"))
        _check_number("suffix_decoding_min_token_prob", self.suffix_decoding_min_token_prob, 1.0)
        if not isinstance(self.tree, bool):
            raise ConfigError(f"suffix tree must be true or false, got {self.tree!r}")
        if self.suffix_decoding_cache_file is not None:
            if not isinstance(self.suffix_decoding_cache_file, str):
                raise ConfigError(
                    f"suffix suffix_decoding_cache_file must be a path, got {self.suffix_decoding_cache_file!r}"
                )
            check_cache_file(self.suffix_decoding_cache_file)


def _check_number(name: str, value: object, maximum: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= maximum:
        limit = f"between 0 and {maximum:g}" if maximum < float("inf") else "of at least 0"
        raise ConfigError(f"suffix {name} must be a number {limit}, got {value!r}")


@dataclass(frozen=True, slots=True)
class ScoredDraft:
    """A draft tree and its expected gain."""

    token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    score: float = 0.0
    """Sum of the nodes' estimated path probabilities: the expected number of accepted tokens."""


def grow(
    index: SuffixIndex, places: list[int], max_depth: int, max_nodes: int, min_prob: float, tree: bool
) -> ScoredDraft:
    """The most probable continuation of a context that ended before each of `places`.

    A token's probability is its parent's times the share of `places` that continue with it, among those that
    continue at all. Nodes are taken best first. Without `tree` only the most frequent child of a node is kept.
    Ties are broken by the order of `places`.
    """
    token_ids: list[int] = []
    parents: list[int] = []
    score = 0.0
    order = itertools.count()
    frontier: list[tuple[float, int, int, int, int, list[int]]] = []

    def add_children(node: int, places: list[int], depth: int, prob: float) -> None:
        children = index.continuations(places, depth)
        num_places = sum(map(len, children.values()))
        # The sort is stable and the groups come in the order of their first place, so ties keep that order.
        ranked = sorted(children, key=lambda token: -len(children[token]))
        for token in ranked if tree else ranked[:1]:
            child_prob = prob * len(children[token]) / num_places
            if child_prob >= min_prob:
                heappush(frontier, (-child_prob, next(order), node, token, depth + 1, children[token]))

    if max_depth > 0:
        add_children(ROOT, places, 0, 1.0)
    while frontier and len(token_ids) < max_nodes:
        negative_prob, _, parent, token, depth, places = heappop(frontier)
        token_ids.append(token)
        parents.append(parent)
        score -= negative_prob
        if depth < max_depth:
            add_children(len(token_ids) - 1, places, depth, -negative_prob)
    return ScoredDraft(tuple(token_ids), tuple(parents), score)


class SuffixDrafter(Drafter):
    """SuffixDecoding (Oliaro et al. 2024, arXiv 2411.04975) over hash chains instead of suffix trees.

    The text's suffix is looked up in the sequence's own prompt and answer, and in the tenant's past answers.
    For each match length the draft may have `max_spec_factor * length + max_spec_offset` tokens, and goes on
    while its path probability is at least `min_token_prob`. The draft with the highest expected gain is
    proposed; on a tie the longer match and the own text win.

    Sharing: when a finished sequence is released, its *answer* is stored for later requests of the same tenant
    only. The last `max_tree_depth` tokens of its prompt are stored as context for matching; prompt tokens are
    never proposed to another request. A preempted sequence stores nothing, because it will continue.

    Measured on chats, code and SQL, one core: a proposal takes 0.015 ms with the sequence's own text alone,
    and 0.08 ms (99 in 100 below 0.3 ms) with a cache of 600,000 tokens. A cached token costs about 80
    bytes, one of a live sequence 170.
    """

    Options = SuffixOptions
    traits = DrafterTraits(looks_up=True, observes_all=False, remembers=True, reads_logits=False)

    @classmethod
    def configured(cls, options: Any, context: DraftContext) -> DrafterTraits:
        num_answers = options.suffix_decoding_max_cached_requests
        num_cached = options.suffix_decoding_max_cached_tokens if num_answers else 0
        return replace(
            super().configured(options, context),
            max_nodes=options.num_draft_nodes if options.tree else options.num_speculative_tokens,
            tables=(
                TableGrowth(bytes_per_token=LIVE_TOKEN_BYTES),
                TableGrowth(
                    what=f"past answers, at most {num_answers:,}", fixed_bytes=num_cached * CACHED_TOKEN_BYTES
                ),
            ),
        )

    def __init__(self, options: SuffixOptions, context: DraftContext) -> None:
        super().__init__(options, context)
        self._own: dict[int, SuffixIndex] = self.by_sequence()
        self.cache = SuffixCache(
            options.suffix_decoding_max_tree_depth,
            MAX_OCCURRENCES,
            options.suffix_decoding_max_cached_requests,
            options.suffix_decoding_max_cached_tokens,
        )
        if options.suffix_decoding_cache_file is not None:
            self.load(options.suffix_decoding_cache_file)

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Proposal]:
        """One chain or tree a sequence; the empty proposal where no continuation is probable enough."""
        return [self._propose(sequence, budget) for sequence, budget in zip(sequences, budgets, strict=True)]

    def _propose(self, sequence: Sequence, budget: int) -> Proposal:
        if budget <= 0:
            return EMPTY_PROPOSAL
        own = self._own.get(sequence.id)
        if own is None:
            own = self._own[sequence.id] = SuffixIndex(
                self.options.suffix_decoding_max_tree_depth, MAX_OCCURRENCES
            )
            own.begin_document()
        own.extend(sequence.token_ids[len(own) - 1 :])
        best = self._best_draft(own, sequence.token_ids, budget, ScoredDraft())
        shared = self.cache.index(sequence.tenant)
        if shared is not None:
            best = self._best_draft(shared, sequence.token_ids, budget, best)
        return Proposal(best.token_ids, best.parents)

    def _best_draft(
        self, index: SuffixIndex, token_ids: list[int], budget: int, best: ScoredDraft
    ) -> ScoredDraft:
        """The better of `best` and the best draft from `index`.

        Only the lengths at which some occurrence ends its match are tried: between two of them the matching
        places are the same, and the longer match may draft more. The search ends once no remaining length can
        win, since a chain's score is at most its depth.
        """
        options = self.options
        max_nodes = min(budget, self.traits.max_nodes)
        occurrences = index.occurrences(token_ids)
        for length in sorted({length for _, length in occurrences}, reverse=True):
            earned = int(options.suffix_decoding_max_spec_factor * length)
            earned += options.suffix_decoding_max_spec_offset
            max_depth = min(budget, options.num_speculative_tokens, earned)
            if max_depth <= best.score:
                break
            places = [place for place, agreed in occurrences if agreed >= length]
            min_prob = options.suffix_decoding_min_token_prob
            draft = grow(index, places, max_depth, max_nodes, min_prob, options.tree)
            if draft.score > best.score:
                best = draft
        return best

    def release(self, sequence: Sequence) -> None:
        """Drop the sequence's own index; store a finished answer in the tenant's cache."""
        super().release(sequence)
        if sequence.finished and sequence.num_output_tokens:
            num_context = min(sequence.num_prompt_tokens, self.options.suffix_decoding_max_tree_depth)
            answer = sequence.token_ids[sequence.num_prompt_tokens - num_context :]
            self.cache.add(sequence.tenant, answer, num_context)

    def reset(self) -> None:
        """Drop all past answers; running sequences keep their own index."""
        self.cache.clear()

    def save(self, path: str | Path) -> None:
        """Write the past answers to a file, to be given as `suffix_decoding_cache_file` at the next start."""
        self.cache.save(path, self.context.vocab_size)

    def load(self, path: str | Path) -> None:
        """Add the past answers of a saved file; raises `ConfigError` if it is damaged or of another vocabulary."""
        self.cache.load(path, self.context.vocab_size)

    def memory_bytes(self) -> int:
        """Bytes of the live sequences' own indexes and of the past answers."""
        return sum(index.memory_bytes() for index in self._own.values()) + self.cache.memory_bytes()

    def integrity(self) -> list[str]:
        """Violated invariants of the indexes and the cache; empty when there are none."""
        own = [problem for index in self._own.values() for problem in index.integrity()]
        return own + self.cache.integrity()
