"""String-level exact match: a draft model with another tokenizer drafts text, which the target's tokenizer encodes.

Timor, Mamou, Korat, Berchansky, Pereg, Jain, Schwartz, Wasserblat and Harel, "Accelerating LLM inference with lossless
speculative decoding algorithms for heterogeneous vocabularies" (ICML 2025).

The draft may use its whole vocabulary. Its text is tokenised together with the end of the committed text, and the
tokens after the committed ones are proposed as a chain without probabilities.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

from slipstream.config import DTYPES, check_at_least, check_types, reject_unknown
from slipstream.core.proposal import EMPTY_PROPOSAL, Proposal
from slipstream.core.sequence import Sequence
from slipstream.draft.base import DraftContext, Drafter, Observation
from slipstream.draft.footprint import Footprint
from slipstream.draft.model.draft_model import DraftModelOptions, footprint_of
from slipstream.draft.model.other_vocabulary import UNKNOWN_TOKENS, OtherVocabularyDrafter
from slipstream.draft.traits import DrafterTraits
from slipstream.errors import ConfigError
from slipstream.models import CausalLM
from slipstream.models.linear.formats import check_quantization
from slipstream.sampling.params import SamplingParams
from slipstream.text.retokenize import LOOKBEHIND, Encoder, first_to_encode
from slipstream.text.token_bytes import match_special


@dataclass(frozen=True, kw_only=True)
class SlemOptions:
    """Keys of `speculative_config` for `method: slem`."""

    model: str
    """Folder or hub id of the draft model, with any byte-level or SentencePiece-like tokenizer."""
    num_speculative_tokens: int = 5
    """Draft tokens in a step, in the draft model's own vocabulary; fewer or more in the target's."""
    draft_temperature: float = 0.0
    """0 takes the draft's most probable tokens; above 0 they are sampled from its own distribution."""
    dtype: str = "auto"
    quantization: str | None = None
    """Weight format of the draft, such as `int8`, on a CPU. None: as the target's. The text stays the target's."""
    device: str = "auto"
    revision: str | None = None

    def __post_init__(self) -> None:
        check_types(self, "slem")
        check_at_least("slem", 1, num_speculative_tokens=self.num_speculative_tokens)
        if not 0 <= self.draft_temperature <= 10:
            raise ConfigError(f"slem draft_temperature must be from 0 to 10, got {self.draft_temperature}")
        reject_unknown([self.dtype], DTYPES, "slem dtype")
        check_quantization(self.quantization, "slem")


class _OwnVocabularyDrafter(OtherVocabularyDrafter):
    """The draft model on sequences in its own tokens."""

    def _draft_vocab_size(self, target_vocab_size: int) -> int:
        return self.model.vocab_size


