"""What a decoding step costs beside its linear layers: one request, no speculation, median of many steps.

    python -m benchmarks.step_cost [MODEL ...] --threads 2

Steps of the engine and runs through the same packed weights alone take turns. *Outside* is the difference: attention,
norms, rotary, sampling, scheduling and text together, so it bounds what is outside linears and attention from above.
The weights are called one by one from Python, some 10 us each, which the pass does not pay: for a small model look at
the step less the pass too.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.kept import Kept
from slipstream import LLM, SamplingParams
from slipstream.assets import EMBEDDED_TARGET, sample_prompts
from slipstream.models.cpu.threads import operators
from slipstream.provenance import provenance

RESULT = Path(__file__).parent.parent / "docs/benchmarks/step_cost.json"
NUM_STEPS = 60


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", help="checkpoint folders beside the embedded target")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    models = [EMBEDDED_TARGET, *options.models]
    kept = Kept(RESULT, {"threads": options.threads})
    rows = [
        kept.cell(f"{model}, {quantization}", partial(measure, model, quantization))
        for model in models
        for quantization in (None, "int8")
    ]
    kept.finish({"provenance": provenance(), "rows": rows})
    for row in rows:
        print(
            f"{row['model']} {row['quantization'] or 'float32'}: step {row['step_ms']:.3f} ms, of it the pass "
            f"{row['pass_ms']:.3f} ms; linears alone {row['linears_ms']:.3f} ms; outside {row['outside_ms']:.3f} ms, "
            f"{row['outside_share']:.1%}"
        )


def measure(model: str, quantization: str | None) -> dict[str, Any]:
    llm = LLM(model, quantization=quantization, cpu_kernels="native", max_model_len=512)
    engine = llm.engine
    decoder = engine.model.decoder
    assert decoder is not None, "only whole passes are measured here"
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
