"""Prompt lookup: draft the tokens that followed an earlier occurrence of the text's last n-gram."""

from __future__ import annotations

import sys
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

from slipstream.config import check_at_least
from slipstream.core.proposal import EMPTY_PROPOSAL, Proposal
from slipstream.core.sequence import Sequence
from slipstream.draft.base import DraftContext, Drafter
from slipstream.draft.traits import DrafterTraits, TableGrowth
from slipstream.errors import ConfigError

BYTES_PER_TOKEN = 135
"""What a token of a running text takes in an index, for each length of n-grams: a tuple and its place in a table."""


@dataclass(frozen=True)
class NgramOptions:
    """Keys of `speculative_config` for `ngram`; the names are vLLM's."""

    num_speculative_tokens: int = 4
    """The most draft tokens in a step."""
    prompt_lookup_min: int = 2
    """The shortest n-gram that counts as a match."""
    prompt_lookup_max: int = 4
    """The longest n-gram that is looked up; longer matches predict little better."""

    def __post_init__(self) -> None:
        check_at_least(
            "ngram",
            1,
            num_speculative_tokens=self.num_speculative_tokens,
            prompt_lookup_min=self.prompt_lookup_min,
            prompt_lookup_max=self.prompt_lookup_max,
        )
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ConfigError(
                f"ngram prompt_lookup_min ({self.prompt_lookup_min}) must not be above "
                f"prompt_lookup_max ({self.prompt_lookup_max})"
            )


class NgramIndex:
    """For one growing text: where each n-gram of `min_n` to `max_n` tokens last occurred before another token."""

    def __init__(self, min_n: int, max_n: int) -> None:
        self._lengths = range(min_n, max_n + 1)
        self._followed_at: dict[tuple[int, ...], int] = {}
        """N-gram to the position of the token after its last occurrence."""
        self._num_entries = [0] * (max_n + 1)
        """Entries by n-gram length, for `memory_bytes`."""
        self.num_indexed = 0

    def extend_to(self, token_ids: Seq[int]) -> None:
        """Index the n-grams of `token_ids` that are new since the last call; the last token has no follower yet."""
        for follower in range(max(self.num_indexed, 1), len(token_ids)):
            for n in self._lengths:
                if n > follower:
                    break
                ngram = tuple(token_ids[follower - n : follower])
                self._num_entries[n] += ngram not in self._followed_at
                self._followed_at[ngram] = follower
        self.num_indexed = len(token_ids)

    def find(self, token_ids: Seq[int]) -> int | None:
        """Position after the last earlier occurrence of the longest n-gram at the text's end; None without a match."""
        for n in reversed(self._lengths):
            if n < len(token_ids):
                follower = self._followed_at.get(tuple(token_ids[-n:]))
                if follower is not None:
                    return follower
        return None

    def memory_bytes(self) -> int:
        """Bytes held by the table, its keys and its positions."""
        keys_bytes = sum(num * (sys.getsizeof(()) + 8 * n) for n, num in enumerate(self._num_entries))
        # All n-grams that end at one position share one integer object; the longest n-grams are the most numerous.
        positions_bytes = max(self._num_entries) * sys.getsizeof(1 << 20)
        return sys.getsizeof(self._followed_at) + keys_bytes + positions_bytes


class NgramDrafter(Drafter):
    """Prompt lookup decoding (Saxena 2023) over prompt and answer alike, and over what an encoder reads.

    The longest n-gram at the text's end that occurred before decides. The tokens that followed its most recent
    occurrence are proposed. If that continuation reaches the end of the text, the draft repeats its own
    beginning: once accepted, the same match would predict exactly these tokens. Periodic text (rules, tables,
    lists) thus fills the whole budget instead of one period.

    A step costs `prompt_lookup_max - prompt_lookup_min + 1` table entries for each newly committed token,
    whatever the length of the text: with the defaults about 1 µs and 270 bytes a token, and 5 µs a
    proposal.
    """

    Options = NgramOptions
    traits = DrafterTraits(looks_up=True, observes_all=False, reads_text_only=True, reads_logits=False)

    @classmethod
    def configured(cls, options: Any, context: DraftContext) -> DrafterTraits:
        num_lengths = options.prompt_lookup_max - options.prompt_lookup_min + 1
        index = TableGrowth(
            what="an index of each running text", bytes_per_token=BYTES_PER_TOKEN * num_lengths
        )
        return replace(super().configured(options, context), tables=(index,))

    def __init__(self, options: NgramOptions, context: DraftContext) -> None:
        super().__init__(options, context)
        self._indexes: dict[int, NgramIndex] = self.by_sequence()

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Proposal]:
        """One chain a sequence, or nothing where no n-gram matches."""
        return [self._propose(sequence, budget) for sequence, budget in zip(sequences, budgets, strict=True)]

    def _propose(self, sequence: Sequence, budget: int) -> Proposal:
        num_draft_tokens = min(budget, self.options.num_speculative_tokens)
        if num_draft_tokens <= 0:
            return EMPTY_PROPOSAL
        index = self._indexes.get(sequence.id)
        if index is None:
            index = NgramIndex(self.options.prompt_lookup_min, self.options.prompt_lookup_max)
            self._indexes[sequence.id] = index
        token_ids = sequence.read_ids
        index.extend_to(token_ids)
        follower = index.find(token_ids)
        if follower is None:
            return EMPTY_PROPOSAL
        draft = token_ids[follower : follower + num_draft_tokens]
        period = len(token_ids) - follower
        while len(draft) < num_draft_tokens:
            draft.append(draft[-period])
        return Proposal.chain(draft)

    def memory_bytes(self) -> int:
        """Bytes of the tables of all live sequences."""
        return sum(index.memory_bytes() for index in self._indexes.values())
