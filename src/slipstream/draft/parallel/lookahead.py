"""Jacobi decoding, and lookahead decoding, which adds a pool of n-grams to it.

Jacobi (Santilli et al., "Accelerating Transformer Inference for Translation via Parallel Decoding", ACL 2023) solves
decoding like a system of equations: all tokens of a block are drafted at once, and each target pass replaces every
draft token by the target's own token at that position.

Lookahead (Fu et al., "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding", ICML 2024) runs
Jacobi iterations in a window next to the text and proposes the n-grams that they produce. The paper's window has a
column for each position ahead of the text and a row for each of the last Jacobi iterations; a token sees the first row
up to its column, and then its own column. Below the last committed token this is a tree: the first row is a chain, and
each column hangs below its token of the first row. So window and n-grams are one proposal, without a mask or a pass of
their own, and tokens of the window may be accepted too.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any

from slipstream.config import check_at_least, check_types
from slipstream.core.bounded import BoundedDict
from slipstream.core.proposal import EMPTY_PROPOSAL, ROOT, Proposal
from slipstream.core.sequence import Sequence
from slipstream.draft.base import DraftContext, Drafter, Observation
from slipstream.draft.combine.merging import node_along
from slipstream.draft.top_tokens import top_tokens
from slipstream.draft.traits import DrafterTraits, TableGrowth

MAX_KEYS = 1024
"""First tokens whose n-grams are kept for one sequence; the least recently seen one is dropped."""

_KEY_BYTES, _TUPLE_BYTES, _TOKEN_BYTES = 240, 56, 36
"""A key of a pool with its list, a tuple, and a token in it, as CPython lays them out."""


def initial_token(token_ids: Seq[int], position: int) -> int:
    """An initial draft token for a `position` without a prediction: a pseudo-random but fixed token of the text."""
    scattered = position * 2654435761 % 2**32  # multiplicative hashing (Knuth)
    return token_ids[scattered % len(token_ids)]


@dataclass(frozen=True, kw_only=True)
class JacobiOptions:
    """Keys of `speculative_config` for `jacobi`."""

    num_speculative_tokens: int = 4
    """Draft tokens of a block."""

    def __post_init__(self) -> None:
        check_types(self, "jacobi")
        check_at_least("jacobi", 1, num_speculative_tokens=self.num_speculative_tokens)


class JacobiDrafter(Drafter):
    """Proposes a chain: the target's last predictions for its positions, or tokens of the text where it has none."""

    Options = JacobiOptions

    def __init__(self, options: JacobiOptions, context: DraftContext) -> None:
        super().__init__(options, context)
        self._drafts: dict[int, list[int]] = self.by_sequence()
        """Sequence id to the target's latest predictions for the positions after the committed text."""

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Proposal]:
        """One chain a sequence."""
        return [self._propose(sequence, budget) for sequence, budget in zip(sequences, budgets, strict=True)]

    def _propose(self, sequence: Sequence, budget: int) -> Proposal:
        num_tokens = min(budget, self.traits.max_nodes)
        if num_tokens <= 0:
            return EMPTY_PROPOSAL
        draft = self._drafts.setdefault(sequence.id, [])[:num_tokens]
        start = len(sequence.token_ids)
        draft += [initial_token(sequence.token_ids, start + i) for i in range(len(draft), num_tokens)]
        return Proposal.chain(draft)

    def observe(self, observations: Seq[Observation]) -> None:
        """Store the target's predictions after the committed tokens; unverified positions keep their earlier token."""
        for seen in observations:
            draft = self._drafts.get(seen.sequence.id)
            if draft is not None:
                num_new = len(seen.sequence.token_ids) - seen.length_before
                computed = top_tokens(seen.logits[num_new:], 1).flatten().tolist()
                kept = draft[max(len(seen.proposal) + 1, num_new) :]
                self._drafts[seen.sequence.id] = computed + kept

    def memory_bytes(self) -> int:
        """Bytes of all predictions, as Python's lists and integers."""
        return sum(56 + 36 * len(draft) for draft in self._drafts.values())


