"""What a draft worker serves: one drafter, made without its target."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch

from slipstream.config import EngineConfig, SpeculativeConfig
from slipstream.core.proposal import ProposalKind, VerifierTraits
from slipstream.draft.base import DraftContext, Drafter
from slipstream.draft.guarded.guard import Guard
from slipstream.draft.registry import create_drafter, validate
from slipstream.draft.remote.ahead import AheadDrafting
from slipstream.draft.remote.drafter import KINDS
from slipstream.draft.remote.handshake import fingerprint
from slipstream.draft.remote.options import ServedOptions
from slipstream.errors import CapacityError, ConfigError
from slipstream.models import load_tokenizer
from slipstream.models.cpu import threads
from slipstream.models.load_options import LoadOptions
from slipstream.models.outline import outline_model
from slipstream.profiling.memory import available_bytes

logger = logging.getLogger(__name__)

ANY_VERIFIER = VerifierTraits("of the engines", KINDS, needs_distributions=False, reproducible=False)
"""A worker does not know who will judge its drafts, only that they come as token ids; it tells what it makes."""
ROOM_PER_TEXT = 64
"""Entries beyond its tokens that a text may take in a cache: draft tokens, rounding."""


@dataclass(frozen=True)
class ServedDrafter:
    """A drafter that is ready to serve engines."""

    method: str
    drafting: AheadDrafting
    vocabulary: bytes
    """The target's, as a fingerprint."""
    vocab_size: int
    kind: ProposalKind
    """Kind of all its drafts."""
    num_operator_threads: int = 1
    """Threads of PyTorch's operators while it drafts."""


def serve_drafter(
    config: EngineConfig, speculative: SpeculativeConfig, options: ServedOptions
) -> ServedDrafter:
    """Load what `speculative` names for the target of `config`, of which only configuration and tokenizer are read.

    Raises `ConfigError` for a drafter that needs more of its target than the text, or whose drafts need distributions.
    """
    cls, _ = validate(speculative)
    if speculative.method == "off":
        raise ConfigError("a draft worker needs a drafter; choose one with --spec")
    if not cls.traits.reads_text_only:
        raise ConfigError(
            f"drafter {speculative.method!r} needs more of its target than the text (its hidden states, logits or "
            f"cache), so it runs in the engine's process; draft_model, self, tli and ngram can run elsewhere"
        )
    outline = outline_model(config.model, LoadOptions.of_draft(config, lora=None))
    tokenizer = load_tokenizer(
        config.tokenizer or config.model,
        revision=config.revision,
        trust_remote_code=config.trust_remote_code,
    )
    max_len = config.max_model_len or outline.context_length
    context = DraftContext(
        engine_config=config,
        tokenizer=tokenizer,
        vocab_size=outline.vocab_size,
        max_model_len=max_len,
        device=outline.device,
        dtype=outline.dtype,
        verifier=ANY_VERIFIER,
        target_outline=outline,
        draft_timeout_s=speculative.draft_timeout_s,
    )
    with threads.limit(config.num_threads):
        drafter = create_drafter(speculative, context)
    return served(speculative.method, drafter, context, options, tokenizer)


def served(
    method: str, drafter: Drafter, context: DraftContext, options: ServedOptions, tokenizer: Any
) -> ServedDrafter:
    """`drafter` as a worker serves it, with room for its keys and values."""
    kinds = drafter.traits.kinds
    if len(kinds) != 1 or not kinds <= KINDS:
        raise ConfigError(
            f"drafter {method!r} makes {' and '.join(sorted(kinds))} drafts; a worker sends token ids alone, so set "
            f"draft_sample_method to coupled or greedy"
        )
    recurrent = next((model for model in drafter.drafting_models() if model.states), None)
    if recurrent is not None:
        raise ConfigError(
            f"a worker drafts ahead of what the target accepts, so {recurrent.family}'s recurrent layers would compute "
            "their states anew at every rejection; draft in the target's own process"
        )
    max_len = min(context.max_model_len, drafter.traits.context_length or context.max_model_len)
    num_tokens = _room(drafter, options.max_requests * (max_len + ROOM_PER_TEXT), context)
    drafter.allocate(num_tokens)
    operator_threads = [model.executor.num_operator_threads for model in drafter.drafting_models()]
    return ServedDrafter(
        method=method,
        drafting=AheadDrafting(
            Guard(drafter, context.vocab_size, kinds, context.draft_timeout_s),
            vocab_size=context.vocab_size,
            tokens_per_round=options.tokens_per_round,
            max_requests=options.max_requests,
            max_len=max_len,
            prompt_rows=context.engine_config.max_num_batched_tokens,
        ),
        vocabulary=fingerprint(tokenizer),
        vocab_size=context.vocab_size,
        kind=next(iter(kinds)),
        num_operator_threads=max(operator_threads, default=1),
    )


def _room(drafter: Drafter, useful: int, context: DraftContext) -> int:
    """Tokens whose keys and values are held: what can be used, within the configured memory."""
    per_token = drafter.traits.kv_bytes_per_token
    if per_token == 0:
        return useful
    config = context.engine_config
    models = drafter.drafting_models()
    device = models[0].device if models else torch.device("cpu")
    allowed = config.kv_cache_bytes or int(available_bytes(device) * config.kv_memory_fraction)
    num_tokens = min(useful, allowed // per_token)
    if num_tokens < 2 * ROOM_PER_TEXT:
        raise CapacityError(
            f"{allowed:,} bytes hold {num_tokens} tokens of the drafter's keys and values; raise kv_cache_bytes"
        )
    if num_tokens < useful:
        logger.info("keys and values of %d tokens fit; texts beyond go without drafts", num_tokens)
    return num_tokens
