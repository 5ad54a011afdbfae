"""Whether a change costs speed: the same work in two checkouts, in turns.

    git worktree add ../before COMMIT
    python -m benchmarks.checkouts ../before [--models 300M 1G] [--rounds 7]

A process for each checkout holds its engines and takes turns with the other's, so that both meet the same machine.
Every cell is a model, a speculative configuration and a number of requests at once; its figure is the ratio of tokens a
second, this checkout over the other, by round. The texts must be identical.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.kept import Kept, say

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "docs/benchmarks/checkouts.json"
SPECS = {"off": None, "draft": "draft", "suffix": "suffix", "auto": "auto"}


class CheckoutProcess:
    """A process that imports Slipstream from one checkout."""

    def __init__(self, checkout: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": str(checkout / "src")}
        self._process = subprocess.Popen(
            [sys.executable, "-c", WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=checkout,
        )

    def call(self, **arguments: Any) -> Any:
        """What the worker's function of that name returns."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(arguments) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("the worker ended; its error is above")
        return json.loads(line)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


WORKER = """
import json, sys, time
answers, sys.stdout = sys.stdout, sys.stderr
from slipstream import LLM, SamplingParams
from slipstream.assets import EMBEDDED_DRAFT, sample_prompts

by_task = {}
for row in sample_prompts():
    by_task.setdefault(row["task"], []).append(row["messages"])
CHATS = [chats[0] for chats in by_task.values()]
DRAFT = {"method": "draft_model", "model": EMBEDDED_DRAFT, "num_speculative_tokens": 4}
SPECS = {
    None: None, "draft": DRAFT, "suffix": {"method": "suffix"},
    "auto": {"method": "auto", "drafters": [DRAFT, {"method": "suffix"}]},
}
engines = {}

def run(model, quantization, spec, requests, max_tokens, threads):
    key = model, quantization, spec
    if key not in engines:
        engines.clear()
        engines[key] = LLM(model, quantization=quantization, speculative_config=SPECS[spec], num_threads=threads,
                           max_model_len=1024, kv_cache_bytes=2**29, enable_prefix_caching=False)
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    started_s = time.perf_counter()
    outputs = []
    for begin in range(0, len(CHATS), requests):
        outputs += engines[key].chat(CHATS[begin : begin + requests], params)
    seconds = time.perf_counter() - started_s
    tokens = [output.outputs[0].token_ids for output in outputs]
    return {"tokens_per_s": sum(map(len, tokens)) / seconds, "tokens": tokens}

for line in sys.stdin:
    print(json.dumps(run(**json.loads(line))), file=answers, flush=True)
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("other", type=Path, help="the checkout to compare with")
    parser.add_argument(
        "--models", nargs="*", default=["300M"], help="cost-expanded sizes beside the embedded target"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--specs", nargs="*", default=list(SPECS), choices=list(SPECS))
    parser.add_argument("--requests", nargs="*", type=int, default=[1, 7])
    options = parser.parse_args()
    if not (options.other / "src/slipstream").is_dir():
        parser.error(f"{options.other} is no checkout of Slipstream: it has no src/slipstream")
    compared = {"other": _commit(options.other), "this": _commit(ROOT)}
    kept = Kept(RESULT, {**vars(options), "other": compared["other"]})
    with tempfile.TemporaryDirectory() as folder:
        cells: dict[str, Any] = {}
        models = {"embedded": None, **{size: _expanded(size, Path(folder)) for size in options.models}}
        for name, model in models.items():
            for quantization in (None, "int8") if model else (None,):
                for spec in options.specs:
                    for requests in options.requests:
                        cell = f"{name} {quantization or 'float32'}, {spec}, {requests} at once"
                        if not kept.has(cell):
                            say(f"{cell} …")
                            say(
                                _line(
                                    cell,
                                    kept.put(cell, _measure(model, quantization, spec, requests, options)),
                                )
                            )
                        cells[cell] = kept.get(cell)
    kept.finish(
        {"provenance": _provenance(), "compared": compared, "settings": _settings(options), "cells": cells}
    )
    for cell, figures in cells.items():
        print(_line(cell, figures))


def _measure(
    model: str | None, quantization: str | None, spec: str, requests: int, options: argparse.Namespace
) -> dict[str, Any]:
    checkouts = [CheckoutProcess(options.other.resolve()), CheckoutProcess(ROOT)]
    work = {
        "model": model,
        "quantization": quantization,
        "spec": SPECS[spec],
        "requests": requests,
        "max_tokens": options.max_tokens,
        "threads": options.threads,
    }
    try:
        first = [each.call(**work) for each in checkouts]  # loads, and warms up
        rates: list[list[float]] = [[], []]
        for number in range(options.rounds):
            for place in (0, 1) if number % 2 else (1, 0):
                rates[place].append(checkouts[place].call(**work)["tokens_per_s"])
                time.sleep(0.05)
    finally:
        for each in checkouts:
            each.close()
    ratios = [this / other for other, this in zip(*rates, strict=True)]
    quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
    return {
        "tokens_per_s": {"other": statistics.median(rates[0]), "this": statistics.median(rates[1])},
        "ratio": statistics.median(ratios),
        "quartiles": [quartiles[0], quartiles[2]],
        "ratios": ratios,
        "texts_identical": first[0]["tokens"] == first[1]["tokens"],
    }


def _line(cell: str, figures: dict[str, Any]) -> str:
    low, high = figures["quartiles"]
    same = "identical" if figures["texts_identical"] else "DIFFERENT"
    return f"{cell}: {figures['ratio']:.3f} (quartiles {low:.3f} to {high:.3f}), texts {same}"


def _expanded(size: str, folder: Path) -> str:
    target = ROOT / "src/slipstream/assets/pair/target"
    command = [
        sys.executable,
        "-m",
        "slipstream.testing.expand",
        str(target),
        str(folder / size),
        "--parameters",
        size,
    ]
    say(f"making the cost-expanded target of {size} …")
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(ROOT / "src")})
    return str(folder / size)


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name, value in vars(options).items() if name != "other"}


def _commit(checkout: Path) -> str:
    done = subprocess.run(
        ["git", "-C", str(checkout), "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def _provenance() -> dict[str, Any]:
    from slipstream.profiling.provenance import provenance

    return provenance()


if __name__ == "__main__":
    main()
