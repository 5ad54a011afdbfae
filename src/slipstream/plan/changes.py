"""Where a plan does not fit: the changes that make it fit, the cheapest first, each planned again."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import torch

from slipstream.config import SpeculativeConfig
from slipstream.draft.methods import SUFFIX
from slipstream.errors import SlipstreamError
from slipstream.models.linear.formats import OF_DTYPE, UNCHANGED, WEIGHT_FORMATS, weight_format
from slipstream.models.unloaded import shared_outlines
from slipstream.plan.deployment import DeploymentPlan
from slipstream.plan.fitting import largest_batch, longest_context
from slipstream.plan.planner import Planner

NUM_CHANGES = 3
"""How many are given."""
_FEWEST_ROWS = 64
"""Passes of fewer rows would compute prompts slowly."""
CACHE_ERRORS = {torch.float16: 1.2e-3, torch.bfloat16: 6e-3, torch.int8: 3.4e-2}
"""The largest change of a row's logits, over their spread, that rounded entries made: of the embedded target."""
_WORTH = 1.25
"""So many times the batch or context must fit, with another change, for both to be given."""

# What a change costs, from least to most: first what no request notices but in time, then what requests may be refused,
# then what changes the text. A share of what is lost is added to the second kind.
_TIME, _DRAFTS, _SPEED, _SERVICE, _TEXT = 1.0, 2.0, 3.0, 4.0, 4.5


@dataclass(frozen=True, slots=True)
class PlanChange:
    """A change of the deployment."""

    name: str
    """What to do: 'quantization int8'."""
    cost: str
    """What it costs, in a sentence."""
    weight: float
    """Orders changes: a cheaper one has less."""
    flags: str
    """How to set it on the command line."""
    engine: Mapping[str, Any]
    """Fields of `EngineConfig` to replace."""
    speculative: SpeculativeConfig | None = None
    """The drafter to take instead."""
    batch: int | None = None
    context: int | None = None


@dataclass(frozen=True, slots=True)
class FittingChange:
    """Changes that, made together, fit; and the plan with them."""

    changes: tuple[PlanChange, ...]
    plan: DeploymentPlan

    @property
    def name(self) -> str:
        """'quantization int8 and 512 tokens of context'."""
        return " and ".join(change.name for change in self.changes)

    @property
    def cost(self) -> str:
        """What they cost together."""
        return "; ".join(change.cost for change in self.changes)

    @property
    def flags(self) -> str:
        """How to set them."""
        return " ".join(change.flags for change in self.changes)

    @property
    def weight(self) -> float:
        """Two changes cost more than each of them."""
        return sum(change.weight for change in self.changes)


def fitting_changes(planner: Planner, batch: int, context: int, memory_bytes: int) -> list[FittingChange]:
    """Return at most `NUM_CHANGES` that make `batch` requests of `context` tokens fit, the cheapest first.

    Every one of them was planned again, and its plan fits. Two are made together where one alone is not enough. Empty
    where nothing helps.
    """
    with shared_outlines():
        return _fitting_changes(planner, batch, context, memory_bytes)


def _fitting_changes(planner: Planner, batch: int, context: int, memory_bytes: int) -> list[FittingChange]:
    settings = list(setting_changes(planner))
    planners = {id(change): _with(planner, [change]) for change in settings}
    found = [
        FittingChange((change,), made.at(batch, context))
        for change in settings
        if (made := planners[id(change)]) is not None
    ]
    found += [FittingChange((change,), plan) for change, plan in _less(planner, batch, context, memory_bytes)]
    fitting = [one for one in found if one.plan.peak_bytes <= memory_bytes]
    if len(fitting) < NUM_CHANGES:
        fitting += _pairs(planner, planners, settings, batch, context, memory_bytes, fitting)
    return sorted(fitting, key=lambda one: one.weight)[:NUM_CHANGES]


