"""One engine for each configuration on a shared target: all in memory if there is room, else one at a time."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

import torch

from slipstream.config import EngineConfig
from slipstream.engine.engine import Engine
from slipstream.engine.factory import make_engine
from slipstream.engine.labels import engine_labels
from slipstream.engine.memory import MemoryPlan
from slipstream.errors import CapacityError, ConfigError
from slipstream.profiling.memory import available_bytes
from slipstream.tools.bench.engine.configurations import Configuration


class Engines:
    """Engines by configuration.

    With `side_by_side` they share the target's weights, and each gets an equal share of the memory for keys and values.
    When their planned memory exceeds the free memory, or an engine cannot be created in addition to the others,
    `side_by_side` is False: one engine is in memory at a time, and a change of configuration loads another.
    """

    def __init__(
        self,
        model: str | None,
        configurations: Seq[Configuration],
        engine_options: Mapping[str, Any],
        max_concurrency: int,
    ) -> None:
        self._model = model
        self.configurations = list(configurations)
        self._options = {"max_num_seqs": max_concurrency, **engine_options}
        _check_room(self._options["max_num_seqs"], max_concurrency)
        self._held: dict[int, Engine] = {}
        self._warm: set[tuple[int, int]] = set()
        self.memory_plans: dict[int, MemoryPlan] = {}
        """Configuration to its engine's memory plan, once the engine has been created."""
        self.labels: list[str] = []
        """Notes that must accompany the results."""
        self.side_by_side = self._make_all()

    def get(self, number: int) -> Engine:
        """The engine of configuration `number`."""
        if number not in self._held:
            self._held.clear()
            gc.collect()  # engines are in reference cycles; their memory must be free before the next plan
            self._held[number] = self._make(number, share=1, like=None)
        return self._held[number]

    def is_cold(self, number: int, concurrency: int) -> bool:
        """True for the first call with these arguments since the engine was created: it needs a warm-up."""
        cold = (number, concurrency) not in self._warm
        self._warm.add((number, concurrency))
        return cold

    def _make_all(self) -> bool:
        """Create all engines; returns False, and keeps none, when there is no room for all."""
        free_bytes: int | None = None
        like: Engine | None = None
        try:
            for number in range(len(self.configurations)):
                like = self._held[number] = self._make(number, len(self.configurations), like)
                if free_bytes is None:  # the target is in memory now, and its device known
                    free_bytes = available_bytes(like.model.device)
            planned = sum(plan.draft_bytes + plan.kv_bytes for plan in self.memory_plans.values())
            if free_bytes is not None and planned <= free_bytes:
                return True
        except (CapacityError, MemoryError, torch.OutOfMemoryError):
            pass  # each may still fit alone; otherwise `get` raises
        self._held.clear()
        del like
        gc.collect()
        return False

    def _make(self, number: int, share: int, like: Engine | None) -> Engine:
        """The engine of configuration `number`, with one `share`-th of the memory for keys and values."""
        options = dict(self._options)
        if options.get("gpu_memory_utilization") is not None:
            raise ConfigError(
                "gpu_memory_utilization counts the weights, which several engines share here; use kv_memory_fraction"
            )
        if options.get("kv_cache_bytes") is None:
            options["kv_memory_fraction"] = (
                options.get("kv_memory_fraction", EngineConfig.kv_memory_fraction) / share
            )
        engine = make_engine(self._model, self.configurations[number].speculative, options, like)
        self.memory_plans[number] = engine.memory_plan
        self._label(engine, self.configurations[number].name)
        self._warm = {(other, concurrency) for other, concurrency in self._warm if other != number}
        return engine

    def _label(self, engine: Engine, name: str) -> None:
        labels = [f"the target runs as {engine.model.runs_as}", *engine_labels(engine, f"{name}: the draft")]
        self.labels += [label for label in labels if label not in self.labels]


def _check_room(max_num_seqs: int, max_concurrency: int) -> None:
    if max_num_seqs < max_concurrency:
        raise ConfigError(
            f"{max_concurrency} concurrent requests need --max-num-seqs of at least {max_concurrency}, "
            f"got {max_num_seqs}"
        )
