"""From what a user writes to an engine."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

from slipstream.config import EngineConfig, SpeculativeConfig
from slipstream.core.garbage import uncollected
from slipstream.core.pretrained import path_of, with_fetched_drafts
from slipstream.draft.base import DraftContext, Drafter
from slipstream.draft.registry import make_drafter
from slipstream.engine.control import create_policy
from slipstream.engine.defaults import sampling_defaults
from slipstream.engine.description import check_memory
from slipstream.engine.drafting import Drafting
from slipstream.engine.engine import Engine
from slipstream.engine.extension import StepExtension
from slipstream.engine.memory import MemoryPlan, plan_memory, recorded_passes, with_passes
from slipstream.engine.parts import EngineParts
from slipstream.engine.reasoning import StepSpeculation
from slipstream.engine.runner import ModelRunner
from slipstream.engine.speculation import ParsedSpeculation
from slipstream.engine.target import load_target, shared_target
from slipstream.kv.state import SPARE_ROWS, StateRoom
from slipstream.models import CausalLM
from slipstream.models.cpu import threads
from slipstream.schedule.scheduler import Scheduler
from slipstream.text.end_tokens import end_token_ids
from slipstream.verify.base import Verifier
from slipstream.verify.registry import create_verifier

logger = logging.getLogger(__name__)


def make_engine(
    model: str | os.PathLike[str] | None,
    speculative_config: Mapping[str, Any] | SpeculativeConfig | None,
    engine_options: Mapping[str, Any],
    like: Engine | None = None,
) -> Engine:
    """The engine that `LLM` and `AsyncEngine` are made of.

    `model` None is the small target that ships with the package, and `smollm2` is fetched; `engine_options` are the
    fields of `EngineConfig`, or vLLM's keys.
    `like` is an engine of the same target, whose weights are shared.
    Raises `ConfigError`, `ModelError` or `CapacityError` for what cannot be loaded or does not fit.
    """
    if isinstance(model, str):
        model = path_of(model)
    config = EngineConfig.from_options(model, engine_options)
    if speculative_config is not None and not isinstance(speculative_config, SpeculativeConfig):
        speculative_config = SpeculativeConfig.from_mapping(speculative_config)
    if speculative_config is not None:
        options = with_fetched_drafts(speculative_config.options, speculative_config.method)
        speculative_config = replace(speculative_config, options=options)
    with uncollected():
        return create_engine(config, speculative_config, like=like)


def create_engine(
    config: EngineConfig, speculative: SpeculativeConfig | None = None, *, like: Engine | None = None
) -> Engine:
    """An engine as configured; `like` is one of the same target, whose weights and tokenizer are shared.

    Raises as `make_engine` does.
    """
    speculation = ParsedSpeculation.of(speculative or SpeculativeConfig(), config.allow_lossy)
    speculative = speculation.config
    _warn_of_threads(config.num_threads)
    if like is None:
        check_memory(config, speculative)
    with threads.limit(config.num_threads):
        model, tokenizer = load_target(config) if like is None else shared_target(like, config)
        defaults = sampling_defaults(config, model.model)  # raises for values that no request could have
        verifier = create_verifier(speculative.verifier)
        context = _draft_context(config, speculative, model, tokenizer, verifier)
        drafter = make_drafter(speculation.config, speculation.drafter, speculation.options, context)
        extension = _create_extension(speculation, drafter)
    ends = end_token_ids(tokenizer, model.model, model.vocab_size)
    plan = _planned(config, model, speculation, drafter, extension)
    drafter.allocate(plan.num_slots)
    extension.begin(plan.num_slots, ends, plan.max_model_len)
    runner = _runner(config, model, drafter, plan)
    drafting = Drafting(drafter, speculative.method, create_policy(speculative, drafter, model))
    drafting.attach(runner.cache)
    if verifier.walks and model.executor.chooses:
        drafting.let_pend(model.device)
    return Engine(
        EngineParts(
            config=config,
            speculative=speculative,
            model=model,
            tokenizer=tokenizer,
            sampling_defaults=defaults,
            end_token_ids=ends,
            drafter=drafter,
            verifier=verifier,
            extension=extension,
            memory_plan=plan,
            scheduler=Scheduler(
                runner.cache.accounting,
                max_num_seqs=plan.num_encoded or config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                num_tokens_limit=plan.max_model_len,
                max_draft_tokens=drafter.traits.max_nodes,
            ),
            drafting=drafting,
            runner=runner,
        )
    )


def _draft_context(
    config: EngineConfig, speculative: SpeculativeConfig, model: CausalLM, tokenizer: Any, verifier: Verifier
) -> DraftContext:
    """What a drafter is made for."""
    return DraftContext(
        engine_config=config,
        tokenizer=tokenizer,
        vocab_size=model.vocab_size,
        max_model_len=config.max_model_len or model.context_length,
        device=model.device,
        dtype=model.dtype,
        verifier=verifier.traits(),
        target=model,
        draft_timeout_s=speculative.draft_timeout_s,
    )


def _warn_of_threads(num_threads: int | None) -> None:
    cores = threads.usable_cores()
    if num_threads is not None and num_threads > math.ceil(cores):
        logger.warning(
            "num_threads is %d, but this process may use %g cores; more threads than cores are slower",
            num_threads,
            cores,
        )


def _create_extension(speculation: ParsedSpeculation, drafter: Drafter) -> StepExtension:
    """What the configuration sets as `reasoning`."""
    if speculation.reasoning is None:
        return StepExtension()
    config = drafter.context.engine_config
    return StepSpeculation(
        speculation,
        replace(drafter.context, loaded_drafter=drafter),
        max(config.max_num_batched_tokens - config.max_num_seqs, 0),
    )


def _planned(
    config: EngineConfig,
    model: CausalLM,
    speculation: ParsedSpeculation,
    drafter: Drafter,
    extension: StepExtension,
) -> MemoryPlan:
    """What all of them hold; raises `CapacityError`."""
    drafters = [drafter, *extension.drafters()]
    drafting: Seq[CausalLM] = [each for one in drafters for each in one.drafting_models()]
    models = list(
        {id(each): each for each in (model, *drafting)}.values()
    )  # one that several use counts once
    feature_bytes = _feature_width(model, drafter) * model.dtype.itemsize
    plan = plan_memory(
        config,
        model,
        sum(each.memory_bytes() for each in drafters),
        sum(each.traits.kv_bytes_per_token for each in drafters) + feature_bytes,
        drafter.traits.max_nodes,
        recorded=recorded_passes(config, models, drafter.traits.max_nodes, feature_bytes),
        drafts=drafting,
    )
    for each in models:
        each.num_encoded = plan.num_encoded or 1
    plan = with_passes(plan, config, models, drafter.traits)
    logger.info("memory: %s", plan)
    return plan


def _runner(config: EngineConfig, model: CausalLM, drafter: Drafter, plan: MemoryPlan) -> ModelRunner:
    cache = model.new_cache(
        plan.num_slots,
        prefix_caching=config.enable_prefix_caching,
        feature_width=_feature_width(model, drafter),
        states=StateRoom(config.max_num_seqs, plan.num_state_copies, drafter.traits.max_nodes + SPARE_ROWS),
    )
    layers = drafter.traits.feature_layers
    model.executor.warm_up(cache.pool, config.max_num_batched_tokens, layers, chooses=True)
    return ModelRunner(model, cache, layers)


def _feature_width(model: CausalLM, drafter: Drafter) -> int:
    """Numbers of the target's hidden states that are kept for each token."""
    return len(drafter.traits.feature_layers) * model.hidden_size
