"""Drafters against speculation off by `slipstream bench`: paired, interleaved, greedy, with empty caches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from slipstream.assets.workload.reading import read_workload
from slipstream.config import SpeculativeConfig
from slipstream.sampling.params import SamplingParams
from slipstream.tools.bench.engine.configurations import OFF_NAME, Configuration
from slipstream.tools.bench.engine.local import BenchPlan, run
from slipstream.tools.bench.result import BenchResult
from slipstream.tools.bench.settings import BenchSettings


def against_off(
    model: str | None,
    specs: Mapping[str, Mapping[str, Any]],
    engine: Mapping[str, Any],
    *,
    concurrency: int = 1,
    **sizes: Any,
) -> dict[str, Any]:
    """What bench says of each drafter in `specs`, off the first, on `model`, None being the embedded target.

    `engine` are options of the engine, `sizes` are of `BenchSettings`: prompts_per_task, max_tokens, repeats.
    """
    params = SamplingParams(temperature=0.0, seed=0)
    asked = BenchSettings(read_workload("sample"), params, concurrencies=(concurrency,), **sizes)
    configurations = [Configuration(OFF_NAME, SpeculativeConfig())]
    configurations += [
        Configuration(name, SpeculativeConfig.from_mapping(spec)) for name, spec in specs.items()
    ]
    result = run(BenchPlan(asked, configurations, model, dict(engine)))
    return {
        "model": Path(model).name if model is not None else result.model,
        "concurrency": concurrency,
        **sizes,
        "labels": result.labels,
        "interleaved_by": result.interleaved_by,
        "complete": result.complete,
        "rows": [_row(result, each.name, concurrency) for each in configurations],
    }


def _row(result: BenchResult, name: str, concurrency: int) -> dict[str, Any]:
    total = result.of(name, concurrency)
    assert total is not None, f"nothing was measured of {name}"
    by_task = {task: result.of(name, concurrency, task) for task in result.tasks}
    return {
        "drafter": name,
        "tokens_per_s": total.tokens_per_s,
        "speedup": total.speedup,
        "speedup_interval": total.speedup_interval and asdict(total.speedup_interval),
        "speedup_by_task": {task: figures and figures.speedup for task, figures in by_task.items()},
        "num_pairs": total.num_pairs,
        "tau": total.acceptance.length,
        "num_output_tokens": total.num_output_tokens,
        "time_shares": total.time_shares and asdict(total.time_shares),
        "prediction": total.prediction and asdict(total.prediction),
        "draft_bytes": next(each.draft_bytes for each in result.configurations if each.name == name),
        "num_compared": total.identity and total.identity.num_compared,
        "num_identical": total.identity and total.identity.num_identical,
    }
