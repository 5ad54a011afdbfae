"""Times the passes of models over rows and contexts, and the roofline times that follow from the device's rates."""

from __future__ import annotations

import hashlib
import json
import statistics
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import torch

from slipstream.core.version import __version__
from slipstream.kv.pool import bytes_per_token
from slipstream.models import CausalLM, RowGroup
from slipstream.models.cpu import threads
from slipstream.models.cpu.native import fingerprint
from slipstream.models.identity import ModelIdentity
from slipstream.models.linear.formats import UNCHANGED, WeightFormat, weight_format
from slipstream.models.support import text_config
from slipstream.profiling.limits import MatrixProduct, ReadStream, memory_array_bytes, synchronize
from slipstream.profiling.machine import cpu_name, num_cpus
from slipstream.profiling.profile import CostProfile, ProfileKey, Rate, StepTime


@dataclass(frozen=True)
class Survey:
    """What is measured, and for how long. Each size is timed `min_repeats` times at least, however slow it is."""

    row_counts: tuple[int, ...] = (1, 2, 4, 5, 8, 16, 32, 64)
    contexts: tuple[int, ...] = (16, 256, 1024)
    budget_s: float = 15.0
    """For all models together."""
    array_bytes: int = 2**30
    """Size of the array over which the memory's bandwidth is measured; more where the caches are large."""
    min_repeats: int = 3
    max_repeats: int = 25


QUICK = Survey((1, 2, 5, 8), (16, 256), budget_s=1.0, array_bytes=2**28, max_repeats=5)
"""A rough look: few points, few repeats."""

WARMUP_S = 0.01
"""Pause after a reading. PyTorch's threads keep the cores busy for some milliseconds after an operator."""

NUM_LOOKS = 8
"""Timed passes of each size for a first estimate."""

FEW_ROWS = 32
"""Up to so many rows, a step is bound by memory."""

NUM_WARMUP = 4
"""Untimed passes before few rows are timed after many. In serving, a step of few rows follows another one and finds its
data in the caches. After a pass of many rows, small models take half as long again for so many passes."""

OnProgress = Callable[[int, int], None]
"""Called between timed passes with how many passes are done, and of how many."""


def measure(models: Seq[CausalLM], survey: Survey, on_progress: OnProgress) -> list[CostProfile]:
    """The profile of each model, in order.

    The passes of all models and sizes and the readings of the device's limits take turns, so that a machine that
    becomes slower or faster meanwhile does not bias a comparison between them.
    """
    with threads.limit(max(model.num_threads for model in models)):
        limits = _Limits(models, survey)
        benches = [
            PassBench(model, survey.row_counts, survey.contexts, seed) for seed, model in enumerate(models)
        ]
        _take_turns(benches, limits, survey, on_progress)
    return [bench.profile(limits) for bench in benches]


def profile_key(model: ModelIdentity) -> ProfileKey:
    """The key under which this model's profile is saved and found, with the number of threads that it uses."""
    on_cpu = model.device.type == "cpu"
    backend = type(model.backend)
    return ProfileKey(
        cpu=cpu_name(),
        num_cpus=num_cpus(),
        device="cpu" if on_cpu else torch.cuda.get_device_name(model.device),
        num_threads=model.num_threads,
        model=_fingerprint(model),
        dtype=str(model.dtype).removeprefix("torch."),
        kv_cache_dtype=str(model.cache_dtype).removeprefix("torch."),
        quantization=None if model.weight_format.name == UNCHANGED else model.weight_format.name,
        kernels=_kernels(model),
        attention=f"{backend.__module__}:{backend.__qualname__}",
        slipstream=__version__,
        torch=str(torch.__version__),
        transformers=version("transformers"),
    )


def _kernels(model: ModelIdentity) -> str:
    exact = " with exact rows" if model.exact_rows else ""
    return f"{model.kernels} {fingerprint()}{exact}" if model.is_native else model.kernels


