"""16-bit weights as they are stored beside the same widened to float32 at loading: speed by pairs, and equal texts.

    python -m benchmarks.kept_weights [MODEL ...] --prompts 350 --max-tokens 16

One request at a time, speculation off, greedy, a float32 cache on both sides, so that nothing but the stored form of
the weights differs. Both engines are loaded and take turns prompt by prompt; who is first changes each time. Writes
docs/benchmarks/kept_weights.json.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.kept import Kept, say
from slipstream import LLM, SamplingParams
from slipstream.assets import EMBEDDED_TARGET, sample_prompts
from slipstream.models.cpu.native import instructions
from slipstream.profiling.provenance import provenance
from slipstream.text.prompts import encode_chat
from slipstream.tools.bench.statistics import PairedTimes, geometric_mean_speedup, speedup_interval

RESULT = Path(__file__).parent.parent / "docs/benchmarks/kept_weights.json"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", help="16-bit checkpoints; the embedded target unless given")
    parser.add_argument("--prompts", type=int, default=350)
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    kept = Kept(RESULT, {key: value for key, value in vars(options).items() if key != "models"})
    rows = [
        kept.cell(Path(model).name, partial(compare, model, options))
        for model in options.models or [EMBEDDED_TARGET]
    ]
    kept.finish({"provenance": {**provenance(), "instructions": instructions()}, "rows": rows})
    for row in rows:
        low, high = row["interval"]
        say(
            f"{row['model']}: {row['ratio']:.2f} of float32 (95 % interval {low:.2f} to {high:.2f}), "
            f"{row['identical']} of {row['prompts']} texts identical"
        )


def compare(model: str, options: argparse.Namespace) -> dict[str, Any]:
    """The times of a call as a whole, prompt included."""
    settings = {"kv_cache_dtype": "float32", "num_threads": options.threads, "max_num_seqs": 1}
    wide = LLM(model, dtype="float32", enable_prefix_caching=False, **settings)
    narrow = LLM(model, dtype="auto", enable_prefix_caching=False, **settings)
    params = SamplingParams(temperature=0, max_tokens=options.max_tokens, ignore_eos=True)
    pairs: dict[str, list[tuple[float, float]]] = {}
    identical = 0
    samples = sample_prompts()[: options.prompts]
    for number, sample in enumerate(samples):
        prompt = encode_chat(wide.engine.tokenizer, sample["messages"])
        sides = [wide, narrow] if number % 2 else [narrow, wide]
        taken = {id(side): answer(side, prompt, params) for side in sides}
        (wide_s, wide_tokens), (narrow_s, narrow_tokens) = taken[id(wide)], taken[id(narrow)]
        pairs.setdefault(sample["task"], []).append((narrow_s, wide_s))
        identical += wide_tokens == narrow_tokens
        if number % 50 == 49:
            say(f"  {number + 1} prompts, {identical} identical, last {wide_s / narrow_s:.2f} of float32")
    groups = [
        PairedTimes([1] * len(times), [one for one, _ in times], [1] * len(times), [one for _, one in times])
        for times in pairs.values()
    ]
    interval = speedup_interval(groups)
    assert interval is not None, "every task has several prompts"
    return {
        "model": Path(model).name,
        "weights": narrow.engine.model.weight_type,
        "prompts": len(samples),
        "max_tokens": options.max_tokens,
        "ratio": geometric_mean_speedup(groups),
        "by_task": {task: group.speedup for task, group in zip(pairs, groups, strict=True)},
        "interval": [interval.low, interval.high],
        "identical": identical,
    }


def answer(llm: LLM, prompt: list[int], params: SamplingParams) -> tuple[float, list[int]]:
    """Seconds and tokens of one call."""
    started_s = time.perf_counter()
    [output] = llm.generate([prompt], params, use_tqdm=False)
    return time.perf_counter() - started_s, list(output.outputs[0].token_ids)


if __name__ == "__main__":
    main()
