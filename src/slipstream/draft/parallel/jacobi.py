"""Plain Jacobi decoding, for comparison: what the last pass said behind rejected tokens is the next draft.

Santilli et al., "Accelerating Transformer Inference for Translation via Parallel Decoding" (ACL 2023). Decoding is
solved like a system of equations: all tokens of a block are guessed at once, and each pass replaces every guess by
what the target says after the guesses before it.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from slipstream.config import check_at_least, check_types
from slipstream.core import EMPTY_PROPOSAL, Proposal, Sequence
from slipstream.draft.base import DraftContext, Drafter, Observation
from slipstream.draft.top_tokens import top_tokens


@dataclass(frozen=True, kw_only=True)
class JacobiOptions:
    """Keys of `speculative_config` for `jacobi`."""

    num_speculative_tokens: int = 4
    """Tokens of the block that is guessed at once."""

    def __post_init__(self) -> None:
        check_types(self, "jacobi")
        check_at_least("jacobi", 1, num_speculative_tokens=self.num_speculative_tokens)


def first_guess(token_ids: Seq[int], position: int) -> int:
    """A token for a `position` of which nothing is known: one of the text's, anywhere, always the same."""
    scattered = position * 2654435761 % 2**32  # multiplicative hashing (Knuth)
    return token_ids[scattered % len(token_ids)]


class JacobiDrafter(Drafter):
    """Proposes a chain. Guesses for places of which the target has not spoken yet are taken from the text."""

    summary = "drafts what the target said of the same places a step before"

    Options = JacobiOptions

    def __init__(self, options: JacobiOptions, context: DraftContext) -> None:
        super().__init__(options, context)
        self._guesses: dict[int, list[int]] = {}
        """Sequence id to the target's latest tokens for the places behind the committed text."""

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Proposal]:
        """One chain a sequence."""
        return [self._propose(sequence, budget) for sequence, budget in zip(sequences, budgets, strict=True)]

    def _propose(self, sequence: Sequence, budget: int) -> Proposal:
        num_tokens = min(budget, self.max_nodes())
        if num_tokens <= 0:
            return EMPTY_PROPOSAL
        draft = self._guesses.setdefault(sequence.id, [])[:num_tokens]
        start = len(sequence.token_ids)
        draft += [first_guess(sequence.token_ids, start + i) for i in range(len(draft), num_tokens)]
        return Proposal.chain(draft)

    def max_nodes(self) -> int:
        """`num_speculative_tokens`."""
        num_speculative_tokens: int = self.options.num_speculative_tokens
        return num_speculative_tokens

    def observe(self, observations: Seq[Observation]) -> None:
        """Keep the target's tokens behind the committed ones; where it was not asked, an earlier guess stays."""
        for seen in observations:
            guesses = self._guesses.get(seen.sequence.id)
            if guesses is not None:
                num_new = len(seen.sequence.token_ids) - seen.length_before
                computed = top_tokens(seen.logits[num_new:], 1).flatten().tolist()
                kept = guesses[max(len(seen.proposal) + 1, num_new) :]
                self._guesses[seen.sequence.id] = computed + kept

    def release(self, sequence: Sequence) -> None:
        """Forget the sequence's guesses."""
        self._guesses.pop(sequence.id, None)

    def num_held(self) -> int:
        """Sequences with guesses."""
        return len(self._guesses)

    def memory_bytes(self) -> int:
        """Bytes of all guesses, as Python's lists and integers."""
        return sum(56 + 36 * len(guesses) for guesses in self._guesses.values())
