"""Drafts made here, run by vLLM: is the text the same, and does it accept as much of them as we do?

    python -m benchmarks.cross_check --vllm VENV/bin/python --trained OUT

`OUT` holds what `python -m recipes.drafters` trained. Greedy chains, the same prompt tokens and lengths. The acceptance
length is vLLM's own, 1 + accepted / drafts, counted the same way on both sides: over steps that drafted. Texts may part
where the target's two best logits are nearer than float32 arithmetic resolves; such a place is named with its margin.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.kept import Kept
from slipstream import LLM, SamplingParams
from slipstream.assets import EMBEDDED_TARGET, sample_prompts
from slipstream.core.metrics.request import RequestMetrics
from slipstream.draft.heads.eagle_files import load_eagle, save_eagle
from slipstream.kv.pool import KVPool
from slipstream.models import CausalLM, RowGroup
from slipstream.profiling.provenance import provenance
from slipstream.text.prompts import encode_chat

RESULT = Path(__file__).parent.parent / "docs/benchmarks/cross_check.json"
NUM_TOKENS = 4


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vllm", required=True, help="Python of an environment with vLLM")
    parser.add_argument("--trained", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=28)
    parser.add_argument("--max-tokens", type=int, default=96)
    options = parser.parse_args()
    plain = LLM()
    prompts = [encode_chat(plain.engine.tokenizer, row["messages"]) for row in sample_prompts()]
    prompts = prompts[: options.prompts]
    rows = []
    kept = Kept(RESULT, vars(options))
    with tempfile.TemporaryDirectory() as scratch:
        for name, ours, theirs in drafts(options.trained, plain.engine.model, Path(scratch)):
            rows.append(kept.cell(name, partial(compare, name, ours, theirs, plain, prompts, options)))
            print(json.dumps(rows[-1]), flush=True)
    result = {"provenance": provenance(), "prompts": options.prompts, "max_tokens": options.max_tokens}
    kept.finish({**result, "rows": rows})


def drafts(
    trained: Path, target: CausalLM, scratch: Path
) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Name, our configuration and vLLM's, for all that is there."""
    chain = {"num_speculative_tokens": NUM_TOKENS, "tree_top_k": 1}
    found = []
    for method, folder in (
        ("draft_model", "draft/draft"),
        ("eagle3", "eagle3/eagle3"),
        ("eagle", "eagle/eagle"),
        ("medusa", "medusa/medusa"),
    ):
        path = trained / folder
        if not path.is_dir():
            continue
        ours = {"method": method, "model": str(path), **chain}
        if method.startswith("eagle"):
            ours["num_draft_nodes"] = None
        theirs = {"method": method, "model": str(path), "num_speculative_tokens": NUM_TOKENS}
        found.append((method, ours, theirs))
        if method == "eagle3":
            other = scratch / "speculators"
            save_eagle(load_eagle(str(path), target), other, target=EMBEDDED_TARGET, layout="speculators")
            found.append(("eagle3, speculators layout", ours, {**theirs, "model": str(other)}))
    return found


def compare(
    name: str,
    ours: dict[str, Any],
    theirs: dict[str, Any],
    plain: LLM,
    prompts: list[list[int]],
    options: argparse.Namespace,
) -> dict[str, Any]:
    params = SamplingParams(temperature=0, max_tokens=options.max_tokens, ignore_eos=True)
    outputs = LLM(speculative_config=ours).generate(prompts, params)
    merged = RequestMetrics.merged([output.metrics for output in outputs])
    request = {
        "target": EMBEDDED_TARGET,
        "speculative_config": theirs,
        "prompts": prompts,
        "max_tokens": options.max_tokens,
    }
    worker = Path(__file__).parent / "cross_check_vllm.py"
    done = subprocess.run(
        [options.vllm, str(worker)], input=json.dumps(request), capture_output=True, text=True, check=False
    )
    row: dict[str, Any] = {"draft": name, "ours": length(merged)}
    if done.returncode:
        print(done.stderr[-3000:], file=sys.stderr)
        lines = [line for line in done.stderr.splitlines() if "Error" in line]
        return {**row, "vllm": None, "refused": (lines or ["?"])[-1].split("] ")[-1][:300]}
    answer = json.loads(done.stdout)
    counters = answer["counters"]
    row["vllm"] = 1 + counters["num_accepted_tokens"] / counters["num_drafts"]
    row["ratio"] = row["vllm"] / row["ours"]
    row["ours_by_position"] = merged.conditional_acceptance
    row["vllm_accepted_by_position"] = counters.get("num_accepted_tokens_per_pos")
    texts = [output.outputs[0].token_ids for output in outputs]
    pairs = list(zip(prompts, texts, answer["token_ids"], strict=True))
    row["equal_texts"] = f"{sum(a == b for _, a, b in pairs)} of {len(pairs)}"
    row["margins_where_they_part"] = [
        margin(plain.engine.model, prompt, mine, other) for prompt, mine, other in pairs if mine != other
    ]
    return row


def length(metrics: RequestMetrics) -> float:
    """1 + accepted / steps that drafted."""
    return 1 + metrics.num_accepted_tokens / metrics.proposed_per_position[0]


def margin(model: CausalLM, prompt: list[int], mine: list[int], other: list[int]) -> float:
    """How far apart the target scores the two tokens at which the texts part."""
    at = next(i for i, (a, b) in enumerate(zip(mine, other, strict=False)) if a != b)
    text = [*prompt, *mine[:at]]
    pool = KVPool(model.shapes, len(text), model.dtype, torch.device("cpu"))
    logits = model.forward([RowGroup(pool.slots, 0, text, [len(text) - 1])], pool).logits[0]
    return float((logits[mine[at]] - logits[other[at]]).abs())


if __name__ == "__main__":
    main()
