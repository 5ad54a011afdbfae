"""What each drafter gains in time, one request at a time: `slipstream bench` with all of them.

On the embedded target and, where one is given, on a cost-expanded one: the same text at the price of a larger model
(`slipstream.testing.expand`). Heads are expanded with it, so that they cost what heads of such a target cost.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.drafters.lineup import Entry, without_models
from slipstream.assets import EMBEDDED_TARGET
from slipstream.assets.workload.reading import read_workload
from slipstream.config import SpeculativeConfig
from slipstream.sampling.params import SamplingParams
from slipstream.testing.expand_head import expand_head
from slipstream.tools.bench.engine.configurations import OFF_NAME, Configuration
from slipstream.tools.bench.engine.local import BenchPlan, run
from slipstream.tools.bench.result import BenchResult
from slipstream.tools.bench.settings import BenchSettings

HEADS = ("eagle", "eagle3", "medusa", "hydra")


MAX_MODEL_LEN = 1024
"""For every drafter alike, whatever it needs of the cache."""


def measure(
    entries: Seq[Entry],
    model: str | None,
    *,
    prompts_per_task: int,
    max_tokens: int,
    repeats: int,
    threads: int,
    kv_cache_bytes: int,
) -> dict[str, Any]:
    """Every entry against off on `model`, None being the embedded target; interleaved, greedy, empty caches."""
    asked = BenchSettings(
        read_workload("sample"),
        SamplingParams(temperature=0.0, seed=0),
        prompts_per_task=prompts_per_task,
        max_tokens=max_tokens,
        repeats=repeats,
    )
    off = Configuration(OFF_NAME, SpeculativeConfig())
    configurations = [off, *(Configuration(entry.name, entry.config) for entry in entries)]
    options = {"num_threads": threads, "kv_cache_bytes": kv_cache_bytes, "max_model_len": MAX_MODEL_LEN}
    result = run(BenchPlan(asked, configurations, model, options))
    return {
        "model": Path(model).name if model is not None else result.model,
        "labels": result.labels,
        "prompts_per_task": prompts_per_task,
        "max_tokens": max_tokens,
        "repeats": repeats,
        "threads": threads,
        "interleaved_by": result.interleaved_by,
        "complete": result.complete,
        "rows": [_row(result, name, entries) for name in [c.name for c in configurations]],
    }


def expanded(entries: Seq[Entry], model: str, folder: Path) -> list[Entry]:
    """The entries for the cost-expanded `model`: heads are enlarged into `folder`, drafts stay as they are."""
    found: list[Entry] = []
    for entry in entries:
        if entry.spec["method"] in HEADS:
            output = folder / entry.trained
            if not output.is_dir():
                expand_head(entry.spec["model"], EMBEDDED_TARGET, model, output)
            entry = replace(entry, spec={**entry.spec, "model": str(output)})
        found.append(entry)
    return found


def _row(result: BenchResult, name: str, entries: Seq[Entry]) -> dict[str, Any]:
    total = result.of(name, 1)
    facts = next(c for c in result.configurations if c.name == name)
    spec = next((entry.spec for entry in entries if entry.name == name), {"method": "off"})
    assert total is not None, f"nothing was measured of {name}"
    by_task = {task: result.of(name, 1, task) for task in result.tasks}
    return {
        "drafter": name,
        "speculative_config": without_models(spec),
        "tokens_per_s": total.tokens_per_s,
        "speedup": total.speedup,
        "speedup_interval": None if total.speedup_interval is None else asdict(total.speedup_interval),
        "speedup_by_task": {task: figures and figures.speedup for task, figures in by_task.items()},
        "tau": total.acceptance.length,
        "prediction": None if total.prediction is None else asdict(total.prediction),
        "draft_bytes": facts.draft_bytes,
        "num_compared": None if total.identity is None else total.identity.num_compared,
        "num_identical": None if total.identity is None else total.identity.num_identical,
    }
