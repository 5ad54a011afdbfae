"""What an engine would be: from configurations, the tokenizer and the headers of files, without reading weights."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from slipstream.config import EngineConfig, SpeculativeConfig
from slipstream.draft.footprint import Footprint
from slipstream.draft.registry import footprints
from slipstream.engine.defaults import sampling_defaults
from slipstream.engine.memory import MemoryPlan, plan_memory, recorded_passes, with_passes
from slipstream.errors import CapacityError, SlipstreamError
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
    return EngineDescription(
        model=target,
        draft_model=planner.draft_model,
        tokenizer=tokenizer,
        end_token_ids=end_token_ids(tokenizer, target.model, target.vocab_size),
        memory_plan=planned_memory(planner),
        draft=draft,
        drafters=drafters,
    )


def planned_memory(planner: Planner) -> MemoryPlan:
    """What an engine will hold, before its weights are read; raises `CapacityError` as that does."""
    config, target, draft = planner.config, planner.target, planner.draft
    models, features = [target, *draft.models], planner.feature_bytes_per_token
    planned = plan_memory(
        config,
        target,
        draft.weight_bytes,
        draft.traits.kv_bytes_per_token + features,
        draft.traits.max_nodes,
        is_loaded=False,
        recorded=recorded_passes(config, models, draft.traits.max_nodes, features),
        drafts=draft.models,
    )
    return with_passes(planned, config, models, draft.traits)


def check_memory(config: EngineConfig, speculative: SpeculativeConfig) -> None:
    """Raise `CapacityError` where an engine on a GPU has too little memory, before weights are read.

    What else keeps it from starting is left to loading, which says it all. On a CPU weights may give way to each other,
    and the memory is planned once they are read.
    """
    try:
        if resolve_device(config.device).type != "cuda":
            return
        with threads.limit(config.num_threads), shared_outlines():
            planned_memory(Planner(config, speculative, ProcessMemory(0, 0, measured=False)))
    except CapacityError:
        raise
    except SlipstreamError as error:
        log.debug("memory is planned once weights are read: %s", error)