@dataclass(frozen=True, kw_only=True)
class LookaheadOptions:
    """Keys of `speculative_config` for `lookahead`, by the paper's letters W, N and G.

    A step has (W + G) (N - 1) more rows. The defaults suit a CPU; the paper's W = G = 15, N = 5 a large GPU.
    """

    window_size: int = 3
    """W: columns of the window, the positions ahead of the text that are drafted at once."""
    ngram_size: int = 3
    """N: tokens of an n-gram; the window has one row fewer."""
    max_guesses: int = 2
    """G: n-grams kept for each first token, and proposed after it."""
    pool_from_prompt: bool = True
    """Fill the pool with the prompt's n-grams at the start."""

    def __post_init__(self) -> None:
        check_types(self, "lookahead")
        check_at_least("lookahead", 1, window_size=self.window_size, max_guesses=self.max_guesses)
        check_at_least("lookahead", 2, ngram_size=self.ngram_size)


class NgramPool:
    """The most recent n-grams of one sequence by their first token, bounded."""

    def __init__(self, max_per_key: int, max_keys: int = MAX_KEYS) -> None:
        self._max_per_key = max_per_key
        self._endings: BoundedDict[int, list[tuple[int, ...]]] = BoundedDict(max_keys)
        """First token to what followed it, the latest last."""

    def __len__(self) -> int:
        """N-grams held."""
        return sum(map(len, self._endings.values()))

    def add(self, ngram: Seq[int]) -> None:
        """Add an n-gram as the latest; drops the least recent ones beyond the bounds."""
        first, ending = ngram[0], tuple(ngram[1:])
        endings = self._endings.touch(first, list)
        if ending in endings:
            endings.remove(ending)
        endings.append(ending)
        if len(endings) > self._max_per_key:
            endings.pop(0)

    def after(self, token: int) -> list[tuple[int, ...]]:
        """The stored tokens after `token`, [n - 1] for each n-gram, the latest first."""
        return self._endings.get(token, [])[::-1]

    def memory_bytes(self) -> int:
        """Bytes held: a list and an entry a key, a tuple and its integers an n-gram."""
        longest = max((len(endings[0]) for endings in self._endings.values()), default=0)
        bytes_per_ngram = _TUPLE_BYTES + _TOKEN_BYTES * longest
        return _KEY_BYTES * len(self._endings) + bytes_per_ngram * len(self)


class TreeBuilder:
    """A tree of at most `max_nodes` nodes; branches with a common prefix share nodes."""

    def __init__(self, max_nodes: int) -> None:
        self.max_nodes = max_nodes
        self.token_ids: list[int] = []
        self.parents: list[int] = []
        self._child: dict[tuple[int, int], int] = {}

    def num_free(self) -> int:
        return self.max_nodes - len(self.token_ids)

    def add(self, parent: int, token_ids: Seq[int]) -> int:
        """Add a branch below `parent`, as much as there is room for; returns its last node."""
        for token in token_ids:
            node = self._child.get((parent, token))
            if node is None:
                if not self.num_free():
                    break
                node = self._child[parent, token] = len(self.token_ids)
                self.token_ids.append(token)
                self.parents.append(parent)
            parent = node
        return parent

    def proposal(self) -> Proposal:
        return Proposal(tuple(self.token_ids), tuple(self.parents))


@dataclass(slots=True)
class JacobiWindow:
    """One sequence's Jacobi iterations and its pool of n-grams."""

    columns: list[list[int]]
    """Each from the oldest iteration to the newest; a new column does not have all of its rows yet."""
    pool: NgramPool
    ends: list[tuple[int, ...]] = field(default_factory=list)
    """For each column in the last proposal: the tokens on the path to its last one."""


