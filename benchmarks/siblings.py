"""What samples of one prompt gain by drafting for each other (`siblings`), beside today's drafters and speculation off.

    python -m benchmarks.siblings [--models embedded,300m-int8] [--samples 8,16] [--temperatures 0.6,0.8]

Requests of long answers, one at a time, each with `n` samples of one prompt and a seed of its own. All settings take
turns request by request, in an order drawn for each; times are of whole calls, and every text must be the one without
speculation. `siblings` alone, and behind or before a drafter that is there today, is compared with speculation off and
with the best of today's drafters in that cell. A last cell has one sample a request: there `siblings` has nothing to
draft from and may cost nothing. Writes docs/benchmarks/siblings.json and the page beside it.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.kept import Kept, say
from benchmarks.peers.markdown import wrapped
from slipstream import LLM, SamplingParams
from slipstream.assets import EMBEDDED_DRAFT, EMBEDDED_TARGET, sample_prompts
from slipstream.models.cpu.native import instructions
from slipstream.profiling.provenance import provenance
from slipstream.text.prompts import encode_chat
from slipstream.tools.bench.statistics import PairedTimes, joined, speedup_interval

RESULT = Path(__file__).parent.parent / "docs/benchmarks/siblings.json"
OFF = "off"
DRAFT = {"method": "draft_model", "model": str(EMBEDDED_DRAFT), "num_speculative_tokens": 4}
TODAY: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram"},
    "suffix": {"method": "suffix"},
    "token_recycling": {"method": "token_recycling"},
    "draft_model, 4 tokens": DRAFT,
    "draft_model, 2 tokens": {**DRAFT, "num_speculative_tokens": 2},
}
SIBLINGS: dict[str, dict[str, Any]] = {
    "siblings": {"method": "siblings"},
    "siblings, then draft_model": {
        "method": "ensemble",
        "mode": "first",
        "members": [{"method": "siblings"}, DRAFT],
    },
    "siblings in auto": {"method": "auto", "drafters": [{"method": "siblings"}, DRAFT]},
}
QUANTIZATION = {"embedded": None, "300m-int8": "int8"}
BARS = {"over off": 1.3, "over today": 1.15, "one sample": 0.98}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join(QUANTIZATION))
    parser.add_argument("--samples", default="8,16", help="answers of a request")
    parser.add_argument("--temperatures", default="0.6,0.8")
    parser.add_argument("--requests", type=int, default=6, help="of each cell, of as many tasks as there are")
    parser.add_argument("--max-tokens", type=int, default=192)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("build/control"), help="for cost-expanded copies")
    options = parser.parse_args()
    settings = {key: value for key, value in vars(options).items() if key not in ("models", "folder")}
    kept = Kept(RESULT, settings)
    cells = []
    for name in options.models.split(","):
        engines: dict[str, LLM] = {}
        for temperature in map(float, options.temperatures.split(",")):
            for samples in (*map(int, options.samples.split(",")), 1):
                label = f"{name}, {samples} samples at {temperature}"
                if not kept.has(label):
                    engines = engines or make_engines(name, options)
                cell = kept.cell(label, partial(measure, engines, samples, temperature, options))
                cells.append({"model": name, "samples": samples, "temperature": temperature, **cell})
                say(summary(cells[-1]))
    result = {
        "provenance": {**provenance(), "instructions": instructions()},
        "settings": settings,
        "bars": BARS,
        "cells": cells,
    }
    kept.finish(result)
    RESULT.with_suffix(".md").write_text(page(result), encoding="utf-8")


def make_engines(name: str, options: argparse.Namespace) -> dict[str, LLM]:
    """One engine a setting, all of the same target."""
    model = str(EMBEDDED_TARGET)
    if name != "embedded":
        target = options.folder / "300M"
        if not target.exists():
            say(f"making the cost-expanded target in {target} …")
            command = [sys.executable, "-m", "slipstream.testing.expand", model, str(target)]
            subprocess.run([*command, "--parameters", "300M"], check=True)
        model = str(target)
    return {
        setting: LLM(
            model,
            speculative_config=config,
            quantization=QUANTIZATION[name],
            num_threads=options.threads,
            max_num_seqs=16,
            max_model_len=1024,
            kv_cache_bytes=512 * 2**20,
        )
        for setting, config in {OFF: {"method": "off"}, **TODAY, **SIBLINGS}.items()
    }


def measure(
    engines: Mapping[str, LLM], samples: int, temperature: float, options: argparse.Namespace
) -> dict[str, Any]:
    """Tokens and seconds of every request with every setting, and what the drafts came to."""
    rng = random.Random(0)
    names = [name for name in engines if samples > 1 or name in (OFF, "siblings")]
    number_of_requests = options.requests * (1 if samples > 1 else 3)
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    num_same = dict.fromkeys(names, 0)
    messages = one_of_each_task()
    for number in range(-1, number_of_requests):  # the first warms up
        prompt = encode_chat(engines[OFF].get_tokenizer(), messages[number % len(messages)])
        params = SamplingParams(
            n=samples, temperature=temperature, seed=1000 + number, max_tokens=options.max_tokens
        )
        texts = {}
        for name in rng.sample(names, len(names)):
            started_s = time.perf_counter()
            [output] = engines[name].generate([prompt], params, use_tqdm=False)
            spent_s = time.perf_counter() - started_s
            texts[name] = [list(one.token_ids) for one in output.outputs]
            if number < 0:
                continue
            runs[name].append(
                {
                    "tokens": sum(len(one.token_ids) for one in output.outputs),
                    "seconds": spent_s,
                    "drafted": output.metrics.num_draft_tokens,
                    "accepted": output.metrics.num_accepted_tokens,
                }
            )
        if number >= 0:
            for name in names:
                num_same[name] += texts[name] == texts[OFF]
    best_today = min(
        (name for name in names if name in TODAY), default=OFF, key=lambda name: total(runs[name], "seconds")
    )
    return {
        "requests": number_of_requests,
        "best_today": best_today,
        "settings": {
            name: {
                "over_off": compared(runs[name], runs[OFF]),
                "over_best_today": compared(runs[name], runs[best_today]),
                "tokens_a_request": total(runs[name], "tokens") / number_of_requests,
                "drafted": total(runs[name], "drafted"),
                "accepted": total(runs[name], "accepted"),
                "identical": num_same[name],
                "runs": runs[name],
            }
            for name in names
        },
    }


def one_of_each_task() -> list[Any]:
    """The first prompt of each task, then the second of each, and so on."""
    by_task: dict[str, list[Any]] = {}
    for sample in sample_prompts():
        by_task.setdefault(sample["task"], []).append(sample["messages"])
    return [messages for of_round in zip(*by_task.values(), strict=False) for messages in of_round]


def total(runs: Seq[Mapping[str, float]], key: str) -> float:
    return sum(run[key] for run in runs)


def compared(runs: Seq[Mapping[str, float]], others: Seq[Mapping[str, float]]) -> dict[str, Any]:
    """Tokens a second over the other setting's, with an interval over requests and the pairs' median."""

    def column(which: Seq[Mapping[str, float]], key: str) -> list[float]:
        return [run[key] for run in which]

    pairs = PairedTimes(
        column(runs, "tokens"), column(runs, "seconds"), column(others, "tokens"), column(others, "seconds")
    )
    interval = speedup_interval([pairs])
    ratios = [
        other["seconds"] / one["seconds"] * one["tokens"] / other["tokens"]
        for one, other in zip(runs, others, strict=True)
    ]
    return {
        "ratio": joined([pairs]).speedup,
        "median": median(ratios),
        "interval": None if interval is None else [interval.low, interval.high],
    }


def summary(cell: Mapping[str, Any]) -> str:
    """A cell in one line a setting."""
    return "\n".join(
        f"  {name}: {one['over_off']['ratio']:.2f} off, {one['over_best_today']['ratio']:.2f} of "
        f"{cell['best_today']}, {one['accepted']:,.0f} of {one['drafted']:,.0f} accepted, "
        f"{one['identical']} of {cell['requests']} texts identical"
        for name, one in cell["settings"].items()
    )


def page(result: Mapping[str, Any]) -> str:
    """The page of a result."""
    about, bars = result["provenance"], result["bars"]
    lines = [
        "# Samples that draft for each other",
        "",
        "Written by `python -m benchmarks.siblings`; do not edit. Raw results: [siblings.json](siblings.json).",
        "",
        f"Requests of `n` samples of one prompt, one request at a time, up to {result['settings']['max_tokens']} "
        "tokens a sample, whole calls. Each setting is compared with speculation off and with the best of today's "
        "drafters in that cell, request by request in turns: tokens a second over the other's, with a 95 % interval. "
        f"Accepted is the share of draft tokens. Bars: {bars['over off']} times off, "
        f"{bars['over today']} times the best of today's, and {bars['one sample']} of off with one sample.",
        "",
        f"{about['cpu']} ({about['instructions']}), {about['date']}, commit {(about['commit'] or 'unknown')[:12]}.",
        "",
        "| target | samples | temperature | setting | over off | over the best of today's | accepted | identical |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for cell in result["cells"]:
        for name, one in cell["settings"].items():
            if name == OFF:
                continue
            over_best = shown(one["over_best_today"]) if name in SIBLINGS and cell["samples"] > 1 else "–"
            is_best = " (best of today's)" if name == cell["best_today"] else ""
            accepted = f"{one['accepted'] / one['drafted']:.0%}" if one["drafted"] else "–"
            lines.append(
                f"| {cell['model']} | {cell['samples']} | {cell['temperature']} | {name}{is_best} "
                f"| {shown(one['over_off'])} | {over_best} | {accepted} "
                f"| {one['identical']} of {cell['requests']} |"
            )
    return wrapped("\n".join([*lines, ""]))


def shown(comparison: Mapping[str, Any]) -> str:
    """A ratio with its interval."""
    if comparison["interval"] is None:
        return f"{comparison['ratio']:.2f}"
    return "{:.2f} ({:.2f} to {:.2f})".format(comparison["ratio"], *comparison["interval"])


if __name__ == "__main__":
    main()
