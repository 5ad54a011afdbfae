"""Acceptance of every drafter on the embedded pair, by task: the table of docs/reference/drafters.md.

    python benchmarks/drafters.py --trained OUT  # 7 tasks x 50 held-out prompts, greedy and temperature 0.8
    python benchmarks/drafters.py --prompts 5    # a quick look

`OUT` is what `python -m recipes.drafters` made; without it, what needs more than the embedded pair is left out.

Nothing here is timed. τ and α depend on the models, prompts and drafter alone, so the machine may be busy. Every
text is compared with the one without speculation.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from slipstream import LLM, RequestOutput, SamplingParams
from slipstream.assets import EMBEDDED_DRAFT, sample_prompts
from slipstream.bench.provenance import provenance
from slipstream.metrics.request import RequestMetrics

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "docs/benchmarks/drafters.json"
PAGE = ROOT / "docs/reference/drafters.md"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"

DRAFT = {"method": "draft_model", "model": EMBEDDED_DRAFT, "num_speculative_tokens": 4}
SELF = {"method": "self", "num_speculative_tokens": 3}
DRAFTERS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram"},
    "suffix": {"method": "suffix"},
    "suffix, tree of 16": {"method": "suffix", "tree": True, "num_draft_nodes": 16},
    "token_recycling": {"method": "token_recycling"},
    "lookahead": {"method": "lookahead"},
    "jacobi": {"method": "jacobi"},
    "self, int8, chain of 3": SELF,
    "layer_skip, int8, chain of 3": {
        "method": "layer_skip",
        "quantization": "int8",
        "num_speculative_tokens": 3,
    },
    "cascade, int8 self and draft_model, chain of 6": {
        "method": "cascade",
        "num_speculative_tokens": 6,
        "draft": DRAFT,
    },
    "draft_model, chain of 4": DRAFT,
    "draft_model, greedy chain of 4": {**DRAFT, "draft_sample_method": "greedy"},
    "draft_model, tree of 12": {**DRAFT, "tree_top_k": 3, "num_draft_nodes": 12},
    "draft_model, chain of 4, verifier rejection": {**DRAFT, "verifier": "rejection"},
    "draft_model, chain of 4, verifier block": {**DRAFT, "verifier": "block"},
}
TEMPERATURES = (0.0, 0.8)


def trained_drafters(folder: Path) -> dict[str, dict[str, Any]]:
    """What can be drafted with what a run of the recipe left in `folder`."""
    found: dict[str, dict[str, Any]] = {}

    def add(part: str, specs: dict[str, dict[str, Any]]) -> None:
        path = folder / part
        if path.is_dir():
            found.update({name: {**spec, "model": str(path)} for name, spec in specs.items()})

    chain, tree = {"num_speculative_tokens": 4}, {"tree_top_k": 3, "num_draft_nodes": 12}
    deep = {"num_speculative_tokens": 6, "tree_top_k": 4, "num_draft_nodes": 16}
    one = {"num_speculative_tokens": 4, "tree_top_k": 1, "num_draft_nodes": None}
    add(
        "draft/draft",
        {
            "distilled draft_model, chain of 4": {"method": "draft_model", **chain},
            "distilled draft_model, tree of 12": {"method": "draft_model", **chain, **tree},
            "distilled draft_model, tree of 16": {"method": "draft_model", **deep},
        },
    )
    for version in ("eagle3", "eagle"):
        add(
            f"{version}/{version}",
            {
                f"{version}, chain of 4": {"method": version, **one},
                f"{version}, tree of 12": {"method": version, **chain, **tree},
                f"{version}, tree of 16": {"method": version, **deep},
            },
        )
    for heads in ("medusa", "hydra"):
        add(f"{heads}/{heads}", {f"{heads}, tree of 12": {"method": heads, **chain, **tree}})
    for method in ("tli", "slem"):
        add("other-tokenizer/export/draft", {f"{method}, chain of 4": {"method": method, **chain}})
    if (folder / "draft/draft").is_dir():
        member = {"method": "draft_model", "model": str(folder / "draft/draft"), **chain, **tree}
        found["ensemble, suffix and distilled tree, 16 nodes"] = {
            "method": "ensemble",
            "members": [{"method": "suffix"}, member],
            "num_draft_nodes": 16,
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=50, help="prompts a task")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--trained", type=Path, help="what the recipe made")
    parser.add_argument("--only", default="", help="drafters whose name contains this")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    by_task: dict[str, list[list[dict[str, str]]]] = {}
    for row in sample_prompts():
        by_task.setdefault(row["task"], []).append(row["messages"])
    by_task = {task: prompts[: options.prompts] for task, prompts in sorted(by_task.items())}

    rows: list[dict[str, Any]] = []
    reference = measure({"method": "off"}, by_task, options.max_tokens, TEMPERATURES)
    drafters = DRAFTERS | ({} if options.trained is None else trained_drafters(options.trained))
    for name, spec in drafters.items():
        if options.only not in name:
            continue
        # Greedy, all verifiers and all ways to sample a chain are the same.
        temperatures = (
            TEMPERATURES if {"verifier", "draft_sample_method"}.isdisjoint(spec) else TEMPERATURES[1:]
        )
        outputs = measure(spec, by_task, options.max_tokens, temperatures)
        for (temperature, task), answers in outputs.items():
            rows.append(
                {
                    "drafter": name,
                    "speculative_config": without_models(spec),
                    "temperature": temperature,
                    "task": task,
                    **summary(answers, reference[temperature, task]),
                }
            )
    result = {
        "provenance": provenance(),
        "prompts_a_task": options.prompts,
        "max_tokens": options.max_tokens,
        "rows": rows,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    if options.prompts == 50 and not options.only:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        _, _, after = rest.partition(END)
        PAGE.write_text(f"{before}{BEGIN}\n{tables(rows)}{END}{after}")
    print(tables(rows))


def measure(
    spec: dict[str, Any],
    by_task: dict[str, list[list[dict[str, str]]]],
    max_tokens: int,
    temperatures: tuple[float, ...],
) -> dict[tuple[float, str], list[RequestOutput]]:
    """All answers by temperature and task; each task meets a drafter that has learned nothing yet."""
    llm = LLM(speculative_config=spec, max_num_seqs=16)
    outputs: dict[tuple[float, str], list[RequestOutput]] = {}
    for temperature in temperatures:
        for task, conversations in by_task.items():
            started = time.perf_counter()
            llm.reset_caches()
            params = [
                SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=number)
                for number in range(len(conversations))
            ]
            outputs[temperature, task] = llm.chat(conversations, params)
            elapsed_s = time.perf_counter() - started
            print(f"{spec} T={temperature} {task}: {elapsed_s:.0f} s", file=sys.stderr)
    return outputs


def without_models(spec: dict[str, Any]) -> dict[str, Any]:
    """The configuration without the paths of this machine."""
    plain = {key: value for key, value in spec.items() if key != "model"}
    if "members" in plain:
        plain["members"] = [without_models(member) for member in plain["members"]]
    if "draft" in plain:
        plain["draft"] = without_models(plain["draft"])
    return plain


def summary(answers: list[RequestOutput], reference: list[RequestOutput]) -> dict[str, Any]:
    """Counters of one cell, pooled over its prompts."""
    metrics = RequestMetrics.merged([answer.metrics for answer in answers])
    equal = [
        a.outputs[0].token_ids == r.outputs[0].token_ids for a, r in zip(answers, reference, strict=True)
    ]
    return {
        "alpha": round(metrics.acceptance_rate, 4),
        "conditional_alpha": [round(rate, 4) for rate in metrics.conditional_acceptance],
        "tau": round(metrics.acceptance_length, 4),
        "steps_saved": round(1 - metrics.num_steps / metrics.num_output_tokens, 4),
        "num_steps": metrics.num_steps,
        "num_output_tokens": metrics.num_output_tokens,
        "num_draft_tokens": metrics.num_draft_tokens,
        "num_accepted_tokens": metrics.num_accepted_tokens,
        "texts_equal_to_off": sum(equal),
        "texts": len(equal),
    }


def tables(rows: list[dict[str, Any]]) -> str:
    """One Markdown table a temperature; a cell is α / τ / steps saved."""
    text = ""
    for temperature in TEMPERATURES:
        chosen = [row for row in rows if row["temperature"] == temperature]
        tasks = sorted({row["task"] for row in chosen})
        title = "Greedy" if temperature == 0 else f"Temperature {temperature}"
        text += f"\n### {title}\n\n| drafter | {' | '.join(tasks)} | texts equal |\n|---|{'---|' * (len(tasks) + 1)}\n"
        for name in dict.fromkeys(row["drafter"] for row in chosen):
            cells = {row["task"]: row for row in chosen if row["drafter"] == name}
            figures = [
                f"{cells[t]['alpha']:.2f} / {cells[t]['tau']:.2f} / {cells[t]['steps_saved']:.0%}"
                for t in tasks
            ]
            equal = sum(row["texts_equal_to_off"] for row in cells.values())
            total = sum(row["texts"] for row in cells.values())
            keeps_draw = "verifier" not in name
            same = f"{equal} of {total}" if keeps_draw else "same distribution, other draws"
            text += f"| {name} | {' | '.join(figures)} | {same} |\n"
    return text + "\n"


if __name__ == "__main__":
    main()
