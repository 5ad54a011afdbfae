"""What a decoding step costs beside its linear layers: one request, no speculation, median of many steps.

    python -m benchmarks.step_cost [MODEL ...] --threads 2
    python -m benchmarks.step_cost [MODEL ...] --contexts 128,1536,8192 --weights bfloat16,int8 --caches bfloat16,int8

Steps of the engine and runs through the same packed weights alone take turns. *Outside* is the difference: attention,
norms, rotary, sampling, scheduling and text together, so it bounds what is outside linears and attention from above.
The weights are called one by one from Python, some 10 us each, which the pass does not pay: for a small model look at
the step less the pass too.

With --contexts it measures passes instead, of 1 to 16 rows behind so many tokens: how much of the memory's bandwidth
one row reaches (bytes of weights and cache over its time), and v(n), the time of n rows over that of one. Bandwidth and
passes take turns. Writes docs/benchmarks/context_cost.json.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.command import DOCS, command, names, numbers
from benchmarks.harness.kept import Kept
from benchmarks.quantization import CACHES, WEIGHTS, types
from slipstream import LLM, SamplingParams
from slipstream.assets import EMBEDDED_TARGET, sample_prompts
from slipstream.models import load_model
from slipstream.models.cpu.native import instructions
from slipstream.models.cpu.threads import operators
from slipstream.models.executor.cpu_kernels import CpuKernels
from slipstream.profiling.pass_times import Survey
from slipstream.profiling.pass_times import measure as profile

RESULT = DOCS / "step_cost.json"
CONTEXT_RESULT = RESULT.with_name("context_cost.json")
SAVED = "saved"
"""Weights of a checkpoint that was saved quantised, its output layer in 8 bits."""
NUM_STEPS = 60
ROW_COUNTS = (1, 2, 4, 5, 8, 16)


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("models", nargs="*", help="checkpoint folders beside the embedded target")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--contexts", type=numbers, help="measure passes behind so many tokens: 128,1536")
    parser.add_argument("--weights", type=names([*WEIGHTS, SAVED]), default=["float32", "bfloat16", "int8"])
    parser.add_argument("--caches", type=names(CACHES), default=["bfloat16"])
    parser.add_argument(
        "--budget", type=float, default=8.0, help="seconds of passes a model and pair of types"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.contexts:
        measure_contexts(options)
        return
    models = [EMBEDDED_TARGET, *options.models]
    kept = Kept(RESULT, {"threads": options.threads})
    rows = [
        kept.cell(f"{model}, {quantization}", partial(measure, model, quantization))
        for model in models
        for quantization in (None, "int8")
    ]
    kept.finish({"rows": rows})
    for row in rows:
        print(
            f"{row['model']} {row['quantization'] or 'float32'}: step {row['step_ms']:.3f} ms, of it the pass "
            f"{row['pass_ms']:.3f} ms; linears alone {row['linears_ms']:.3f} ms; outside {row['outside_ms']:.3f} ms, "
            f"{row['outside_share']:.1%}"
        )


def measure_contexts(options: argparse.Namespace) -> None:
    """Every model, weight format and cache type; the models must allow so long texts."""
    settings = {name: getattr(options, name) for name in ("threads", "contexts", "budget")}
    kept = Kept(CONTEXT_RESULT, settings, instructions=instructions())
    rows = [
        row
        for model in options.models or [EMBEDDED_TARGET]
        for weights in options.weights
        for cache in options.caches
        for row in kept.cell(
            f"{Path(model).name}, {weights}, {cache} cache",
            partial(pass_costs, model, weights, cache, options.contexts, options.budget),
        )
    ]
    kept.finish({"rows": rows})
    for row in rows:
        costs = ", ".join(f"v({rows}) {cost:.2f}" for rows, cost in row["verify_cost"].items())
        print(
            f"{row['model']} {row['weights']}, {row['cache']} cache, {row['context']:,} tokens: "
            f"{row['step_ms']:.2f} ms, {row['bandwidth_share']:.2f} of {row['memory_bytes_per_s'] / 1e9:.1f} GB/s; "
            f"{costs}"
        )


def pass_costs(
    model: str, weights: str, cache: str, contexts: list[int], budget_s: float
) -> list[dict[str, Any]]:
    """One row a context."""
    asked = types(weights, cache) if weights != SAVED else {"quantization": "int8", "kv_cache_dtype": cache}
    lm = load_model(model, cpu_kernels="native", **asked)
    if contexts[-1] + ROW_COUNTS[-1] > lm.context_length:
        raise SystemExit(
            f"{Path(model).name} has {lm.context_length} positions, too few for {contexts[-1]} tokens"
        )
    [measured] = profile([lm], Survey(ROW_COUNTS, tuple(contexts), budget_s), lambda done, total: None)
    times = {(time.rows, time.context): time for time in measured.step_times}
    rate = measured.memory_bytes_per_s.median
    made = []
    for context in contexts:
        one = times[1, context]
        made.append(
            {
                "model": Path(model).name,
                "weights": weights,
                "cache": cache,
                "context": context,
                "bytes_read": one.bytes_read,
                "memory_bytes_per_s": rate,
                "step_ms": 1e3 * one.median_s,
                "step_ms_quartiles": [1e3 * one.q1_s, 1e3 * one.q3_s],
                "repeats": one.repeats,
                "bandwidth_share": one.bytes_read / one.median_s / rate,
                "verify_cost": {
                    rows: times[rows, context].median_s / one.median_s for rows in ROW_COUNTS[1:]
                },
            }
        )
    return made


def measure(model: str, quantization: str | None) -> dict[str, Any]:
    llm = LLM(model, quantization=quantization, cpu_kernels="native", max_model_len=512)
    engine = llm.engine
    decoder = engine.model.executor
    assert isinstance(decoder, CpuKernels), "only whole passes are measured here"
    weights = decoder.linears
    inputs = {width: torch.randn(1, width) for width in {weight.in_features for weight in weights}}
    passes: list[float] = []
    forward = decoder.forward

    def timed(*arguments: Any, **keywords: Any) -> Any:
        started_s = time.perf_counter()
        output = forward(*arguments, **keywords)
        passes.append(time.perf_counter() - started_s)
        return output

    decoder.forward = timed  # type: ignore[method-assign]
    messages = sample_prompts()[1]["messages"]
    prompt = engine.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)[
        "input_ids"
    ]
    engine.add_request(
        "0", list(prompt), SamplingParams(temperature=0, max_tokens=NUM_STEPS + 8, ignore_eos=True)
    )
    steps, linears = [], []
    while engine.has_unfinished:
        started_s = time.perf_counter()
        engine.step()
        steps.append(time.perf_counter() - started_s)
        with operators(1):
            started_s = time.perf_counter()
            for weight in weights:
                weight.multiply(inputs[weight.in_features])
            linears.append(time.perf_counter() - started_s)
    step_s, pass_s, linears_s = (statistics.median(times[4:-2]) for times in (steps, passes, linears))
    return {
        "model": "embedded target" if model == EMBEDDED_TARGET else Path(model).name,
        "quantization": quantization,
        "context": len(prompt),
        "steps": len(steps),
        "step_ms": 1e3 * step_s,
        "pass_ms": 1e3 * pass_s,
        "linears_ms": 1e3 * linears_s,
        "outside_ms": 1e3 * (step_s - linears_s),
        "outside_share": (step_s - linears_s) / step_s,
    }


if __name__ == "__main__":
    main()
