"""A draft model with a tokenizer of its own; the subclass decides in whose tokens it drafts."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from slipstream.core.sequence import Sequence
from slipstream.draft.base import DraftContext
from slipstream.draft.footprint import Footprint
from slipstream.draft.model.draft_model import DraftModelDrafter, DraftModelOptions, footprint_of
from slipstream.text.retokenize import Translation, Translator

UNKNOWN_TOKENS = (
    "the draft's keys and values are counted as if its tokens were as long as the target's, because the tokenizers are "
    "not loaded"
)


class OtherVocabularyDrafter(DraftModelDrafter):
    """A causal language model that reads the committed text in tokens of its own."""

    shares_vocabulary = False

    @classmethod
    def footprint(cls, options: Any, context: DraftContext) -> Footprint:
        """As with the target's tokenizer: how many of its own tokens the draft reads for one is known by the
        tokenizers, which are not loaded."""
        return replace(footprint_of(options, context, cls.configured(options, context)), note=UNKNOWN_TOKENS)

    def __init__(self, options: DraftModelOptions, context: DraftContext) -> None:
        super().__init__(options, context)
        self._translations: dict[int, Translation] = self.by_sequence()
        self._slots_per_token = self.translator.tokens_per_token()
        per_token = math.ceil(self.traits.kv_bytes_per_token * self._slots_per_token)
        self.traits = replace(self.traits, kv_bytes_per_token=per_token)

    def _check_tokenizer(self, options: DraftModelOptions, context: DraftContext) -> None:
        target_name = context.engine_config.model
        self.translator = Translator(context.tokenizer, self.tokenizer, target_name, options.model)

    def allocate(self, num_tokens: int) -> None:
        super().allocate(math.ceil(num_tokens * self._slots_per_token))

    def translate(self, sequence: Sequence) -> list[int]:
        """The committed text of the target's `sequence` in the draft's tokens; the list grows with the text.

        Cache entries of tokens that were retokenised are dropped.
        """
        if sequence.id not in self._translations:
            self._translations[sequence.id] = self.translator.begin()
        translation = self._translations[sequence.id]
        self._forget_behind(sequence.id, translation.update(sequence.token_ids))
        return translation.token_ids

    def _forget_behind(self, sequence_id: int, num_tokens: int) -> None:
        accounting = self.cache.accounting
        if sequence_id in accounting and accounting.num_valid(sequence_id) > num_tokens:
            accounting.truncate(sequence_id, num_tokens)
