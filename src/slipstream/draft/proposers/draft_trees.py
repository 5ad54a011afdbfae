"""Begins the draft trees of a drafter."""

from __future__ import annotations

import dataclasses

from slipstream.core.sequence import Sequence
from slipstream.draft.proposers.draft_tree import DraftTree
from slipstream.draft.proposers.proposal_shape import ProposalShape
from slipstream.kv.slots import SlotMap
from slipstream.sampling.noise import Noise
from slipstream.sampling.params import SamplingParams
from slipstream.sampling.processors import LogitsProcessor


class DraftTrees:
    """Makes a `DraftTree` for a sequence, and keeps each sequence's logits processor from step to step."""

    def __init__(
        self,
        shape: ProposalShape,
        vocab_size: int,
        processors: dict[int, LogitsProcessor],
        confidence_threshold: float = 0.0,
    ) -> None:
        """`processors` is an empty table by sequence id, which its owner keeps free of released sequences."""
        self.shape = shape
        self.confidence_threshold = confidence_threshold
        """For chains; see `ShapeOptions`."""
        self.vocab_size = vocab_size
        """Width of the drafter's logits, in the target's tokens."""
        self._processors = processors

    def may_draft(self, sequence: Sequence) -> bool:
        """False where the drafter has none of the request's allowed tokens."""
        allowed = sequence.params.allowed_token_ids
        return allowed is None or any(token < self.vocab_size for token in allowed)

    def begin(self, sequence: Sequence, budget: int, slots: SlotMap = ()) -> DraftTree:
        """An empty tree below the sequence's committed text, of at most `budget` nodes.

        It stays empty where `may_draft` is False.
        """
        if not self.may_draft(sequence):
            budget = 0
        greedy = sequence.params.temperature == 0
        if sequence.id not in self._processors:
            params = sequence.params
            if greedy and not self.shape.is_chain:
                # A one-hot distribution does not rank a second token: use the drafter's own probabilities.
                params = dataclasses.replace(params, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
            self._processors[sequence.id] = self._processor(sequence, params)
        return DraftTree(
            sequence,
            self.shape,
            max_nodes=min(budget, self.shape.num_nodes),
            max_depth=min(budget, self.shape.depth),
            frontier=[None] if budget else [],
            processor=self._processors[sequence.id],
            noise=Noise(sequence.seed, len(sequence.token_ids), greedy, sequence.nonce),
            slots=slots,
            confidence_threshold=self.confidence_threshold if self.shape.is_chain else 0.0,
        )

    def _processor(self, sequence: Sequence, params: SamplingParams) -> LogitsProcessor:
        prompt = sequence.token_ids[: sequence.num_prompt_tokens]
        known = _of_width(params, self.vocab_size)
        return LogitsProcessor(known, prompt, (), (), self.vocab_size, sequence.grammar)


def _of_width(params: SamplingParams, vocab_size: int) -> SamplingParams:
    """`params` without token ids beyond the drafter's vocabulary; they may be valid for the target."""
    allowed = params.allowed_token_ids
    if allowed is not None:  # with none left nothing is drafted, see `DraftTrees.may_draft`
        allowed = [token for token in allowed if token < vocab_size] or None
    bias = {token: bias for token, bias in (params.logit_bias or {}).items() if token < vocab_size}
    return dataclasses.replace(
        params,
        allowed_token_ids=allowed,
        logit_bias=bias or None,
        stop_token_ids=(),
        logprobs=None,
        prompt_logprobs=None,
    )