def time_passes(model: CausalLM, row_counts: Seq[int], context: int, budget_s: float) -> dict[int, float]:
    """Rows to the seconds of the fastest of a few passes, for a first estimate of what rows cost.

    Fewest rows first; sizes beyond `budget_s` are left out.
    """
    bench = PassBench(model, row_counts, (context,), seed=0)
    times_s: dict[int, float] = {}
    started_s = time.perf_counter()
    before = 0
    for repeat in range(NUM_LOOKS):
        for rows, context_ in bench.cells:
            if repeat == 0:
                bench.pass_s(rows, context_)  # kernels are made, buffers found
            if repeat and before > FEW_ROWS >= rows:
                for _ in range(NUM_WARMUP):
                    bench.pass_s(rows, context_)
            before = rows
            took_s = bench.pass_s(rows, context_)
            times_s[rows] = min(took_s, times_s.get(rows, took_s))
            if time.perf_counter() - started_s > budget_s:
                return times_s
    return times_s


def bytes_read_per_step(model: CausalLM, num_rows: int, context: int) -> int:
    """Bytes that a pass of `num_rows` rows behind `context` cached tokens reads at least: weights, keys and values."""
    return model.executor.reads.num_bytes + sum(cache_bytes_by_layer(model, num_rows, context))


def cache_bytes_by_layer(model: CausalLM, num_rows: int, context: int) -> list[int]:
    """Bytes of keys and values that such a pass reads at least, of each layer."""
    entries = context + num_rows
    read = []
    for shape, window in zip(model.shapes, _windows(model.config, len(model.shapes)), strict=True):
        seen = entries if window is None else min(entries, window + num_rows - 1)
        read.append(seen * bytes_per_token([replace(shape, source=None)], model.cache_dtype))
    return read


class _Limits:
    """Repeated readings of the rates of the models' devices."""

    def __init__(self, models: Seq[CausalLM], survey: Survey) -> None:
        self._array_bytes = {
            device: memory_array_bytes(survey.array_bytes, device)
            for device in {model.device for model in models}
        }
        self._rates: dict[tuple[object, torch.device], list[float]] = {}
        self._readings: dict[tuple[object, torch.device], Callable[[], float]] = {}
        for model in models:
            device = model.device
            for size in {self._array_bytes[device], self._own_bytes(model)}:
                if (size, device) not in self._readings:
                    self._readings[size, device] = ReadStream(size, device).bytes_per_s
            products = _products_of(model)
            kind = (model.dtype, products.name)
            if (kind, device) not in self._readings:
                self._readings[kind, device] = MatrixProduct(model.dtype, products, device).flops_per_s

    def read(self) -> None:
        """Take one reading of each."""
        for limit, reading in self._readings.items():
            self._rates.setdefault(limit, []).append(reading())
        time.sleep(WARMUP_S)

    def memory_bytes_per_s(self, model: CausalLM) -> Rate:
        """Over an array that no cache can hold."""
        return self._rate(self._array_bytes[model.device], model.device)

    def read_bytes_per_s(self, model: CausalLM) -> Rate:
        """Over an array of the size of the model's weights."""
        return self._rate(self._own_bytes(model), model.device)

    def flops_per_s(self, model: CausalLM) -> Rate:
        """In the model's dtype and weight format."""
        return self._rate((model.dtype, _products_of(model).name), model.device)

    def _own_bytes(self, model: CausalLM) -> int:
        return min(model.executor.reads.num_bytes, self._array_bytes[model.device])

    def _rate(self, limit: object, device: torch.device) -> Rate:
        rates = self._rates[limit, device]
        return Rate(statistics.median(rates), max(rates))


def _products_of(model: CausalLM) -> WeightFormat:
    """The format whose rate bounds a model's products: of what a file holds in codes, that of as many bits."""
    if not (model.stored_bits and model.is_native):
        return model.weight_format
    return weight_format("int4" if min(model.stored_bits) == 4 else "int8")


