"""What a server must know of the engine that it serves: plain values, which can also come from another process."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, fields
from typing import Any

from slipstream.core.metrics.decoded import DecodedRow
from slipstream.core.request import DEFAULT_OPTIONS, RequestOptions
from slipstream.core.step import StepItem
from slipstream.engine.engine import Engine
from slipstream.engine.requests import reproduces
from slipstream.sampling.params import SamplingParams
from slipstream.text.encoder_prompts import EncoderDecoderTexts

_ROOM = {"num_slots", "kv_bytes"}


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """An engine as it was loaded; nothing here changes while it runs."""

    model: str
    """As the configuration names it."""
    method: str
    verifier: str
    lossy: bool
    """Whether its text may not be the target's: of every request, or of those that choose it (`allow_lossy`)."""
    verifier_reproduces: bool
    """Under it a seed repeats an answer whatever was drafted."""
    drafts: bool
    """Whether the drafter can propose anything."""
    draft_methods: list[str]
    """The drafters that a request may name."""
    num_speculative_tokens: int | None
    max_model_len: int
    max_num_seqs: int
    vocab_size: int
    sampling_defaults: dict[str, Any]
    end_token_ids: list[int]
    num_slots: int
    kv_bytes: int
    cache_dtype: str
    prefix_caching: bool
    revision: str | None = None
    """Of the model, on the hub."""
    encoder_texts: EncoderDecoderTexts | None = None
    """How prompts for an encoder and a decoder are made; None for a model without an encoder."""
    seed: int | None = None
    """Seed of the seeds of requests without one; None where each is drawn by chance."""

    @classmethod
    def of(cls, engine: Engine) -> EngineInfo:
        """The info of an engine in this process."""
        return cls(
            model=engine.config.model,
            method=engine.speculative.method,
            verifier=engine.speculative.verifier,
            lossy=engine.verifier.lossy or engine.config.allow_lossy,
            verifier_reproduces=engine.verifier.reproducible,
            drafts=engine.drafts,
            draft_methods=list(engine.draft_methods),
            num_speculative_tokens=engine.num_speculative_tokens,
            max_model_len=engine.max_model_len,
            max_num_seqs=engine.config.max_num_seqs,
            vocab_size=engine.model.vocab_size,
            sampling_defaults=dict(engine.sampling_defaults),
            end_token_ids=sorted(engine.end_token_ids),
            num_slots=engine.memory_plan.num_slots,
            kv_bytes=engine.memory_plan.kv_bytes + engine.memory_plan.encoded_bytes,
            cache_dtype=str(engine.model.cache_dtype).removeprefix("torch."),
            prefix_caching=engine.config.enable_prefix_caching,
            revision=engine.config.revision,
            encoder_texts=None
            if engine.intake.encoder_prompts is None
            else engine.intake.encoder_prompts.texts,
            seed=engine.config.seed,
        )

    def differences(self, other: EngineInfo) -> str:
        """What would answer otherwise in `other`, in words; empty where only the room of its caches differs, which goes
        by the memory that was free."""
        return ", ".join(
            f"{field.name} was {mine!r} and is {theirs!r}"
            for field in fields(self)
            if field.name not in _ROOM
            and (mine := getattr(self, field.name)) != (theirs := getattr(other, field.name))
        )

    def reproduces(self, params: SamplingParams, options: RequestOptions = DEFAULT_OPTIONS) -> bool:
        """Whether the same seed gives the same answer to such a request again."""
        return reproduces(self.verifier_reproduces, self.drafts, params, options)


FORCED = "grammar"
"""What statistics call the drafter of tokens that a grammar forces, where no drafter proposed any."""


def decoded_rows(items: Seq[StepItem], group: Callable[[RequestOptions], str]) -> list[DecodedRow]:
    """What a step made of the answers that it decoded; `group` names the statistics of a request."""
    rows: list[DecodedRow] = []
    for item in items:
        sequence = item.sequence
        begins = sequence.num_new_tokens == item.num_emitted and sequence.index == 0
        rows.append(
            DecodedRow(
                group(sequence.options),
                sequence.task,
                FORCED if item.is_forced else item.method,
                item.num_emitted,
                len(item.proposal),
                item.proposal.depth,
                item.num_accepted,
                item.reached,
                sequence.num_prompt_tokens if begins else 0,
                sequence.metrics.num_cached_tokens if begins else 0,
            )
        )
    return rows