class LookaheadDrafter(Drafter):
    """Proposes the pool's n-grams that begin with the last committed token, and the window.

    After a pass, the target's most probable token behind each column is appended to that column. A full column is
    added to the pool as an n-gram and loses its oldest token. So the window moves one position a step. A step that
    commits more tokens leaves the first row behind for a few iterations, until it has converged again.

    With a small budget the n-grams come first, then as many whole columns as there is room for.
    """

    Options = LookaheadOptions

    @classmethod
    def configured(cls, options: Any, context: DraftContext) -> DrafterTraits:
        """With a window and a full pool for each running text."""
        bytes_per_ngram = _KEY_BYTES + _TUPLE_BYTES + _TOKEN_BYTES * (options.ngram_size - 1)
        pools = TableGrowth(
            what="a window and n-grams a running request",
            bytes_per_token=bytes_per_ngram,
            max_bytes_per_text=MAX_KEYS * options.max_guesses * bytes_per_ngram,
        )
        max_nodes = (options.window_size + options.max_guesses) * (options.ngram_size - 1)
        return replace(super().configured(options, context), max_nodes=max_nodes, tables=(pools,))

    def __init__(self, options: LookaheadOptions, context: DraftContext) -> None:
        super().__init__(options, context)
        self._windows: dict[int, JacobiWindow] = self.by_sequence()

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Proposal]:
        """One tree a sequence."""
        return [self._propose(sequence, budget) for sequence, budget in zip(sequences, budgets, strict=True)]

    def _propose(self, sequence: Sequence, budget: int) -> Proposal:
        if budget <= 0:
            return EMPTY_PROPOSAL
        window = self._windows.get(sequence.id)
        if window is None:
            window = self._windows[sequence.id] = self._begin(sequence)
        tree = TreeBuilder(min(budget, self.traits.max_nodes))
        for ending in window.pool.after(sequence.token_ids[-1]):
            tree.add(ROOT, ending)
        ends: list[int] = []
        first_row = ROOT
        for column in window.columns:
            if tree.num_free() < len(column):
                break
            first_row = tree.add(first_row, column[:1])
            ends.append(tree.add(first_row, column[1:]))
        proposal = tree.proposal()
        window.ends = [tuple(proposal.token_ids[node] for node in proposal.path(end)) for end in ends]
        return proposal

    def _begin(self, sequence: Sequence) -> JacobiWindow:
        options, token_ids = self.options, sequence.token_ids
        start = len(token_ids)
        columns = [[initial_token(token_ids, start + i)] for i in range(options.window_size)]
        pool = NgramPool(options.max_guesses)
        if options.pool_from_prompt:
            for end in range(options.ngram_size, len(token_ids) + 1):
                pool.add(token_ids[end - options.ngram_size : end])
        return JacobiWindow(columns, pool)

    def window(self, sequence: Sequence) -> JacobiWindow | None:
        """The sequence's window and pool; None before its first proposal."""
        return self._windows.get(sequence.id)

    def observe(self, observations: Seq[Observation]) -> None:
        """Append to each computed column its next row; add full columns to the pool."""
        for seen in observations:
            window = self._windows.get(seen.sequence.id)
            if window is None or not len(seen.proposal):
                continue
            # Columns that a budget or a grammar cut off keep their rows until they are computed.
            nodes = [node_along(seen.proposal, tokens) for tokens in window.ends]
            computed = [
                (column, node)
                for column, node in zip(window.columns, nodes, strict=False)
                if node is not None
            ]
            rows = [node + 1 for _, node in computed]
            tokens = top_tokens(seen.logits[rows], 1).flatten().tolist()
            for (column, _), token in zip(computed, tokens, strict=True):
                column.append(token)
                if len(column) == self.options.ngram_size:
                    window.pool.add(column)
                    del column[0]

    def memory_bytes(self) -> int:
        """Bytes of all windows and pools."""
        window_bytes = 200 + self.options.window_size * (56 + 36 * self.options.ngram_size)
        return sum(window_bytes + window.pool.memory_bytes() for window in self._windows.values())
