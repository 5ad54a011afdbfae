"""Times the passes of models over rows and contexts, beside the least that the device could need for them."""

from __future__ import annotations

import hashlib
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import torch
import transformers
from torch import nn

import slipstream
from slipstream.control.machine import cpu_name, num_cpus
from slipstream.control.profile import CostProfile, ProfileKey, StepTime
from slipstream.engine.limits import flop_rate, memory_array_bytes, read_bandwidth, synchronize
from slipstream.kv.pool import KVPool
from slipstream.models import CausalLM, RowGroup
from slipstream.models.support import text_config


@dataclass(frozen=True)
class Survey:
    """What is measured, and for how long. Every model gets at least `min_repeats`, however slow it is."""

    row_counts: tuple[int, ...] = (1, 2, 4, 5, 8, 16, 32, 64)
    contexts: tuple[int, ...] = (16, 256, 1024)
    budget_s: float = 15.0
    """For all passes of all models together."""
    limits_s: float = 0.5
    """For each of the device's limits."""
    min_repeats: int = 3
    max_repeats: int = 25


QUICK = Survey((1, 2, 5, 8), (16, 256), budget_s=1.0, limits_s=0.05, max_repeats=5)
"""A rough look: few points, few repeats."""

OnProgress = Callable[[int, int], None]
"""Called between timed passes with how many passes are done, and of how many."""


def measure(models: Seq[CausalLM], survey: Survey, on_progress: OnProgress) -> list[CostProfile]:
    """The profile of each model, in order. The passes of all models and sizes take turns, so that a machine which
    grows slower or faster in the meantime spoils no comparison between them."""
    before = [_Limits.of(model, survey) for model in models]
    benches = [_Bench(model, survey, seed) for seed, model in enumerate(models)]
    _take_turns(benches, survey, on_progress)
    after = [_Limits.of(model, survey) for model in models]
    return [
        bench.profile(first.best(second)) for bench, first, second in zip(benches, before, after, strict=True)
    ]


def profile_key(model: CausalLM) -> ProfileKey:
    """The key under which this model's profile is saved and found, with the number of threads that is set now."""
    weights = Weights.of(model)
    on_cpu = model.device.type == "cpu"
    return ProfileKey(
        cpu=cpu_name(),
        num_cpus=num_cpus(),
        device="cpu" if on_cpu else torch.cuda.get_device_name(model.device),
        num_threads=torch.get_num_threads(),
        model=_fingerprint(model),
        dtype=str(model.dtype).removeprefix("torch."),
        weight_bits=round(8 * weights.num_bytes / weights.number),
        slipstream=slipstream.__version__,
        torch=torch.__version__,
        transformers=transformers.__version__,
    )


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights that a pass of one row reads: not an embedding, of which it looks up a row, and of a mixture of
    experts only as many as a row is sent to."""

    number: int
    """Of those that are multiplied with: matrices, not norms and biases."""
    num_bytes: int
    """Of all."""

    @classmethod
    def of(cls, model: CausalLM) -> Weights:
        """Counted over the module tree. A packed layer says its own size; its bias is a parameter like others."""
        share = _expert_share(model.config)
        number, num_bytes = 0.0, 0.0
        seen: set[int] = set()
        for module in model.model.modules():
            if isinstance(module, nn.Embedding):
                continue
            packed_bytes = getattr(module, "nbytes", None)
            if isinstance(packed_bytes, int):
                number += int(module.in_features) * int(module.out_features)  # type: ignore[arg-type]
                num_bytes += packed_bytes
            for parameter in module.parameters(recurse=False):
                if id(parameter) in seen:
                    continue
                seen.add(id(parameter))
                read = share if parameter.ndim == 3 else 1.0  # [experts, out, in]
                number += read * parameter.numel() if parameter.ndim > 1 else 0
                num_bytes += read * parameter.nbytes
        return cls(round(number), round(num_bytes))


def bytes_read_per_step(model: CausalLM, num_rows: int, context: int) -> int:
    """What a pass of `num_rows` rows behind `context` cached tokens must read at least: weights, keys and values."""
    entries = context + num_rows
    cached = 0
    for shape, window in zip(model.shapes, _windows(model.config, len(model.shapes)), strict=True):
        seen = entries if window is None else min(entries, window + num_rows - 1)
        cached += shape.elements() * seen * model.dtype.itemsize
    return Weights.of(model).num_bytes + cached


@dataclass(frozen=True, slots=True)
class _Limits:
    """What the device was able to do at one time."""

    memory_bytes_per_s: float
    read_bytes_per_s: float
    flops_per_s: float

    @classmethod
    def of(cls, model: CausalLM, survey: Survey) -> _Limits:
        array_bytes = memory_array_bytes(model.device)
        memory = read_bandwidth(array_bytes, model.device, survey.limits_s)
        weight_bytes = Weights.of(model).num_bytes
        own = memory
        if weight_bytes < array_bytes:
            own = max(memory, read_bandwidth(weight_bytes, model.device, survey.limits_s))
        return cls(memory, own, flop_rate(model.dtype, model.device, survey.limits_s))

    def best(self, other: _Limits) -> _Limits:
        """The higher of both readings: a floor is what the device can do, not what it was held back to."""
        return _Limits(
            max(self.memory_bytes_per_s, other.memory_bytes_per_s),
            max(self.read_bytes_per_s, other.read_bytes_per_s),
            max(self.flops_per_s, other.flops_per_s),
        )


class _Bench:
    """One model with a cache of its own, and the times of its passes."""

    def __init__(self, model: CausalLM, survey: Survey, seed: int) -> None:
        self.model = model
        # Rows first: a short context is still worth a measurement of all rows.
        limit = model.context_length
        row_counts = sorted({rows for rows in survey.row_counts if rows <= max(limit // 2, 1)})
        contexts = sorted({min(context, limit - row_counts[-1]) for context in survey.contexts})
        self.cells = [(rows, context) for context in contexts for rows in row_counts]
        self.times_s: dict[tuple[int, int], list[float]] = {cell: [] for cell in self.cells}
        num_slots = contexts[-1] + row_counts[-1]
        self._pool = KVPool(model.shapes, num_slots, model.dtype, model.device)
        generator = torch.Generator().manual_seed(seed)
        for tensor in (*self._pool.keys, *self._pool.values):  # numbers as they occur: no NaN, nothing denormal
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
        self._token_ids = torch.randint(model.vocab_size, (row_counts[-1],), generator=generator).tolist()

    def pass_s(self, rows: int, context: int) -> float:
        """Seconds of one pass of a chain whose every row's logits are wanted."""
        group = RowGroup(0, context, self._token_ids[:rows], range(rows))
        synchronize(self.model.device)
        started_s = time.perf_counter()
        self.model.forward([group], self._pool)
        synchronize(self.model.device)
        return time.perf_counter() - started_s

    def profile(self, limits: _Limits) -> CostProfile:
        """What was measured."""
        return CostProfile(
            key=profile_key(self.model),
            path=self.model.path,
            measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
            num_weights=Weights.of(self.model).number,
            memory_bytes_per_s=limits.memory_bytes_per_s,
            read_bytes_per_s=limits.read_bytes_per_s,
            flops_per_s=limits.flops_per_s,
            step_times=tuple(self._step_time(*cell) for cell in self.cells),
        )

    def _step_time(self, rows: int, context: int) -> StepTime:
        times_s = self.times_s[rows, context]
        q1_s, median_s, q3_s = statistics.quantiles(times_s, n=4, method="inclusive")
        return StepTime(
            rows=rows,
            context=context,
            median_s=median_s,
            q1_s=q1_s,
            q3_s=q3_s,
            repeats=len(times_s),
            bytes_read=bytes_read_per_step(self.model, rows, context),
        )


