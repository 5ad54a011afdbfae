"""How soon the alarm of acceptance drift comes, and how often it comes for nothing.

    python -m benchmarks.drift_alarm [--quick]

First the embedded pair answers its sample prompts, which gives, by task, the mean of the conditional acceptance, how
far requests differ beyond the luck of their tokens (ρ of a beta-binomial) and how many positions a request checks.
Then requests like them are simulated: steady ones for the false alarms, and ones whose α falls by 0.15 for the delay,
as it is when 100, 200 or 400 requests were seen before. Beside each task's own ρ stands a larger one, 0.2. `topics`
are steady requests that come in runs of 20 with a level of their own (standard deviation 0.05), which the test does
not promise to bear.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.kept import Kept
from slipstream import LLM, SamplingParams
from slipstream.assets import EMBEDDED_DRAFT, sample_prompts
from slipstream.control.monitor.alarms import FULL_WEIGHT_TOKENS
from slipstream.control.monitor.drift import REFERENCE_SIZES, ShiftWatch
from slipstream.profiling.provenance import provenance
from slipstream.stats.shift import FALSE_ALARM_RATE, Value

RESULT = Path(__file__).parent.parent / "docs/benchmarks/drift_alarm.json"
FALL = 0.15
WIDE_RHO = 0.2
MAX_DELAY = 2000


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a tenth of the simulations")
    quick = parser.parse_args().quick
    num_falls, num_streams = (20, 2) if quick else (200, 20)
    torch.set_num_threads(1)
    origin = provenance()
    kept = Kept(RESULT.with_name("drift_alarm_quick.json") if quick else RESULT, {})
    tasks = [
        {"task": task, "wide": False, **fit(np.array(pairs))}
        for task, pairs in kept.cell("acceptance of the embedded pair", measured_tasks).items()
    ]
    kinds = [kind for task in tasks for kind in (task, task | {"rho": WIDE_RHO, "wide": True})]
    falls, steady = [], []
    for number, kind in enumerate(kinds):
        name = f"{kind['task']}, ρ {kind['rho']:.2f}{', wide' if kind['wide'] else ''}"
        for seen in REFERENCE_SIZES:  # a generator of its own for each: cells do not depend on those before
            rng = np.random.default_rng([7, number, seen])
            falls.append(kept.cell(f"{name}, after {seen}", partial(fall_delays, kind, seen, num_falls, rng)))
        for topics in (False, True):
            rng = np.random.default_rng([8, number, topics])
            cell = partial(false_alarms, kind, num_streams, rng, topics)
            steady.append(kept.cell(f"{name}, steady{', topics' if topics else ''}", cell))
    result = {
        "provenance": origin,
        "stated_rate": FALSE_ALARM_RATE,
        "fall": FALL,
        "tasks": [{key: kind[key] for key in kind if key != "sizes"} for kind in kinds],
        "delays": falls,
        "steady": steady,
    }
    if quick:
        kept.partial.unlink(missing_ok=True)
    else:
        kept.finish(result)
    for row in falls:
        print(
            f"{row['task']:9} ρ {row['rho']:.2f} after {row['seen']:3}: α falls by {FALL}, alarm after "
            f"{row['p50']:.0f} requests (median), {row['p90']:.0f} (90 %), {row['p99']:.0f} (99 %); "
            f"within 300: {row['within_300']:.1%}"
        )
    for topics in (False, True):
        rows = [row for row in steady if row["topics"] == topics]
        alarms, requests = sum(row["alarms"] for row in rows), sum(row["requests"] for row in rows)
        print(
            f"{'in runs of a topic' if topics else 'independent'}: {alarms} false alarms in {requests:,} requests"
        )


def measured_tasks() -> dict[str, list[tuple[int, int]]]:
    """By task, accepted and checked positions of each request, from the embedded pair."""
    llm = LLM(speculative_config={"method": "draft_model", "model": EMBEDDED_DRAFT}, max_num_seqs=8)
    prompts = sample_prompts()
    conversations = []
    for prompt in prompts:
        messages = list(prompt["messages"])
        while messages[-1]["role"] == "assistant":
            messages.pop()
        conversations.append(messages)
    outputs = llm.chat(conversations, SamplingParams(temperature=0.7, max_tokens=128, seed=1))
    pairs: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for prompt, output in zip(prompts, outputs, strict=True):
        metrics = output.metrics
        if metrics.reached_per_position:
            pairs[prompt["task"]].append((metrics.num_accepted_tokens, sum(metrics.reached_per_position)))
    return dict(pairs)


def fit(pairs: np.ndarray) -> dict[str, Any]:
    """A beta-binomial by moments: var of a request's rate is μ(1 - μ)(ρ + (1 - ρ) / n)."""
    accepted, sizes = pairs.T
    mean = accepted.sum() / sizes.sum()
    relative = ((accepted / sizes - mean) ** 2).mean() / (mean * (1 - mean))
    luck = (1 / sizes).mean()
    return {
        "mean": float(mean),
        "rho": float(max((relative - luck) / (1 - luck), 0.01)),
        "num_requests": len(sizes),
        "median_positions": float(np.median(sizes)),
        "sizes": sizes,
    }


def requests(kind: dict[str, Any], num: int, rng: np.random.Generator, offsets: Any = 0.0) -> list[Value]:
    """Simulated requests whose mean is the task's plus `offsets`."""
    strength = (1 - kind["rho"]) / kind["rho"]
    means = np.clip(kind["mean"] + offsets, 0.01, 0.99) * np.ones(num)
    rates = rng.beta(means * strength, (1 - means) * strength)
    sizes = rng.choice(kind["sizes"], num)
    accepted = rng.binomial(sizes, rates)
    weights = np.minimum(sizes, FULL_WEIGHT_TOKENS) / FULL_WEIGHT_TOKENS
    return [Value(float(a / n), float(w)) for a, n, w in zip(accepted, sizes, weights, strict=True)]


def fall_delays(kind: dict[str, Any], seen: int, num: int, rng: np.random.Generator) -> dict[str, Any]:
    delays = []
    for _ in range(num):
        watch = ShiftWatch()
        for value in requests(kind, seen, rng):
            watch.add(value)
        delay = MAX_DELAY
        for number, value in enumerate(requests(kind, MAX_DELAY, rng, -FALL), start=1):
            watch.add(value)
            if watch.shift is not None:
                delay = number
                break
        delays.append(delay)
    quantiles = {f"p{q}": float(np.quantile(delays, q / 100)) for q in (50, 90, 99)}
    within = float(np.mean(np.array(delays) <= 300))
    return {
        "task": kind["task"],
        "rho": kind["rho"],
        "seen": seen,
        "runs": num,
        **quantiles,
        "within_300": within,
    }


def false_alarms(kind: dict[str, Any], num: int, rng: np.random.Generator, topics: bool) -> dict[str, Any]:
    """Alarms in `num` streams of 10,000 steady requests."""
    alarms, length = 0, 10_000
    for _ in range(num):
        watch = ShiftWatch()
        offsets = np.repeat(rng.normal(0, 0.05, length // 20), 20) if topics else 0.0
        raised = False
        for value in requests(kind, length, rng, offsets):
            watch.add(value)
            alarms += watch.shift is not None and not raised
            raised = watch.shift is not None
    return {
        "task": kind["task"],
        "rho": kind["rho"],
        "topics": topics,
        "requests": num * length,
        "alarms": alarms,
    }


if __name__ == "__main__":
    main()
