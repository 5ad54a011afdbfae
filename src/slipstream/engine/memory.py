"""What will be held in memory, decided before the first request."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import torch

from slipstream.config import EngineConfig
from slipstream.draft.traits import DrafterTraits
from slipstream.errors import CapacityError, ConfigError
from slipstream.kv.state import SPARE_ROWS, StateRoom, state_bytes
from slipstream.models.identity import ModelIdentity
from slipstream.plan.passes import PassLimits, PassSizes, activation_bytes, recorded_bytes
from slipstream.plan.sizes import format_bytes
from slipstream.profiling.memory import available_bytes, total_bytes

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by purpose, and how many tokens' keys and values fit.

    `slipstream plan` tells the same before anything is loaded, by the same arithmetic (`slipstream.plan`). What the
    process itself takes comes on top.
    """

    target_bytes: int
    draft_bytes: int
    kv_bytes_per_token: int
    """Target and drafter together."""
    num_slots: int
    max_model_len: int
    """Prompt and answer together; less than the model could when the cache is too small for more."""
    weight_format: str | None = None
    """Weight format of the target; None for float32."""
    cache_type: str | None = None
    """Type of the target's keys and values; None for float32."""
    activation_bytes: int = 0
    """What the largest passes of target and draft model compute with."""
    logit_bytes: int = 0
    """Logits of the largest number of checked rows, and what choosing tokens from them takes."""
    table_bytes: int = 0
    """The most that the drafter's tables and caches come to hold."""
    encoded_bytes: int = 0
    """What is kept of encoders' outputs, for `num_encoded` requests."""
    num_encoded: int | None = None
    """How many requests may run together where each keeps an encoder's output; None for models without an encoder."""
    recorded_bytes: int = 0
    """What executors come to hold of passes that they record: an estimate, see `models.executor.pass_memory`."""
    state_bytes: int = 0
    """States of recurrent layers, of target and draft models together."""
    num_state_copies: int = 0
    """Copies of the target's states that are kept for prefix reuse."""

    @property
    def kv_bytes(self) -> int:
        return self.kv_bytes_per_token * self.num_slots

    def __str__(self) -> str:
        weights = "" if self.weight_format is None else f" in {self.weight_format}"
        entries = "" if self.cache_type is None else f" in {self.cache_type}"
        passes = (
            f", passes {format_bytes(self.activation_bytes + self.logit_bytes)}" if self.logit_bytes else ""
        )
        encoded = (
            f", encoders' output {format_bytes(self.encoded_bytes)} for {self.num_encoded} requests"
            if self.num_encoded
            else ""
        )
        tables = f", drafter's tables up to {format_bytes(self.table_bytes)}" if self.table_bytes else ""
        recorded = f", recorded passes {format_bytes(self.recorded_bytes)}" if self.recorded_bytes else ""
        states = f", states {format_bytes(self.state_bytes)}" if self.state_bytes else ""
        return (
            f"target{weights} {format_bytes(self.target_bytes)}, draft {format_bytes(self.draft_bytes)}, "
            f"keys and values{entries} {format_bytes(self.kv_bytes)} for {self.num_slots:,} tokens{states}{encoded}"
            f"{passes}"
            f"{recorded}{tables}, at most {self.max_model_len:,} a request"
        )


