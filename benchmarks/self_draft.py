"""A target's own weights in fewer bits as its draft (`self`): acceptance, cost and gain by weight format.

    python -m benchmarks.self_draft [MODEL ...] [--formats int8,int4] [--prompts-per-task 2] [--max-tokens 64]

One request at a time, greedy, the target in its checkpoint's own type. Speculation off and each draft take turns
prompt by prompt, in an order drawn for each. *c* is the time of one draft pass over one of the target's, each of one
row behind 128 tokens. Writes docs/benchmarks/self_draft.json and the table beside it.
"""

from __future__ import annotations

import argparse
import random
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.kept import Kept, say
from benchmarks.peers.markdown import wrapped
from benchmarks.quantization import names
from slipstream import LLM, SamplingParams
from slipstream.assets import EMBEDDED_TARGET, sample_prompts
from slipstream.models import RowGroup, load_model
from slipstream.models.cpu.native import instructions
from slipstream.profiling.provenance import provenance
from slipstream.text.prompts import encode_chat
from slipstream.tools.bench.statistics import PairedTimes, geometric_mean_speedup, speedup_interval

RESULT = Path(__file__).parent.parent / "docs/benchmarks/self_draft.json"
FORMATS = ("int8", "int4", "int4_g64", "int4_g128")
NUM_TOKENS = 4
CONTEXT = 128


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "models", nargs="*", help="checkpoints in 16 or 32 bits; the embedded target unless given"
    )
    parser.add_argument("--formats", type=names(FORMATS), default=list(FORMATS))
    parser.add_argument("--prompts-per-task", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    kept = Kept(RESULT, {key: value for key, value in vars(options).items() if key != "models"})
    rows = [
        row
        for model in options.models or [EMBEDDED_TARGET]
        for row in kept.cell(Path(model).name, partial(measure, model, options))
    ]
    result = {"provenance": {**provenance(), "instructions": instructions()}, "rows": rows}
    kept.finish(result)
    page = table(result)
    RESULT.with_suffix(".md").write_text(page, encoding="utf-8")
    print(page)


def measure(model: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row a format."""
    settings: dict[str, Any] = {
        "num_threads": options.threads, "max_num_seqs": 1, "max_model_len": 1024, "enable_prefix_caching": False,
    }  # fmt: skip
    off = LLM(model, **settings)
    sides = {
        name: LLM(
            model,
            speculative_config={"method": "self", "quantization": name, "num_speculative_tokens": NUM_TOKENS},
            **settings,
        )
        for name in options.formats
    }
    params = SamplingParams(temperature=0, max_tokens=options.max_tokens, ignore_eos=True)
    taken: dict[str, int] = {}
    samples = []
    for sample in sample_prompts():
        taken[sample["task"]] = taken.get(sample["task"], 0) + 1
        if taken[sample["task"]] <= options.prompts_per_task:
            samples.append(sample)
    every = {"off": off, **sides}
    times: dict[str, dict[str, list[float]]] = {name: {} for name in every}
    identical = dict.fromkeys(sides, 0)
    judged = {name: [0, 0] for name in sides}
    rng = random.Random(0)
    for number, sample in enumerate(samples):
        prompt = encode_chat(off.engine.tokenizer, sample["messages"])
        texts = {}
        for name in rng.sample(sorted(every), len(every)):
            started_s = time.perf_counter()
            [output] = every[name].generate([prompt], params, use_tqdm=False)
            times[name].setdefault(sample["task"], []).append(time.perf_counter() - started_s)
            texts[name] = list(output.outputs[0].token_ids)
            if name in judged:
                judged[name][0] += sum(output.metrics.accepted_per_position)
                judged[name][1] += sum(output.metrics.reached_per_position)
        for name in sides:
            identical[name] += texts[name] == texts["off"]
        say(f"  {number + 1} of {len(samples)} prompts")
    target_s = pass_s(load_model(model))
    rows = []
    for name in sides:
        pairs = [
            PairedTimes([1] * len(of_task), of_task, [1] * len(of_task), times["off"][task])
            for task, of_task in times[name].items()
        ]
        interval = speedup_interval(pairs)
        rows.append(
            {
                "model": Path(model).name,
                "target": off.engine.model.weight_type,
                "draft": name,
                "acceptance": judged[name][0] / max(judged[name][1], 1),
                "c": pass_s(load_model(model, quantization=name)) / target_s,
                "speedup": geometric_mean_speedup(pairs),
                "interval": None if interval is None else [interval.low, interval.high],
                "identical": identical[name],
                "prompts": len(samples),
            }
        )
    return rows


@torch.inference_mode()
def pass_s(lm: Any, repeats: int = 40) -> float:
    """Median seconds of a pass of one row behind `CONTEXT` tokens."""
    pool, slots = lm.trial_cache(CONTEXT + 1)
    tokens = [5] * (CONTEXT + 1)
    lm.forward([RowGroup(slots, 0, tokens, range(CONTEXT, CONTEXT + 1))], pool)
    spent = []
    for _ in range(repeats):
        started_s = time.perf_counter()
        lm.forward([RowGroup(slots, CONTEXT, tokens[:1], range(1))], pool)
        spent.append(time.perf_counter() - started_s)
    return median(spent)


def table(result: dict[str, Any]) -> str:
    """The page of a result."""
    about = result["provenance"]
    lines = [
        "# A target in fewer bits as its own draft",
        "",
        "Written by `python -m benchmarks.self_draft`; do not edit. Raw results: [self_draft.json](self_draft.json).",
        "",
        f"Chains of {NUM_TOKENS} tokens, one request, greedy. *Accepted* is the share of judged draft tokens, *c* a "
        "pass of the draft over one of the target; the speedup is over speculation off, in turns.",
        "",
        f"{about['cpu']} ({about['instructions']}), {about['date']}, commit {(about['commit'] or 'unknown')[:12]}.",
        "",
        "| target | its weights | draft | accepted | c | speedup | interval | texts identical |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        interval = "–" if row["interval"] is None else "{:.2f} to {:.2f}".format(*row["interval"])
        lines.append(
            f"| {row['model']} | {row['target']} | {row['draft']} | {row['acceptance']:.1%} | {row['c']:.2f} | "
            f"{row['speedup']:.2f} | {interval} | {row['identical']} of {row['prompts']} |"
        )
    return wrapped("\n".join([*lines, ""]))


if __name__ == "__main__":
    main()
