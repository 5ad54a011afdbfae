"""What each drafter gains on the embedded pair, one request at a time: paired with speculation off, interleaved.

    python benchmarks/embedded_speed.py --threads 2

Timed: leave the machine alone while it runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from slipstream import LLM, SamplingParams
from slipstream.assets import EMBEDDED_DRAFT, sample_prompts
from slipstream.bench.provenance import provenance

RESULT = Path(__file__).parent.parent / "docs/benchmarks/embedded_speed.json"
NUM_PROMPTS = 28
MAX_TOKENS = 64

DRAFT = {"method": "draft_model", "model": EMBEDDED_DRAFT}
DRAFTERS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram"},
    "suffix": {"method": "suffix"},
    "draft_model, chain of 2": {**DRAFT, "num_speculative_tokens": 2},
    "draft_model, chain of 3": {**DRAFT, "num_speculative_tokens": 3},
    "draft_model, chain of 4": {**DRAFT, "num_speculative_tokens": 4},
    "draft_model, tree of 12": {**DRAFT, "tree_top_k": 3, "num_draft_nodes": 12},
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = [compare(name, spec) for name, spec in DRAFTERS.items()]
    settings = {"prompts": NUM_PROMPTS, "max_tokens": MAX_TOKENS, "temperature": 0}
    RESULT.write_text(json.dumps({"provenance": provenance(), **settings, "rows": rows}, indent=1) + "\n")
    for row in rows:
        print(
            f"{row['drafter']:26} ratio {row['ratio_median']:.2f} "
            f"(quartiles {row['ratio_quartiles'][0]:.2f} and {row['ratio_quartiles'][1]:.2f}), τ {row['tau']:.2f}, "
            f"{row['off_tokens_per_s']:.0f} -> {row['on_tokens_per_s']:.0f} tokens/s, "
            f"draft {row['draft_ms_a_step']:.1f} ms, verify {row['verify_ms_a_step']:.1f} ms"
        )


def compare(name: str, spec: dict[str, Any]) -> dict[str, Any]:
    """Each prompt both ways from empty caches, the order alternating."""
    llm = LLM(speculative_config=spec)
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    prompts = [row["messages"] for row in sample_prompts()[:NUM_PROMPTS]]
    llm.chat(prompts[0], params)
    tokens = {True: 0, False: 0}
    seconds = {True: 0.0, False: 0.0}
    ratios: list[float] = []
    draft_s = verify_s = 0.0
    steps = 0
    for number, messages in enumerate(prompts):
        took: dict[bool, float] = {}
        for on in (True, False) if number % 2 else (False, True):
            llm.reset_caches()
            started_s = time.perf_counter()
            output = llm.chat(messages, params, max_draft_tokens=None if on else 0)[0]
            took[on] = time.perf_counter() - started_s
            seconds[on] += took[on]
            tokens[on] += output.metrics.num_output_tokens
            if on:
                draft_s += output.metrics.draft_s
                verify_s += output.metrics.verify_s
                steps += output.metrics.num_steps
        ratios.append(took[False] / took[True])
    low, median, high = statistics.quantiles(ratios, n=4)
    return {
        "drafter": name,
        "ratio_median": round(median, 3),
        "ratio_quartiles": [round(low, 3), round(high, 3)],
        "tau": round(tokens[True] / steps, 3),
        "off_tokens_per_s": round(tokens[False] / seconds[False], 1),
        "on_tokens_per_s": round(tokens[True] / seconds[True], 1),
        "draft_ms_a_step": round(1e3 * draft_s / steps, 3),
        "verify_ms_a_step": round(1e3 * verify_s / steps, 3),
        "same_number_of_tokens": tokens[True] == tokens[False],
    }


if __name__ == "__main__":
    main()