def _take_turns(benches: Seq[_Bench], survey: Survey, on_progress: OnProgress) -> None:
    """Warm every cell up once, then time rounds over all cells, every other round backwards."""
    started_s = time.perf_counter()
    num_cells = sum(len(bench.cells) for bench in benches)
    total, done = num_cells * (1 + survey.max_repeats), 0
    round_s = 0.0
    for bench in benches:
        for cell in bench.cells:
            on_progress(done, total)
            bench.pass_s(*cell)  # kernels are made, buffers found
            round_s += bench.pass_s(*cell)
            done += 1
    left_s = survey.budget_s - (time.perf_counter() - started_s)
    repeats = min(max(math.floor(left_s / round_s), survey.min_repeats), survey.max_repeats)
    total = num_cells * (1 + repeats)
    for turn in range(repeats):
        for bench in benches:
            bench.pass_s(*bench.cells[0])  # not timed: the other model's weights may fill the caches
            for cell in bench.cells if turn % 2 == 0 else reversed(bench.cells):
                on_progress(done, total)
                bench.times_s[cell].append(bench.pass_s(*cell))
                done += 1
    on_progress(total, total)


def _fingerprint(model: CausalLM) -> str:
    """Equal for equal architectures and sizes, wherever the checkpoint lies."""
    volatile = {"_name_or_path", "transformers_version", "dtype", "architectures"}
    values = {key: value for key, value in model.config.to_dict().items() if key not in volatile}
    text = json.dumps([values, model.num_parameters], sort_keys=True, default=str)
    return f"{model.family}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _expert_share(config: Any) -> float:
    """Which part of a mixture's experts one row is sent to; 1 where there is no mixture."""
    text = text_config(config)
    chosen = getattr(text, "num_experts_per_tok", None)
    experts = getattr(text, "num_local_experts", None) or getattr(text, "num_experts", None)
    return chosen / experts if chosen and experts else 1.0


def _windows(config: Any, num_layers: int) -> list[int | None]:
    """The sliding window of each layer, None for one that sees everything."""
    text = text_config(config)
    window: int | None = getattr(text, "sliding_window", None)
    kinds: Mapping[int, str] | Seq[str] = getattr(text, "layer_types", None) or ["sliding_attention"] * num_layers
    return [window if kinds[layer] == "sliding_attention" else None for layer in range(num_layers)]
