"""What an engine would be: from configurations, the tokenizer and the headers of files, without reading weights."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from slipstream.config import EngineConfig, SpeculativeConfig
from slipstream.draft.footprint import Footprint
from slipstream.draft.registry import footprints
from slipstream.engine.defaults import sampling_defaults
from slipstream.engine.memory import MemoryPlan, plan_memory, with_passes
from slipstream.models.configuration import read_generation_config
from slipstream.models.cpu import threads
from slipstream.models.files.folder import check_headers, check_weight_files
from slipstream.models.files.stored import KEPT_AS_STORED
from slipstream.models.outline import ModelOutline
from slipstream.models.resolve import resolve_device
from slipstream.models.tokenizer import load_tokenizer
from slipstream.models.unloaded import shared_outlines
from slipstream.plan.planner import Planner
from slipstream.plan.process import ProcessMemory
from slipstream.text.end_tokens import end_token_ids

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineDescription:
    """A target with a drafter, as the engine would hold them."""

    model: ModelOutline
    draft_model: ModelOutline | None
    """The model that the drafter would load; None for lookups, heads and groups."""
    tokenizer: Any
    end_token_ids: frozenset[int]
    """The tokens with which the model ends an answer."""
    memory_plan: MemoryPlan
    draft: Footprint
    """What the drafter would hold."""
    drafters: dict[str, tuple[str, Footprint]]
    """Every installed drafter by name: what it is, in a line, and what it would hold with this target."""


def describe(config: EngineConfig, speculative: SpeculativeConfig) -> EngineDescription:
    """Raises `ConfigError`, `ModelError` or `CapacityError` where the engine would not start either, as far as
    configurations tell."""
    resolve_device(config.device)
    check_weight_files(config.model)
    check_headers(config.model)
    tokenizer = load_tokenizer(
        config.tokenizer or config.model, revision=config.revision, trust_remote_code=config.trust_remote_code
    )
    with threads.limit(config.num_threads), shared_outlines():
        planner = Planner(config, speculative, ProcessMemory(0, 0, measured=False), tokenizer)
        drafters = footprints(planner.context)
    target, draft = planner.target, planner.draft
    if target.stored_as and config.quantization is not None:
        log.warning(KEPT_AS_STORED, config.model, target.stored_as, config.quantization)
    read_generation_config(target.model, config.model, config.revision)
    sampling_defaults(config, target.model)  # raises for values that no request could have
    if speculative.method in drafters:
        drafters[speculative.method] = drafters[speculative.method][0], draft
    planned = plan_memory(
        config,
        target,
        draft.weight_bytes,
        draft.traits.kv_bytes_per_token + planner.feature_bytes_per_token,
        draft.traits.max_nodes,
        is_loaded=False,
    )
    return EngineDescription(
        model=target,
        draft_model=planner.draft_model,
        tokenizer=tokenizer,
        end_token_ids=end_token_ids(tokenizer, target.model, target.vocab_size),
        memory_plan=with_passes(planned, config, [target, *draft.models], draft.traits),
        draft=draft,
        drafters=drafters,
    )
