"""Token-level intersection: a draft model with another tokenizer drafts the tokens that both vocabularies have.

Timor, Mamou, Korat, Berchansky, Pereg, Jain, Schwartz, Wasserblat and Harel, "Accelerating LLM inference with lossless
speculative decoding algorithms for heterogeneous vocabularies" (ICML 2025).

The draft's distribution is restricted to the tokens with the same bytes in both vocabularies and expressed in the
target's ids, so that all that follows (sampling parameters, noise, penalties, trees, verifiers) is as for a draft of
the same vocabulary. A draft token is one token in both. Only the committed text differs: the draft reads it in its own
tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.core.sequence import Sequence
from slipstream.draft.base import DraftContext
from slipstream.draft.model.draft_model import DraftModelOptions
from slipstream.draft.model.other_vocabulary import OtherVocabularyDrafter
from slipstream.draft.proposers.growing import Feed
from slipstream.errors import ConfigError, VocabularyMismatchError
from slipstream.text.token_bytes import shared_tokens


@dataclass(frozen=True, kw_only=True)
class TliOptions(DraftModelOptions):
    """Keys of `speculative_config` for `method: tli`."""

    model: str
    """Folder or hub id of the draft model, with any byte-level or SentencePiece-like tokenizer."""

    def __post_init__(self) -> None:
        self.check_draft("tli")
        if self.correction is not None:
            raise ConfigError("tli has no correction: the draft's tokens are not the target's; omit it")


class TliDrafter(OtherVocabularyDrafter):
    """Drafts with a causal language model of another vocabulary, in the tokens that it shares with the target."""

    Options = TliOptions

    def __init__(self, options: TliOptions, context: DraftContext) -> None:
        super().__init__(options, context)
        shared = shared_tokens(self.translator.target, self.translator.draft)
        self._own_ids = {
            ours: theirs
            for ours, theirs in shared.items()
            if ours < context.vocab_size and theirs < self.model.vocab_size
        }
        if not self._own_ids:
            raise VocabularyMismatchError(f"draft {options.model!r} has no token in common with the target")
        device = self.model.device
        self._columns = torch.tensor(list(self._own_ids), device=device)  # [shared], target ids
        self._own_columns = torch.tensor(list(self._own_ids.values()), device=device)  # [shared], draft ids

    def _draft_vocab_size(self, target_vocab_size: int) -> int:
        return target_vocab_size

    def _token_ids(self, sequence: Sequence) -> list[int]:
        return self.translate(sequence)

    def _own_id(self, token_id: int) -> int:
        return self._own_ids[token_id]

    def _forward(self, feeds: Seq[Feed]) -> Tensor:
        own = self.model.forward([feed.rows for feed in feeds], self.cache.pool).logits
        logits = own.new_full((len(own), self._trees.vocab_size), -math.inf)
        logits[:, self._columns] = own[:, self._own_columns]
        return logits
