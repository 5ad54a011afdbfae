"""`--spec auto` against each of the settings that it chooses from, on closed-loop traffic.

    python -m benchmarks.control                                        # the embedded pair
    python -m benchmarks.control --model EXPANDED --name expanded-0.3g --tasks mixed --concurrency 1,4,16,32
    python -m benchmarks.control --parts shift

Settings take turns within a round, rounds have other questions, and figures are medians of the rounds' ratios. The best
fixed setting of a round is the one that was fastest in the others. All engines share one target. `auto` keeps what it
has learned from cell to cell, as it would on a server.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.control.shift import measure_shift
from benchmarks.control.traffic import SETTINGS, Question, Run, closed_loop, make_engines, questions
from benchmarks.kept import Kept, say
from slipstream.engine.engine import Engine
from slipstream.provenance import provenance
from slipstream.sampling.params import SamplingParams

RESULTS = Path(__file__).parents[2] / "docs/benchmarks"
MIXED = "mixed"
WARM_UP = 2
"""Rounds."""
UNPAYING = {"task": "creative", "temperature": 1.2, "concurrency": 64}
"""Where speculation cannot pay."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", help="a cost-expanded copy of the embedded target; that itself unless given"
    )
    parser.add_argument("--name", default="embedded", help="of the result")
    parser.add_argument("--parts", default="grid,unpaying,shift")
    parser.add_argument("--settings", default=",".join(SETTINGS))
    parser.add_argument("--tasks", default="", help="mixed and all tasks unless given")
    parser.add_argument("--concurrency", default="1,2,4,8,16,32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--requests", type=int, default=16, help="at least, of a run; never less than four a place"
    )
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kv-cache-mib", type=int, default=512)
    options = parser.parse_args()
    names = options.settings.split(",")
    engines = make_engines(names, options.model, options.threads, 64, options.kv_cache_mib * 2**20)
    by_task = questions(engines[names[0]])
    rng = random.Random(0)
    every = [question for asked in by_task.values() for question in asked]
    rng.shuffle(every)
    result: dict[str, Any] = {"provenance": provenance(), "name": options.name, "settings": names}
    result |= {key: getattr(options, key) for key in ("rounds", "requests", "max_tokens", "threads")}
    kept = Kept(RESULTS / f"control_{options.name}.json", vars(options))
    params = SamplingParams(temperature=0.0, max_tokens=options.max_tokens)
    if "grid" in options.parts:
        tasks = options.tasks.split(",") if options.tasks else [MIXED, *by_task]
        result["grid"] = []
        for concurrency in map(int, options.concurrency.split(",")):
            for task in tasks:
                asked = every if task == MIXED else by_task[task]
                measure = partial(
                    measure_cell, engines, asked, concurrency, params, options.rounds, options.requests
                )
                cell = kept.cell(f"{task}, {concurrency} at once", measure)
                result["grid"].append({"task": task, "concurrency": concurrency, **cell})
                show(result["grid"][-1])
    if "unpaying" in options.parts:
        params_ = SamplingParams(temperature=1.2, max_tokens=options.max_tokens, seed=1)
        pair = {name: engines[name] for name in ("off", "auto")}
        measure = partial(measure_cell, pair, by_task["creative"], 64, params_, options.rounds, 128)
        cell = kept.cell("traffic that cannot pay", measure)
        result["unpaying"] = {**UNPAYING, **cell}
        show(result["unpaying"])
    if "shift" in options.parts:
        measure = partial(measure_shift, options.model, options.threads, by_task)
        result["shift"] = kept.cell("shift", measure)
        say(json.dumps(result["shift"], indent=1))
    kept.finish(result)


def measure_cell(
    engines: dict[str, Engine],
    asked: Seq[Question],
    concurrency: int,
    params: SamplingParams,
    rounds: int,
    at_least: int,
) -> dict[str, Any]:
    """Tokens a second by setting and round, and the ratios of `auto` to each other setting.

    The first rounds are not counted: kernels are warm, and what learns has learned, when they are over.
    """
    number = max(at_least, 4 * concurrency)
    runs: dict[str, list[Run]] = {name: [] for name in engines}
    differ = 0
    for turn in range(WARM_UP + rounds):
        say(f"  round {turn + 1} of {WARM_UP + rounds}")
        batch = [asked[(turn * number + i) % len(asked)] for i in range(number)]
        order = list(engines)
        order = order[turn % len(order) :] + order[: turn % len(order)]
        answers: dict[str, dict[str, list[int]]] = {}
        for name in order:
            run = closed_loop(engines[name], batch, concurrency, params)
            answers[name] = run.answers
            if turn >= WARM_UP:
                runs[name].append(run)
        differ += sum(given != answers["off"] for given in answers.values())
    rates = {name: [run.tokens_per_s for run in of] for name, of in runs.items()}
    ratios = {
        name: quartiles([a / b for a, b in zip(rates["auto"], rates[name], strict=True)])
        for name in engines
        if name != "auto"
    }
    fixed = {name: rate for name, rate in rates.items() if name != "auto"}
    bests = [best_of_others(fixed, turn) for turn in range(rounds)]
    luckiest = min(ratios, key=lambda name: ratios[name]["median"])
    return {
        "tokens_per_s": {name: round(statistics.median(rate), 1) for name, rate in rates.items()},
        "auto_over": ratios,
        "best_fixed": statistics.mode(bests),
        "auto_over_best": quartiles(
            [rates["auto"][turn] / fixed[name][turn] for turn, name in enumerate(bests)]
        ),
        "luckiest_fixed": luckiest,
        "auto_over_luckiest": ratios[luckiest],
        "speedup_over_off": ratios["off"],
        "runs_with_other_texts": differ,
    }


def best_of_others(rates: Mapping[str, Seq[float]], turn: int) -> str:
    """The setting that was fastest in all rounds but this one.

    Whoever is picked in the rounds that it is compared in was lucky in them, the more so the more there are to pick
    from, which makes `auto` look worse than it is. Picked in few others it may not be the best one, which makes `auto`
    look better; the truth is between the two.
    """
    medians = {name: statistics.median([*rate[:turn], *rate[turn + 1 :]]) for name, rate in rates.items()}
    return max(medians, key=lambda name: medians[name])


def quartiles(values: Seq[float]) -> dict[str, float]:
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": round(median, 3), "q1": round(low, 3), "q3": round(high, 3)}


def show(cell: dict[str, Any]) -> None:
    over = {name: ratio["median"] for name, ratio in cell["auto_over"].items()}
    best = cell["auto_over_best"]
    say(
        f"{cell['task']:9s} x{cell['concurrency']:<3d} auto/best {best['median']:.3f} "
        f"({best['q1']:.2f} to {best['q3']:.2f}, {cell['best_fixed']})"
        f"  auto/off {over['off']:.2f}  {over}"
    )


if __name__ == "__main__":
    main()