def _pairs(
    planner: Planner,
    planners: Mapping[int, Planner | None],
    settings: list[PlanChange],
    batch: int,
    context: int,
    memory_bytes: int,
    singles: list[FittingChange],
) -> Iterator[FittingChange]:
    """Two changes together, neither of which fits alone."""
    enough = {id(one.changes[0]) for one in singles}
    small = [change for change in settings if id(change) not in enough]
    for first, second in combinations(small, 2):
        if set(first.engine) & set(second.engine) or (first.speculative and second.speculative):
            continue
        both = _with(planner, [first, second])
        if both is not None and (plan := both.at(batch, context)).peak_bytes <= memory_bytes:
            yield FittingChange((first, second), plan)
    alone = {
        "batch": max((change.batch or 0 for one in singles for change in one.changes), default=0),
        "context": max((change.context or 0 for one in singles for change in one.changes), default=0),
    }
    for change in small:
        changed = planners[id(change)]
        if changed is None:
            continue
        for less, plan in _less(changed, batch, context, memory_bytes):
            # A second change must be worth it: the requests that it saves are given.
            if (less.batch or 0) > _WORTH * alone["batch"] or (less.context or 0) > _WORTH * alone["context"]:
                yield FittingChange((change, less), plan)


def _with(planner: Planner, changes: list[PlanChange]) -> Planner | None:
    """The planner of the changed configurations; None where they cannot be had."""
    config, speculative = planner.config, planner.speculative
    for change in changes:
        config = replace(config, **change.engine)
        speculative = change.speculative or speculative
    try:
        return Planner(config, speculative, planner.process)
    except SlipstreamError:
        return None


