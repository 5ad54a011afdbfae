"""What each drafter gains in time on the GPU: paired and interleaved, as `slipstream bench` does it."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import asdict
from typing import Any

from slipstream import LLM
from slipstream.assets import EMBEDDED_DRAFT
from slipstream.assets.workload.reading import read_workload
from slipstream.config import SpeculativeConfig
from slipstream.errors import SlipstreamError
from slipstream.sampling.params import SamplingParams
from slipstream.tools.bench.engine.configurations import OFF_NAME, Configuration
from slipstream.tools.bench.engine.local import BenchPlan, run
from slipstream.tools.bench.result import BenchResult
from slipstream.tools.bench.settings import BenchSettings

DRAFT = {"method": "draft_model", "model": EMBEDDED_DRAFT, "num_speculative_tokens": 4}
DRAFTERS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram"},
    "suffix": {"method": "suffix"},
    "draft_model, chain of 4": DRAFT,
    "draft_model, tree of 12": {**DRAFT, "tree_top_k": 3, "num_draft_nodes": 12},
    "layer_skip, its own search": {"method": "layer_skip", "num_speculative_tokens": 3},
}
SELF = {"method": "self", "num_speculative_tokens": 3}

CONCURRENCIES = {1: 2, 8: 5}
"""Requests at once, and how many prompts of each of the seven tasks are asked then: two pairs at least, without which
there is no interval."""

MAX_MODEL_LEN = 1024


def measure(
    model: str | None,
    dtype: str,
    concurrency: int,
    *,
    drafters: Seq[str] = tuple(DRAFTERS),
    max_tokens: int,
    repeats: int,
) -> dict[str, Any]:
    """Every drafter against off on `model`, None being the embedded target; greedy, empty caches."""
    asked = BenchSettings(
        read_workload("sample"),
        SamplingParams(temperature=0.0, seed=0),
        prompts_per_task=CONCURRENCIES[concurrency],
        max_tokens=max_tokens,
        concurrencies=(concurrency,),
        repeats=repeats,
    )
    named = {name: SpeculativeConfig.from_mapping(DRAFTERS[name]) for name in drafters}
    configurations = [
        Configuration(OFF_NAME, SpeculativeConfig()),
        *(Configuration(name, config) for name, config in named.items()),
    ]
    options = {"device": "cuda", "dtype": dtype, "max_model_len": MAX_MODEL_LEN}
    result = run(BenchPlan(asked, configurations, model, options))
    return {
        "dtype": dtype,
        "concurrency": concurrency,
        "prompts_per_task": CONCURRENCIES[concurrency],
        "labels": result.labels,
        "max_tokens": max_tokens,
        "repeats": repeats,
        "interleaved_by": result.interleaved_by,
        "complete": result.complete,
        "rows": [_row(result, configuration.name, concurrency) for configuration in configurations],
    }


def refusal() -> str | None:
    """Why self-drafting in int8 does not run here; None where it does."""
    try:
        LLM(speculative_config=SELF, device="cuda", max_model_len=MAX_MODEL_LEN)
    except SlipstreamError as error:
        return str(error)
    return None


def _row(result: BenchResult, name: str, concurrency: int) -> dict[str, Any]:
    total = result.of(name, concurrency)
    assert total is not None, f"nothing was measured of {name}"
    return {
        "drafter": name,
        "tokens_per_s": total.tokens_per_s,
        "speedup": total.speedup,
        "speedup_interval": None if total.speedup_interval is None else asdict(total.speedup_interval),
        "num_pairs": total.num_pairs,
        "tau": total.acceptance.length,
        "num_output_tokens": total.num_output_tokens,
        "time_shares": None if total.time_shares is None else asdict(total.time_shares),
        "num_compared": None if total.identity is None else total.identity.num_compared,
        "num_identical": None if total.identity is None else total.identity.num_identical,
    }
