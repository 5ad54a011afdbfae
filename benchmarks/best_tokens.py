"""What a pass gains where only the best token of each row is wanted, over one whose logits are searched.

    python -m benchmarks.best_tokens [--models smollm2,gemma3] [--weights auto,bfloat16] [--rows 1,5,8]

Passes of SmolLM2 and Gemma 3 behind 16 tokens, in the weights of the file and in bfloat16, where the output layer is
held in 8 bits besides. Both kinds of pass take turns, on texts that change; each pair gives a ratio. The tokens are
compared. Writes docs/benchmarks/best_tokens.json.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial
from typing import Any

from benchmarks.harness.command import DOCS, command, names, numbers
from benchmarks.harness.kept import Kept
from recipes.real_models import GEMMA3, SMOLLM2, fetch
from slipstream.models import CausalLM, RowGroup, load_model
from slipstream.models.cpu.native import instructions
from slipstream.models.cpu.threads import operators

MODELS = {"smollm2": SMOLLM2, "gemma3": GEMMA3}
WEIGHTS = ("auto", "bfloat16")
CONTEXT = 16


def main() -> None:
    parser = command(__doc__, DOCS / "best_tokens.json")
    parser.add_argument("--models", type=names(MODELS), default=list(MODELS))
    parser.add_argument("--weights", type=names(WEIGHTS), default=list(WEIGHTS))
    parser.add_argument("--rows", type=numbers, default=[1, 5, 8])
    parser.add_argument("--pairs", type=int, default=60)
    options = parser.parse_args()
    settings = {name: getattr(options, name) for name in ("rows", "pairs")}
    kept = Kept(options.output, settings, instructions=instructions())
    cells = [
        cell
        for model in options.models
        for weights in options.weights
        for cell in kept.cell(f"{model}, {weights}", partial(measure, model, weights, options))
    ]
    kept.finish({"settings": settings, "cells": cells})


def measure(model: str, weights: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    lm = load_model(str(fetch(MODELS[model])), dtype=weights, rounds_head=True)
    with operators(1):  # as the engine does: threads of PyTorch's stay awake on the cores that the pass wants
        return [
            {"model": model, "weights": weights, **compare(lm, rows, options.pairs)} for rows in options.rows
        ]


def compare(lm: CausalLM, num_rows: int, num_pairs: int) -> dict[str, Any]:
    """Medians and quartiles of passes of so many rows."""
    pool, slots = lm.trial_cache(CONTEXT + num_rows)
    prompt = [(5 * place + 1) % 4000 for place in range(CONTEXT)]
    lm.forward([RowGroup(slots[:CONTEXT], 0, prompt, [CONTEXT - 1])], pool)
    times: dict[bool, list[float]] = {False: [], True: []}
    for number in range(num_pairs + 3):
        text = [(7 * (place + number) + 3) % 4000 for place in range(num_rows)]
        found = []
        for best in (False, True) if number % 2 else (True, False):
            began = time.perf_counter()
            output = lm.forward([RowGroup(slots, CONTEXT, text, range(num_rows))], pool, best=best)
            found.append(output.logits.argmax(-1).tolist() if output.best is None else list(output.best))
            times[best].append(1e3 * (time.perf_counter() - began))
        if found[0] != found[1]:
            raise AssertionError(f"other best tokens without logits than with them: {found}")
    with_logits, best_alone = (series[3:] for series in (times[False], times[True]))  # the first ones warm up
    ratios = [short / long for short, long in zip(best_alone, with_logits, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {
        "rows": num_rows,
        "with_logits_ms": statistics.median(with_logits),
        "best_ms": statistics.median(best_alone),
        "ratio": middle,
        "quartiles": [low, high],
    }


if __name__ == "__main__":
    main()