def setting_changes(planner: Planner) -> Iterator[PlanChange]:
    """Changes of the engine's and the drafter's settings."""
    config = planner.config
    if config.max_num_batched_tokens > _FEWEST_ROWS:
        rows = max(_FEWEST_ROWS, config.max_num_batched_tokens // 4)
        yield PlanChange(
            f"passes of at most {rows} rows",
            "prompts are computed in more passes, so the first token comes later",
            _TIME,
            f"--max-num-batched-tokens {rows}",
            {"max_num_batched_tokens": rows},
        )
    if planner.target.executor_type.records:
        yield PlanChange(
            "passes that are not recorded",
            "a GPU waits for the host, which launches every operation of a pass anew; the text stays",
            _SPEED + 0.4,
            "--executor eager",
            {"executor": "eager"},
        )
    yield from _smaller_drafters(planner)
    yield from _other_drafters(planner)
    yield from _caches(planner)
    yield from _formats(planner)


def _smaller_drafters(planner: Planner) -> Iterator[PlanChange]:
    """The same drafter, holding less."""
    config, options = planner.config, dict(planner.speculative.options)
    method, reasoning = planner.speculative.method, planner.speculative.reasoning
    if method == SUFFIX.name and options.get("suffix_decoding_max_cached_tokens", 1_000_000) > 100_000:
        fewer = {**options, "suffix_decoding_max_cached_tokens": 100_000}
        yield PlanChange(
            "100,000 tokens of past answers",
            "fewer past answers to draft from, so fewer draft tokens are accepted; the text stays",
            _TIME + 0.1,
            _as_flag(method, fewer, reasoning),
            {},
            replace(planner.speculative, options=fewer),
        )
    if (
        planner.draft.models
        and options.get("quantization") is None
        and "model" in options
        and not config.quantization
    ):
        smaller = {**options, "quantization": "int8"}
        yield PlanChange(
            "the draft in int8",
            "a few draft tokens fewer are accepted; the text stays the target's",
            _DRAFTS,
            _as_flag(method, smaller, reasoning),
            {},
            replace(planner.speculative, options=smaller),
        )


def _other_drafters(planner: Planner) -> Iterator[PlanChange]:
    """Another drafter that holds less, or none."""
    method, reasoning = planner.speculative.method, planner.speculative.reasoning
    if method != "off" and (planner.draft.models or planner.draft.head_bytes):
        few = {"suffix_decoding_max_cached_tokens": 100_000}
        yield PlanChange(
            "suffix in the drafter's place",
            "text that repeats nothing gains nothing from speculation; the text stays",
            _SPEED,
            _as_flag(SUFFIX.name, few, reasoning),
            {},
            SpeculativeConfig(SUFFIX.name, options=few, reasoning=reasoning),
        )
    if method != "off":
        yield PlanChange(
            "no speculation",
            "all that speculation gains in speed; the text stays",
            _SPEED + 0.5,
            "--spec off" if reasoning is None else _as_flag("off", {}, reasoning),
            {},
            SpeculativeConfig("off", reasoning=reasoning),
        )
    if reasoning is not None:
        yield PlanChange(
            "no draft of whole steps",
            "requests that choose step-level speculation are refused",
            _SPEED + 0.6,
            _as_flag(method, planner.speculative.options, None),
            {},
            replace(planner.speculative, reasoning=None),
        )


def _caches(planner: Planner) -> Iterator[PlanChange]:
    """Narrower keys and values, where the kernels read them as they are: 16 bits of the checkpoint's kind, and 8."""
    target = planner.target
    if not target.is_fused:  # others copy what they read, widened
        return
    short = torch.bfloat16 if target.stored_dtype == torch.bfloat16 else torch.float16
    for dtype, error in ((short, CACHE_ERRORS[short]), (torch.int8, CACHE_ERRORS[torch.int8])):
        if dtype.itemsize >= target.cache_dtype.itemsize:
            continue
        name, wider = (str(each).removeprefix("torch.") for each in (dtype, target.cache_dtype))
        yield PlanChange(
            f"keys and values in {name}",
            f"lossy next to {wider}: entries are rounded, which moved logits by up to {error:.1%} of their spread "
            "where it was measured, so the text can change; it stays the same with and without speculation",
            _TEXT + error,
            f"--kv-cache-dtype {name}",
            {"kv_cache_dtype": name},
        )


def _formats(planner: Planner) -> Iterator[PlanChange]:
    """Smaller weights."""
    config, target = planner.config, planner.target
    decodes, on_gpu = target.executor_type.decodes, target.device.type == "cuda"
    if not (target.packs or on_gpu):
        return
    now = target.weight_format.bytes_per_weight
    for name in WEIGHT_FORMATS.names():
        found = weight_format(name)
        can_hold = target.packs or (decodes and found.in_decoder)
        if can_hold and name not in OF_DTYPE.values() and found.bytes_per_weight < now:
            yield PlanChange(
                f"quantization {name}",
                f"{found.summary}: another model with a little lower quality, so the text changes",
                _TEXT + 0.1 * (4 - found.bytes_per_weight),
                f"--quantization {name}",
                {"quantization": name},
            )
    if (
        config.quantization is None
        and config.dtype == "auto"
        and target.dtype == torch.float32
        and now == weight_format(UNCHANGED).bytes_per_weight
    ):
        rounded = target.rounds_to_16_bits or on_gpu
        cost = "weights are rounded to 16 bits, so the text changes a little"
        slow = "PyTorch's operators in 16 bits, several times slower on most CPUs, and the text changes"
        yield PlanChange(
            "dtype bfloat16",
            cost if rounded else slow,
            _TEXT + (0.05 if rounded else 1.5),
            "--dtype bfloat16",
            {"dtype": "bfloat16"},
        )


def _less(
    planner: Planner, batch: int, context: int, memory_bytes: int
) -> Iterator[tuple[PlanChange, DeploymentPlan]]:
    """Fewer requests at once, or shorter ones, each as many as fit."""
    fewer = largest_batch(planner, context, memory_bytes, batch) if batch > 1 else None
    if fewer is not None and fewer < batch:
        change = PlanChange(
            f"{fewer:,} request{'s' if fewer > 1 else ''} at once",
            f"of {batch:,} requests that come together {batch - fewer:,} wait",
            _SERVICE + (batch - fewer) / batch,
            f"--max-num-seqs {fewer}",
            {},
            batch=fewer,
        )
        yield change, planner.at(fewer, context)
    shorter = longest_context(planner, batch, memory_bytes)
    if shorter is not None and shorter < context:
        change = PlanChange(
            f"{shorter:,} tokens of context",
            f"requests of more than {shorter:,} tokens, prompt and answer together, are refused or cut",
            _SERVICE + (context - shorter) / context,
            f"--max-model-len {shorter}",
            {},
            context=shorter,
        )
        yield change, planner.at(batch, shorter)


def _as_flag(method: str, options: Mapping[str, Any], reasoning: Mapping[str, Any] | None) -> str:
    """The flag that sets this drafter, and steps as they were requested."""
    config = {"method": method, **options, **({} if reasoning is None else {"reasoning": dict(reasoning)})}
    return f"--speculative-config {shlex.quote(json.dumps(config))}"