class PassBench:
    """One model with a cache of its own, and the times of its passes."""

    def __init__(self, model: CausalLM, row_counts: Seq[int], contexts: Seq[int], seed: int) -> None:
        self.model = model
        longest = model.context_length
        row_counts = [rows for rows in row_counts if rows <= max(longest // 2, 1)]
        contexts = sorted({min(context, longest - row_counts[-1]) for context in contexts})
        self.cells = [(rows, context) for context in contexts for rows in row_counts]
        self.times_s: dict[tuple[int, int], list[float]] = {cell: [] for cell in self.cells}
        self._pool, self._slots = model.trial_cache(contexts[-1] + row_counts[-1])
        generator = torch.Generator().manual_seed(seed)
        for layer, shape in enumerate(model.shapes):  # numbers as they occur: no NaN, nothing denormal
            entries = [
                torch.randn(shape.num_kv_heads, self._pool.num_slots, dim, generator=generator)
                for dim in (shape.key_dim, shape.value_dim)
            ]
            self._pool.write(layer, slice(self._pool.num_slots), *entries)
        self._token_ids = torch.randint(model.vocab_size, (row_counts[-1],), generator=generator).tolist()

    def pass_s(self, rows: int, context: int) -> float:
        """Seconds of one pass of a chain whose every row's logits are wanted."""
        group = RowGroup(self._slots, context, self._token_ids[:rows], range(rows))
        if self._pool.states is not None:
            group.owner, group.num_certain = 0, context + 1
            self._pool.states.assume(0, context)
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
            num_weights=self.model.executor.reads.number,
            memory_bytes_per_s=limits.memory_bytes_per_s(self.model),
            read_bytes_per_s=limits.read_bytes_per_s(self.model),
            flops_per_s=limits.flops_per_s(self.model),
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
            best_s=min(times_s),
            repeats=len(times_s),
            bytes_read=bytes_read_per_step(self.model, rows, context),
        )


def _take_turns(benches: Seq[PassBench], limits: _Limits, survey: Survey, on_progress: OnProgress) -> None:
    """Run every cell twice to warm it up, then time rounds over all cells, every other round backwards."""
    num_cells = sum(len(bench.cells) for bench in benches)
    total, done = num_cells * (1 + survey.max_repeats), 0
    started_s = time.perf_counter()
    round_s = 0.0
    for bench in benches:
        for cell in bench.cells:
            on_progress(done, total)
            bench.pass_s(*cell)  # kernels are made, buffers found
            round_s += bench.pass_s(*cell)
            done += 1
    left_s = survey.budget_s - (time.perf_counter() - started_s)
    repeats = min(max(int(left_s / round_s), survey.min_repeats), survey.max_repeats)
    total = num_cells * (1 + repeats)
    for turn in range(repeats):
        limits.read()
        for bench in benches:
            bench.pass_s(*bench.cells[0])  # not timed: something else fills the caches
            for cell in bench.cells if turn % 2 == 0 else reversed(bench.cells):
                on_progress(done, total)
                bench.times_s[cell].append(bench.pass_s(*cell))
                done += 1
    on_progress(total, total)


def _fingerprint(model: ModelIdentity) -> str:
    """Equal for equal architectures and sizes, wherever the checkpoint lies."""
    values = _lasting(model.config.to_dict())
    text = json.dumps([values, model.num_parameters], sort_keys=True, default=str)
    return f"{model.family}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _lasting(config: Any) -> Any:
    """A configuration, and those in it, without what says nothing of the architecture."""
    volatile = {"_name_or_path", "transformers_version", "dtype", "architectures"}
    if not isinstance(config, dict):
        return config
    return {key: _lasting(value) for key, value in config.items() if key not in volatile}


def _windows(config: Any, num_layers: int) -> list[int | None]:
    """The sliding window of each layer, None for one that sees everything."""
    text = text_config(config)
    window: int | None = getattr(text, "sliding_window", None)
    kinds: Mapping[int, str] | Seq[str] = (
        getattr(text, "layer_types", None) or ["sliding_attention"] * num_layers
    )
    known = len(kinds)  # an indexer's keys lie in the cache as further layers
    return [
        window if layer < known and kinds[layer] == "sliding_attention" else None
        for layer in range(num_layers)
    ]
