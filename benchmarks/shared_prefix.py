"""What it gains to read a common prefix once: samples of one long prompt, with and without, in turns.

    python -m benchmarks.shared_prefix [--prompts 512,1536] [--samples 8,16] [--quantization int8]

The embedded target, cost-expanded to 0.3 G parameters. Each pair makes the same samples of one prompt twice, once as
the engine does and once with every sample reading its own copy; times are of decoding, and the tokens must be equal.
Writes docs/benchmarks/shared_prefix.json.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks.kept import Kept, say
from slipstream import LLM, SamplingParams
from slipstream.assets import EMBEDDED_TARGET
from slipstream.kv.slots import SharedPrefix
from slipstream.models.cpu.native import instructions
from slipstream.profiling.provenance import provenance

RESULT = Path(__file__).parent.parent / "docs/benchmarks/shared_prefix.json"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", default="512,1536", help="tokens of the prompt")
    parser.add_argument("--samples", default="8,16")
    parser.add_argument("--quantization", default="int8")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("build/control"), help="for the expanded target")
    options = parser.parse_args()
    target = options.folder / "300M"
    if not target.exists():
        say(f"making the cost-expanded target in {target} …")
        command = [sys.executable, "-m", "slipstream.testing.expand", str(EMBEDDED_TARGET), str(target)]
        subprocess.run([*command, "--parameters", "300M"], check=True)
    llm = LLM(
        str(target),
        quantization=options.quantization,
        max_model_len=2048,
        max_num_seqs=16,
        num_threads=options.threads,
        kv_cache_bytes=4 * 2**30,
    )
    settings = {key: value for key, value in vars(options).items() if key != "folder"}
    kept = Kept(RESULT, settings)
    cells = []
    for length in map(int, options.prompts.split(",")):
        for samples in map(int, options.samples.split(",")):
            name = f"{samples} samples of {length} tokens"
            cell = kept.cell(name, partial(measure, llm, length, samples, options))
            cells.append({"prompt": length, "samples": samples, **cell})
            say(f"  {cell['ratio']:.2f}: {cell['shared_ms']:.1f} ms a step, {cell['apart_ms']:.1f} ms apart")
    kept.finish(
        {
            "provenance": {**provenance(), "instructions": instructions()},
            "settings": settings,
            "cells": cells,
        }
    )


def measure(llm: LLM, length: int, samples: int, options: argparse.Namespace) -> dict[str, Any]:
    """Pairs of one cell; the first warms up."""
    rng = random.Random(length)
    prompt = [2, *(rng.randrange(50, 950) for _ in range(length - 1))]
    params = SamplingParams(
        n=samples, temperature=0.9, seed=5, max_tokens=options.max_tokens, ignore_eos=True
    )
    accounting: Any = llm.engine.runner.cache.accounting
    shared = accounting.shared

    def apart(owner: int) -> SharedPrefix | None:
        return None

    seconds: dict[str, list[float]] = {"shared": [], "apart": []}
    for number in range(-1, options.rounds):
        tokens = {}
        for name in ("shared", "apart") if number % 2 else ("apart", "shared"):
            accounting.shared = shared if name == "shared" else apart
            [output] = llm.generate([prompt], params, use_tqdm=False)
            tokens[name] = [list(one.token_ids) for one in output.outputs]
            if number >= 0:
                seconds[name].append(output.metrics.total_s - output.metrics.time_to_first_token_s)
        assert tokens["shared"] == tokens["apart"]
    accounting.shared = shared
    ratios = [apart / together for together, apart in zip(seconds["shared"], seconds["apart"], strict=True)]
    num_steps = options.max_tokens - 1
    return {
        "ratio": median(ratios),
        "quartiles": quantiles(ratios, n=4)[::2],
        "shared_ms": 1e3 * median(seconds["shared"]) / num_steps,
        "apart_ms": 1e3 * median(seconds["apart"]) / num_steps,
        "ratios": ratios,
    }


if __name__ == "__main__":
    main()