def plan_memory(
    config: EngineConfig,
    model: ModelIdentity,
    draft_bytes: int,
    draft_kv_bytes_per_token: int,
    max_draft_tokens: int,
    is_loaded: bool = True,
    recorded: Seq[int] = (),
    drafts: Seq[ModelIdentity] = (),
) -> MemoryPlan:
    """Bound the cache by `kv_cache_bytes`, by a share of the memory or of what is free, and by what can ever be used.

    Where models are not loaded, what they will hold is not free. Nor is what will be `recorded`: the bytes of each
    model, the target first. Of the cache's memory, states of recurrent layers take their part, and so does what the
    encoders of the target and of the `drafts` make of requests' inputs.

    Raises `CapacityError` when not even a short request would fit, where what is recorded has no room beside
    `kv_cache_bytes`, and where the user has not set `max_model_len` and the drafter's share of `kv_cache_bytes` would
    shorten it: the same request must not end earlier with a drafter. Where the cache is a share of the free memory,
    that is only a warning.
    """
    max_model_len = config.max_model_len or model.context_length
    if max_model_len > model.context_length:
        raise ConfigError(
            f"max_model_len {max_model_len} is beyond the model's context of {model.context_length}"
        )
    unit = model.kv_unit
    per_token = model.kv_bytes_per_token + draft_kv_bytes_per_token
    both = model.weight_bytes + draft_bytes
    unread = 0 if is_loaded else both
    # What a request holds is rounded to units.
    longest_held = max_model_len + max_draft_tokens + unit
    allowed = _allowed_bytes(config, model.device, unread, both, sum(recorded))
    held = _held_beside(config, [model, *drafts], max_draft_tokens, longest_held * per_token, allowed)
    allowed = max(allowed - held.num_bytes, 0)
    num_slots = min(held.num_encoded * longest_held, allowed // max(per_token, 1))
    longest = min(num_slots - unit, max_model_len)  # without room for draft tokens a step decodes without
    without_draft = _allowed_bytes(config, model.device, unread, model.weight_bytes, sum(recorded[:1]))
    without_draft = max(without_draft - held.state_bytes - held.num_encoded * model.encoded_bytes, 0)
    alone = min(without_draft // max(model.kv_bytes_per_token, 1) - unit, max_model_len)
    needed = min(config.max_model_len or unit, max_model_len)
    least_beside = held.state_bytes + held.encoded_bytes  # for one request at a time
    if longest < needed:
        limit = f"max_model_len to {needed} and " if alone > longest and config.max_model_len is None else ""
        raise CapacityError(
            f"{format_bytes(allowed)}{_beside(recorded)} hold the keys and values of {num_slots} tokens, "
            f"too few for a request of {needed}; set {limit}kv_cache_bytes to at least "
            f"{_mebibytes(needed + unit, per_token, least_beside)} MiB"
        )
    if longest < alone:
        what = f"{format_bytes(allowed)} hold requests of {alone} tokens without the drafter and of {longest} with it"
        needed_mib = _mebibytes(max_model_len + unit, per_token, least_beside)
        _warn_of_shorter_texts(config, what, longest, needed_mib)
    elif longest < max_model_len:
        logger.warning(
            "the cache has room for requests of %d tokens, the model for %d", longest, max_model_len
        )
    fmt = None if model.weight_type == "float32" else model.weight_type
    cache = None if model.cache_dtype == torch.float32 else str(model.cache_dtype).removeprefix("torch.")
    plan = MemoryPlan(model.weight_bytes, draft_bytes, per_token, num_slots, longest, fmt, cache)
    if held.encoded_bytes:
        total = held.num_encoded * held.encoded_bytes
        plan = replace(plan, encoded_bytes=total, num_encoded=held.num_encoded)
    if sum(recorded):
        _check_room(plan.kv_bytes, recorded, available_bytes(model.device) - unread)
    return replace(
        plan,
        recorded_bytes=sum(recorded),
        state_bytes=held.state_bytes,
        num_state_copies=held.num_state_copies,
    )


@dataclass(frozen=True, slots=True)
class _HeldBeside:
    """What the cache's memory holds besides keys and values."""

    state_bytes: int
    num_state_copies: int
    encoded_bytes: int
    """An encoder's output for one request."""
    num_encoded: int

    @property
    def num_bytes(self) -> int:
        return self.state_bytes + self.num_encoded * self.encoded_bytes


def _held_beside(
    config: EngineConfig, models: Seq[ModelIdentity], max_nodes: int, request_bytes: int, allowed: int
) -> _HeldBeside:
    """States of recurrent layers and encoders' outputs of the `models`, the target first.

    `request_bytes` are those of the keys and values of the longest request. Raises `CapacityError` where the states
    alone leave nothing of what is `allowed`.
    """
    held_bytes = states_bytes(config, models, max_nodes)
    if held_bytes and allowed <= held_bytes:
        raise CapacityError(
            f"the states of {config.max_num_seqs} requests' recurrent layers take {format_bytes(held_bytes)}, and the "
            f"cache may take {format_bytes(allowed)}; lower max_num_seqs or raise kv_cache_bytes"
        )
    num_copies = _num_copies(config, models[0], allowed - held_bytes)
    held_bytes += num_copies * state_bytes(models[0].states)
    encoded_bytes = sum(each.encoded_bytes for each in models)
    num_encoded = _num_encoded(config, encoded_bytes, request_bytes, allowed - held_bytes)
    return _HeldBeside(held_bytes, num_copies, encoded_bytes, num_encoded)


def states_bytes(config: EngineConfig, models: Seq[ModelIdentity], max_nodes: int) -> int:
    """What the states of the recurrent layers of the `models`, the target first, take, but for the target's copies."""
    target, *drafts = models
    number, num_logged = config.max_num_seqs, max_nodes + SPARE_ROWS
    own = StateRoom(number, 0, num_logged).num_bytes(target.states)
    copies = number if config.enable_prefix_caching else 0
    return own + sum(StateRoom(number, copies, num_logged).num_bytes(model.states) for model in drafts)


def _num_copies(config: EngineConfig, model: ModelIdentity, allowed: int) -> int:
    """How many copies of the target's states are kept for prefix reuse: two a request, or what fits into a quarter of
    the memory that is left for the cache."""
    if not (model.states and config.enable_prefix_caching):
        return 0
    return max(min(2 * config.max_num_seqs, allowed // 4 // state_bytes(model.states)), 0)


def _num_encoded(config: EngineConfig, bytes_each: int, request_bytes: int, allowed: int) -> int:
    """How many requests may keep an encoder's output, so that there is room for their keys and values too."""
    if not bytes_each:
        return config.max_num_seqs
    number = max(min(config.max_num_seqs, allowed // (bytes_each + request_bytes)), 1)
    if number < config.max_num_seqs:
        logger.warning(
            "at most %d requests run together, since each keeps up to %s of an encoder's output",
            *(number, format_bytes(bytes_each)),
        )
    return number


def recorded_passes(
    config: EngineConfig, models: Seq[ModelIdentity], max_nodes: int, feature_bytes_per_token: int
) -> list[int]:
    """What executors come to hold of recorded passes of the `models`, the target first, on the target's device."""
    target = models[0]
    context = config.max_model_len or target.context_length
    limits = PassLimits.of(config, config.max_num_seqs, context, max_nodes)
    return [
        recorded_bytes(model, limits, feature_bytes_per_token if model is target else 0)
        for model in models
        if model.device == target.device
    ]


def _check_room(kv_bytes: int, recorded: Seq[int], free: int) -> None:
    """Raise `CapacityError` where a cache whose size was set leaves too little: on a GPU memory does not grow."""
    left = max(free - sum(recorded), 0)
    if kv_bytes > left:
        raise CapacityError(
            f"{format_bytes(left)} are free for keys and values{_beside(recorded)}, and kv_cache_bytes wants "
            f"{format_bytes(kv_bytes)} of them; lower it"
        )


def _beside(recorded: Seq[int]) -> str:
    """What takes memory from the cache, and how to have less of it."""
    if not sum(recorded):
        return ""
    return (
        f" beside recorded passes of {format_bytes(sum(recorded))} (a smaller max_model_len or max_num_batched_tokens "
        "has less of them, executor eager none)"
    )


def _warn_of_shorter_texts(config: EngineConfig, what: str, longest: int, needed_mib: int) -> None:
    """The drafter's share of the memory shortens requests to `longest` tokens: raise `CapacityError` where the
    configuration says the cache's size, and warn otherwise."""
    advice = f"set max_model_len to {longest} or less, with and without it"
    if config.kv_cache_bytes:
        raise CapacityError(
            f"{what}, so texts would end earlier with it; {advice}, or kv_cache_bytes to at least {needed_mib} MiB"
        )
    logger.warning("%s; for texts that end alike %s", what, advice)


def _mebibytes(num_tokens: int, bytes_per_token: int, held_bytes: int) -> int:
    """What so many tokens need beside what states and encoders' outputs hold."""
    return math.ceil((num_tokens * bytes_per_token + held_bytes) / 2**20)


def _allowed_bytes(
    config: EngineConfig, device: torch.device, unread: int, weight_bytes: int, recorded: int
) -> int:
    """For keys and values. Of what is free, models will take `unread` bytes, and recorded passes `recorded` ones."""
    if config.kv_cache_bytes:
        return config.kv_cache_bytes
    free = max(available_bytes(device) - unread - recorded, 0)
    if config.gpu_memory_utilization is None:
        return int(free * config.kv_memory_fraction)
    share = int(total_bytes(device) * config.gpu_memory_utilization)
    if share <= weight_bytes:
        raise CapacityError(
            f"gpu_memory_utilization {config.gpu_memory_utilization} is {format_bytes(share)} of the device's "
            f"{format_bytes(total_bytes(device))}, and the weights alone take {format_bytes(weight_bytes)}; raise it"
        )
    return min(free, max(share - weight_bytes - recorded, 0))


def with_passes(
    plan: MemoryPlan,
    config: EngineConfig,
    models: Seq[ModelIdentity],
    drafter: DrafterTraits,
) -> MemoryPlan:
    """The plan with what passes of the `models`, the target first, compute with, and what the drafter's tables come to
    hold."""
    limits = PassLimits.of(config, config.max_num_seqs, plan.max_model_len, drafter.max_nodes)
    target = models[0]
    num_tokens = min(config.max_num_seqs * plan.max_model_len, plan.num_slots)
    return replace(
        plan,
        activation_bytes=sum(activation_bytes(PassSizes.of(each), limits.over(each)) for each in models),
        logit_bytes=PassSizes.of(target).logit_bytes(limits.num_logit_rows, config.max_num_seqs),
        table_bytes=drafter.table_bytes(config.max_num_seqs, num_tokens),
    )
