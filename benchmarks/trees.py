"""What a tree gains over a chain of as many nodes, and what shared noise gains over rejection among siblings.

    python -m benchmarks.trees                # 7 tasks x 50 held-out prompts
    python -m benchmarks.trees --prompts 5    # a quick look

Both on the embedded pair, and nothing is timed, so the machine may be busy. `shapes` compares τ of a chain, a dynamic
tree and Sequoia's fixed tree with the same number of nodes; the fixed one is planned from ranks that were measured on
other seeds of the same prompts. `siblings` compares how often one of four siblings is accepted at temperature 0.8: the
target's own noise against multi-round rejection without replacement.
"""

from __future__ import annotations

import argparse
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.kept import Kept, say
from slipstream import LLM, SamplingParams
from slipstream.assets import EMBEDDED_DRAFT, sample_prompts
from slipstream.config import SpeculativeConfig
from slipstream.core.metrics.request import RequestMetrics
from slipstream.draft.model.sequoia import best_tree
from slipstream.profiling.provenance import provenance
from slipstream.text.prompts import encode_chat
from slipstream.tools.bench.engine.ranks import measure_rank_acceptance

RESULT = Path(__file__).parent.parent / "docs/benchmarks/trees.json"

DRAFT = {"method": "draft_model", "model": EMBEDDED_DRAFT}
NUM_NODES = 12
MAX_DEPTH = 10
CHAIN = {"num_speculative_tokens": NUM_NODES}
DYNAMIC = {"num_speculative_tokens": MAX_DEPTH, "tree_top_k": 3, "num_draft_nodes": NUM_NODES}
STAR = {"tree_choices": [[0], [1], [2], [3]]}
TEMPERATURES = (0.0, 0.8)
OTHER_SEEDS = 10_000


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=50, help="prompts a task")
    parser.add_argument("--rank-prompts", type=int, default=10, help="prompts a task to measure ranks on")
    parser.add_argument("--max-tokens", type=int, default=96)
    options = parser.parse_args()
    off = LLM(max_num_seqs=16)
    by_task: dict[str, list[list[int]]] = {}
    for row in sample_prompts():
        by_task.setdefault(row["task"], []).append(encode_chat(off.engine.tokenizer, row["messages"]))
    by_task = {task: prompts[: options.prompts] for task, prompts in sorted(by_task.items())}

    kept = Kept(RESULT, vars(options))
    ranks: list[dict[str, Any]] = []
    shapes: list[dict[str, Any]] = []
    for temperature in TEMPERATURES:
        cell = kept.cell(
            f"shapes, temperature {temperature}", partial(measure_shapes, off, by_task, options, temperature)
        )
        ranks.append(cell["ranks"])
        shapes += cell["shapes"]
    siblings = kept.cell("siblings", partial(measure_siblings, by_task, options.max_tokens))
    result = {
        "provenance": provenance(),
        "prompts_a_task": options.prompts,
        "max_tokens": options.max_tokens,
        "num_draft_nodes": NUM_NODES,
        "chain": CHAIN,
        "dynamic": DYNAMIC,
        "siblings_tree": STAR,
        "siblings_temperature": 0.8,
        "ranks": ranks,
        "shapes": shapes,
        "siblings": siblings,
    }
    kept.finish(result)
    print(json.dumps({"shapes": shapes, "siblings": siblings}, indent=1))


def measure_shapes(
    off: LLM, by_task: dict[str, list[list[int]]], options: argparse.Namespace, temperature: float
) -> dict[str, Any]:
    """What was measured of ranks, and τ of the shapes that have as many nodes, by task."""
    sample = [prompt for prompts in by_task.values() for prompt in prompts[: options.rank_prompts]]
    params = sampling(temperature, len(sample), options.max_tokens, OTHER_SEEDS)
    counts = measure_rank_acceptance(off, SpeculativeConfig.from_mapping(DRAFT), sample, params)
    plan = best_tree(counts.rates(), NUM_NODES, MAX_DEPTH)
    sequoia = {"tree_choices": plan.tree_choices}
    measured = {
        "chain": measure({**DRAFT, **CHAIN}, by_task, options.max_tokens, temperature),
        "dynamic": measure({**DRAFT, **DYNAMIC}, by_task, options.max_tokens, temperature),
        "sequoia": measure({**DRAFT, **sequoia}, by_task, options.max_tokens, temperature),
    }
    shapes: list[dict[str, Any]] = []
    for task in [*by_task, "all"]:
        tau = {name: pooled(cells, task).acceptance_length for name, cells in measured.items()}
        shapes.append(
            {
                "temperature": temperature,
                "task": task,
                "tau": {name: round(value, 4) for name, value in tau.items()},
                "dynamic_over_chain": round(tau["dynamic"] / tau["chain"], 4),
                "sequoia_over_chain": round(tau["sequoia"] / tau["chain"], 4),
            }
        )
    ranks = {
        "temperature": temperature,
        "num_prompts": len(sample),
        "reached": counts.reached,
        "accepted": counts.accepted,
        "tree_choices": plan.tree_choices,
        "predicted_tau": round(plan.acceptance_length, 4),
    }
    return {"ranks": ranks, "shapes": shapes}


def measure_siblings(by_task: dict[str, list[list[int]]], max_tokens: int) -> list[dict[str, Any]]:
    """How often one of four siblings is accepted, by task and verifier."""
    measured = {
        verifier: measure({**DRAFT, **STAR, "verifier": verifier}, by_task, max_tokens, 0.8)
        for verifier in ("coupled", "rejection")
    }
    siblings: list[dict[str, Any]] = []
    for task in [*by_task, "all"]:
        metrics = {verifier: pooled(cells, task) for verifier, cells in measured.items()}
        rate = {verifier: counts.conditional_acceptance[0] for verifier, counts in metrics.items()}
        siblings.append(
            {
                "task": task,
                "acceptance": {verifier: round(value, 4) for verifier, value in rate.items()},
                "num_steps": {
                    verifier: counts.reached_per_position[0] for verifier, counts in metrics.items()
                },
                "coupled_over_rejection": round(rate["coupled"] / rate["rejection"], 4),
            }
        )
    return siblings


def sampling(temperature: float, num: int, max_tokens: int, first_seed: int = 0) -> list[SamplingParams]:
    """Parameters of `num` answers, a seed each."""
    return [
        SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=first_seed + number)
        for number in range(num)
    ]


def measure(
    spec: dict[str, Any], by_task: dict[str, list[list[int]]], max_tokens: int, temperature: float
) -> dict[str, RequestMetrics]:
    """Counters by task."""
    llm = LLM(speculative_config=spec, max_num_seqs=16)
    found: dict[str, RequestMetrics] = {}
    started = time.perf_counter()
    for task, prompts in by_task.items():
        outputs = llm.generate(prompts, sampling(temperature, len(prompts), max_tokens))
        found[task] = RequestMetrics.merged([output.metrics for output in outputs])
    shown = {key: value for key, value in spec.items() if key not in ("method", "model")}
    say(f"  {shown} T={temperature}: {time.perf_counter() - started:.0f} s")
    return found


def pooled(cells: dict[str, RequestMetrics], task: str) -> RequestMetrics:
    """The counters of a task, or of all together."""
    return RequestMetrics.merged(list(cells.values())) if task == "all" else cells[task]


if __name__ == "__main__":
    main()