class SlemDrafter(Drafter):
    """Drafts text with a causal language model of another vocabulary, re-encoded with the target's tokenizer."""

    Options = SlemOptions
    traits = DrafterTraits(has_own_model=True, reads_logits=False)

    @classmethod
    def configured(cls, options: Any, context: DraftContext) -> DrafterTraits:
        """A token of the draft may be several of the target's."""
        return replace(super().configured(options, context), max_nodes=2 * options.num_speculative_tokens)

    @classmethod
    def footprint(cls, options: Any, context: DraftContext) -> Footprint:
        """As of its draft model; see `OtherVocabularyDrafter.footprint`."""
        held = footprint_of(_inner_options(options), context, cls.configured(options, context))
        return replace(held, note=UNKNOWN_TOKENS)

    def __init__(self, options: SlemOptions, context: DraftContext) -> None:
        super().__init__(options, context)
        self.inner = _OwnVocabularyDrafter(_inner_options(options), context)
        self.traits = replace(self.traits, kv_bytes_per_token=self.inner.traits.kv_bytes_per_token)
        self.model = self.inner.model
        self._params = SamplingParams(temperature=options.draft_temperature)
        self._target, self._draft = self.inner.translator.target, self.inner.translator.draft
        self._special = {
            theirs: ours
            for ours, theirs in match_special(self._target, self._draft).items()
            if ours < context.vocab_size
        }
        self._encoder = Encoder(context.tokenizer, self._target)
        self._said = sorted(self._target.ordinary.values())
        self._written: dict[int, Sequence] = self.by_sequence()
        """Sequence id to the same sequence in the draft model's tokens."""

    # --- the contract -----------------------------------------------------------------------------------------

    def drafting_model(self) -> CausalLM:
        return self.model

    @property
    def parts(self) -> list[Drafter]:
        """The one that writes."""
        return [self.inner]

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Proposal]:
        """One chain a sequence; empty where the re-encoded text does not begin with the committed tokens."""
        # One token more than the budget: the last one is often dropped as unfinished.
        lengths = [
            min(self.options.num_speculative_tokens, budget + 1) if budget else 0 for budget in budgets
        ]
        drafts = self.inner.propose([self._as_written(sequence) for sequence in sequences], lengths)
        return [
            self._read(sequence, draft.token_ids, budget)
            for sequence, draft, budget in zip(sequences, drafts, budgets, strict=True)
        ]

    def observe(self, observations: Seq[Observation]) -> None:
        """Keep the draft model's entries as far as its draft agrees with the committed text."""
        written = []
        for seen in observations:
            if seen.sequence.id in self._written:
                text = self._as_written(seen.sequence)
                # An upper bound: the inner drafter compares its draft with the text itself.
                written.append(replace(seen, sequence=text, num_accepted=len(text.token_ids)))
        self.inner.observe(written)

    def release(self, sequence: Sequence) -> None:
        super().release(sequence)
        self.inner.release(sequence)

    # --- drafting ---------------------------------------------------------------------------------------------

    def _as_written(self, sequence: Sequence) -> Sequence:
        token_ids = self.inner.translate(sequence)
        if sequence.id not in self._written:
            self._written[sequence.id] = replace(
                sequence, token_ids=token_ids, num_prompt_tokens=0, params=self._params, leader=None
            )
        return self._written[sequence.id]

    def _read(self, sequence: Sequence, written: Seq[int], budget: int) -> Proposal:
        """The draft's text as target tokens, after the committed ones."""
        text, ending = b"", None
        for token in written:
            if token not in self._draft.ordinary:
                ending = self._special.get(token)
                break
            text += self._draft.ordinary[token]
        shares = [self._target.ordinary.get(token) for token in sequence.token_ids[-LOOKBEHIND[1] :]]
        first = first_to_encode(shares)
        committed = sequence.token_ids[len(sequence.token_ids) - len(shares) + first :]
        end = b"".join(share or b"" for share in shares[first:])
        token_ids, pieces = self._encoder.encode(end + text)
        if token_ids[: len(committed)] != committed:
            return EMPTY_PROPOSAL
        draft_tokens = token_ids[len(committed) :]
        if ending is not None:
            draft_tokens.append(ending)
        else:
            draft_tokens = draft_tokens[: self._num_finished(pieces[len(committed) :])]
        return Proposal.chain(draft_tokens[:budget]) if draft_tokens else EMPTY_PROPOSAL

    def _num_finished(self, pieces: Seq[bytes]) -> int:
        """How many of the tokens with bytes `pieces` cannot become part of a longer token as the text goes on."""
        for first in range(len(pieces)):
            rest = b"".join(pieces[first:])
            longer = bisect_right(self._said, rest)
            if longer < len(self._said) and self._said[longer].startswith(rest):
                return first
        return len(pieces)


def _inner_options(options: SlemOptions) -> DraftModelOptions:
    """The options of the draft model alone."""
    return DraftModelOptions(
        model=options.model,
        num_speculative_tokens=options.num_speculative_tokens,
        draft_sample_method="probabilistic" if options.draft_temperature else "greedy",
        dtype=options.dtype,
        quantization=options.quantization,
        device=options.device,
        revision=options.revision,
    )
