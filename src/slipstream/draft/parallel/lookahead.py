"""Lookahead decoding: Jacobi's passes run beside the text and leave n-grams behind, which are then proposed.

Fu et al., "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding" (ICML 2024). The paper's window
has columns of places ahead of the text and rows of the last Jacobi passes, and a mask by which a token sees the first
row up to its column and then its own column. Below the last committed token that is a tree: the first row is a
chain, and each column hangs below its token of the first row. So a proposal is all that the method needs: window and
guesses go through the target together, each with its places and its mask, and the window may be accepted too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from slipstream.config import check_at_least, check_types
from slipstream.core import EMPTY_PROPOSAL, ROOT, Proposal, Sequence
from slipstream.draft.base import DraftContext, Drafter, Fit, Observation
from slipstream.draft.combine.merging import node_along
from slipstream.draft.parallel.jacobi import first_guess
from slipstream.draft.top_tokens import top_tokens

MAX_KEYS = 1024
"""First tokens whose n-grams are kept of one sequence; the least recently seen is forgotten."""


@dataclass(frozen=True, kw_only=True)
class LookaheadOptions:
    """Keys of `speculative_config` for `lookahead`, by the paper's letters W, N and G.

    A step has (W + G) (N - 1) more rows. The defaults suit a CPU; the paper's W = G = 15, N = 5 a large GPU.
    """

    window_size: int = 3
    """W: columns of the window, places ahead of the text that are guessed at once."""
    ngram_size: int = 3
    """N: tokens of an n-gram; the window has one row fewer."""
    max_guesses: int = 2
    """G: n-grams that are kept of each first token, and proposed after it."""
    pool_from_prompt: bool = True
    """Begin with the n-grams of the prompt."""

    def __post_init__(self) -> None:
        check_types(self, "lookahead")
        check_at_least("lookahead", 1, window_size=self.window_size, max_guesses=self.max_guesses)
        check_at_least("lookahead", 2, ngram_size=self.ngram_size)


class NgramPool:
    """The most recent n-grams of one sequence by their first token, bounded."""

    def __init__(self, max_per_key: int, max_keys: int = MAX_KEYS) -> None:
        self._max_per_key = max_per_key
        self._max_keys = max_keys
        self._tails: OrderedDict[int, list[tuple[int, ...]]] = OrderedDict()
        """First token to what followed it, the latest last."""

    def __len__(self) -> int:
        """N-grams held."""
        return sum(map(len, self._tails.values()))

    def add(self, ngram: Seq[int]) -> None:
        """Remember an n-gram as the latest; what was seen the longest time ago makes room."""
        first, tail = ngram[0], tuple(ngram[1:])
        tails = self._tails.setdefault(first, [])
        self._tails.move_to_end(first)
        if tail in tails:
            tails.remove(tail)
        tails.append(tail)
        if len(tails) > self._max_per_key:
            tails.pop(0)
        if len(self._tails) > self._max_keys:
            self._tails.popitem(last=False)

    def after(self, token: int) -> list[tuple[int, ...]]:
        """What followed `token`, the latest first."""
        return self._tails.get(token, [])[::-1]

    def memory_bytes(self) -> int:
        """Bytes held: a list and an entry a key, a tuple and its integers an n-gram."""
        bytes_per_ngram = 56 + 36 * max((len(tails[0]) for tails in self._tails.values()), default=0)
        return 240 * len(self._tails) + bytes_per_ngram * len(self)


class Branches:
    """A tree under construction, of at most `max_nodes`. What begins alike shares nodes."""

    def __init__(self, max_nodes: int) -> None:
        self.max_nodes = max_nodes
        self.token_ids: list[int] = []
        self.parents: list[int] = []
        self._child: dict[tuple[int, int], int] = {}

    def num_free(self) -> int:
        return self.max_nodes - len(self.token_ids)

    def add(self, parent: int, token_ids: Seq[int]) -> int:
        """Hang a branch below `parent`, as much of it as there is room for; returns its last node."""
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
class Window:
    """One sequence's Jacobi passes and what they yielded."""

    columns: list[list[int]]
    """Top down, oldest pass first; a young column has not all of its rows yet."""
    pool: NgramPool
    ends: list[tuple[int, ...]] = field(default_factory=list)
    """The tokens down to each column's last one in the last proposal, as far as columns were in it."""


class LookaheadDrafter(Drafter):
    """Proposes the pool's n-grams that begin with the last committed token, and the window.

    When the target has computed the window, its most probable token behind each column is the next row. A column
    that has all its rows gives an n-gram to the pool and loses its oldest token. So the window moves one place a
    step; where a step commits more, its first row is at first a little behind, and catches up with the next
    passes, because every token is computed behind the text as it then is.

    With a small budget guesses come first, then as many whole columns as there is room for; the others wait.
    """

    summary = "n-grams that the target computes on the side (lookahead decoding)"

    Options = LookaheadOptions

    @classmethod
    def fit(cls, context: DraftContext) -> Fit:
        """A window and a pool a running request."""
        return Fit(grows_with="a window and n-grams a running request")

    def __init__(self, options: LookaheadOptions, context: DraftContext) -> None:
        super().__init__(options, context)
        self._windows: dict[int, Window] = {}

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Proposal]:
        """One tree a sequence."""
        return [self._propose(sequence, budget) for sequence, budget in zip(sequences, budgets, strict=True)]

    def _propose(self, sequence: Sequence, budget: int) -> Proposal:
        if budget <= 0:
            return EMPTY_PROPOSAL
        window = self._windows.get(sequence.id)
        if window is None:
            window = self._windows[sequence.id] = self._begin(sequence)
        branches = Branches(min(budget, self.max_nodes()))
        for guess in window.pool.after(sequence.token_ids[-1]):
            branches.add(ROOT, guess)
        ends: list[int] = []
        first_row = ROOT
        for column in window.columns:
            if branches.num_free() < len(column):
                break
            first_row = branches.add(first_row, column[:1])
            ends.append(branches.add(first_row, column[1:]))
        proposal = branches.proposal()
        window.ends = [tuple(proposal.token_ids[node] for node in proposal.path(end)) for end in ends]
        return proposal

    def _begin(self, sequence: Sequence) -> Window:
        options, token_ids = self.options, sequence.token_ids
        start = len(token_ids)
        columns = [[first_guess(token_ids, start + i)] for i in range(options.window_size)]
        pool = NgramPool(options.max_guesses)
        if options.pool_from_prompt:
            for end in range(options.ngram_size, len(token_ids) + 1):
                pool.add(token_ids[end - options.ngram_size : end])
        return Window(columns, pool)

    def max_nodes(self) -> int:
        """(W + G) (N - 1)."""
        options = self.options
        max_nodes: int = (options.window_size + options.max_guesses) * (options.ngram_size - 1)
        return max_nodes

    def observe(self, observations: Seq[Observation]) -> None:
        """Give each column that was computed its next row, and the pool the n-grams that came about."""
        for seen in observations:
            window = self._windows.get(seen.sequence.id)
            if window is None or not len(seen.proposal):
                continue
            # What was cut off before it was checked, for want of room or by a grammar, waits.
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

    def release(self, sequence: Sequence) -> None:
        """Forget the sequence's window and pool."""
        self._windows.pop(sequence.id, None)

    def num_held(self) -> int:
        """Sequences with a window."""
        return len(self._windows)

    def memory_bytes(self) -> int:
        """Bytes of all windows and pools."""
        window_bytes = 200 + self.options.window_size * (56 + 36 * self.options.ngram_size)
        return sum(window_bytes + window.pool.memory_bytes() for window in self._windows.values())
