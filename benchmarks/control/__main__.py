"""`--spec auto` against each of the settings that it chooses from, on closed-loop traffic.

    python -m benchmarks.control --eagle3 HEAD                # all models, tasks and loads: hours
    python -m benchmarks.control --models 300m-int8 --quick   # one model, two tasks, without the shift: minutes

HEAD is an EAGLE-3 head that was trained for the embedded target; without one it is no candidate. Larger models and
heads are cost-expanded copies, made in `--folder` once. First each fixed setting runs in the rounds by which the best
one is picked. It is then compared with `auto` and with no speculation in other rounds, in which these take turns: a
setting that is picked in the rounds that it is compared in was lucky there. Figures are medians of the rounds' ratios.
All engines of a model share its weights. `auto` keeps what it has learned from cell to cell, as on a server. A run that
is stopped goes on from its last cell.
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
from benchmarks.control.traffic import (
    AUTO,
    SETTINGS,
    TARGETS,
    Question,
    Run,
    Setting,
    checkpoints,
    closed_loop,
    configs,
    make_engines,
    questions,
)
from benchmarks.harness.command import DOCS, command, names, numbers
from benchmarks.harness.kept import Kept, say
from benchmarks.harness.rounds import quartiles, turns
from slipstream.engine.engine import Engine
from slipstream.sampling.params import SamplingParams

MIXED = "mixed"
PARTS = ("grid", "unpaying", "shift")
UNPAYING = {"task": "creative", "temperature": 1.2, "concurrency": 32}
"""Where speculation cannot pay."""
UNPAYING_BAR = 0.98
QUICK = {
    "tasks": f"{MIXED},sql",
    "pick_rounds": 1,
    "rounds": 3,
    "requests": 6,
    "max_tokens": 48,
    "parts": ["grid", "unpaying"],
}


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("--models", type=names(TARGETS), default=list(TARGETS), help="of them")
    parser.add_argument("--eagle3", metavar="HEAD", help="trained for the embedded target")
    parser.add_argument("--folder", type=Path, default=Path("build/control"), help="for cost-expanded copies")
    parser.add_argument("--quick", action="store_true", help="a few cells, and few requests of each")
    parser.add_argument("--parts", type=names(PARTS), default=list(PARTS))
    parser.add_argument("--tasks", default="", help=f"{MIXED} and all tasks unless given")
    parser.add_argument("--concurrency", type=numbers, default=[1, 4, 8, 16])
    parser.add_argument("--pick-rounds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5, help="in which the picked setting is compared")
    parser.add_argument(
        "--requests", type=int, default=12, help="at least, of a run; never less than two for each at once"
    )
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kv-cache-mib", type=int, default=1024)
    options = parser.parse_args()
    if options.quick:
        vars(options).update(QUICK)
    for name in options.models:
        measure_model(name, options)


def measure_model(name: str, options: argparse.Namespace) -> None:
    """All cells of one model, into a result file of its own."""
    target = TARGETS[name]
    model, head = checkpoints(name, options.eagle3, options.folder)
    engines = make_engines(model, target.quantization, configs(head), options.threads, options.kv_cache_mib)
    by_task = questions(engines["off"])
    every = [question for asked in by_task.values() for question in asked]
    random.Random(0).shuffle(every)
    result: dict[str, Any] = {
        "name": name,
        "quick": options.quick,
        "bar": target.bar,
    }
    settings = ("pick_rounds", "rounds", "requests", "max_tokens", "threads")
    result |= {key: getattr(options, key) for key in settings}
    file = DOCS / f"control_{name}{'_quick' if options.quick else ''}.json"
    kept = Kept(file, {**vars(options), "models": name})
    sizes = options.pick_rounds, options.rounds, options.requests
    fixed = {key: setting for key, setting in SETTINGS.items() if setting.engine in engines}
    if "grid" in options.parts:
        params = SamplingParams(temperature=0.0, max_tokens=options.max_tokens)
        tasks = options.tasks.split(",") if options.tasks else [MIXED, *by_task]
        result["grid"] = []
        for concurrency in options.concurrency:
            for task in tasks:
                asked = every if task == MIXED else by_task[task]
                measure = partial(measure_cell, engines, fixed, asked, concurrency, params, *sizes)
                cell = kept.cell(f"{task}, {concurrency} at once", measure)
                result["grid"].append({"task": task, "concurrency": concurrency, **cell})
                show(result["grid"][-1], target.bar)
    if "unpaying" in options.parts:
        hot = SamplingParams(temperature=1.2, max_tokens=options.max_tokens, seed=1)
        off = {"off": fixed["off"]}
        measure = partial(measure_cell, engines, off, by_task["creative"], 32, hot, 0, *sizes[1:])
        result["unpaying"] = {**UNPAYING, **kept.cell("traffic that cannot pay", measure)}
        show(result["unpaying"], UNPAYING_BAR)
    if "shift" in options.parts:
        alone = {"auto": configs(head)["auto"]}
        measure = partial(
            measure_shift, partial(make_auto, model, target.quantization, alone, options), by_task
        )
        result["shift"] = kept.cell("shift", measure)
        say(json.dumps(result["shift"], indent=1))
    kept.finish(result)


def make_auto(
    model: str, quantization: str | None, alone: Mapping[str, Any], options: argparse.Namespace
) -> Engine:
    """An engine with `auto` that has learned nothing yet."""
    return make_engines(model, quantization, alone, options.threads, options.kv_cache_mib)["auto"]


def measure_cell(
    engines: Mapping[str, Engine],
    fixed: Mapping[str, Setting],
    asked: Seq[Question],
    concurrency: int,
    params: SamplingParams,
    pick_rounds: int,
    rounds: int,
    at_least: int,
) -> dict[str, Any]:
    """Tokens a second by setting, which of them was picked, and the ratios of `auto` to it and to none.

    Rounds have other questions as far as there are some. The first round is not counted: kernels are warm, and `auto`
    has met the load, when it is over.
    """
    number = max(at_least, 2 * concurrency)
    differ = 0

    def play(turn: int, settings: Mapping[str, Setting]) -> dict[str, float]:
        """Tokens a second of a round in which the settings take turns."""
        nonlocal differ
        batch = [asked[(turn * number + i) % len(asked)] for i in range(number)]
        runs: dict[str, Run] = {
            name: closed_loop(engines, settings[name], batch, concurrency, params)
            for name in turns(settings, turn)
        }
        differ += sum(run.answers != runs["off"].answers for run in runs.values())
        return {name: run.tokens_per_s for name, run in runs.items()}

    play(0, {"off": fixed["off"], "auto": AUTO})
    picking = [play(1 + turn, fixed) for turn in range(pick_rounds)]
    medians = {name: statistics.median(rates[name] for rates in picking) for name in fixed if picking}
    best = max(medians, key=lambda name: medians[name]) if medians else "off"
    compared = {"off": fixed["off"], best: fixed[best], "auto": AUTO}
    rates = [play(1 + pick_rounds + turn, compared) for turn in range(rounds)]
    return {
        "picked": best,
        "tokens_per_s_picking": {name: round(rate, 1) for name, rate in medians.items()},
        "tokens_per_s": {
            name: round(statistics.median(rate[name] for rate in rates), 1) for name in compared
        },
        "auto_over_best": spread([rate["auto"] / rate[best] for rate in rates]),
        "auto_over_off": spread([rate["auto"] / rate["off"] for rate in rates]),
        "runs_with_other_texts": differ,
    }


def spread(values: Seq[float]) -> dict[str, float]:
    low, median, high = quartiles(values)
    return {"median": round(median, 3), "q1": round(low, 3), "q3": round(high, 3)}


def show(cell: Mapping[str, Any], bar: float) -> None:
    best = cell["auto_over_best"]
    say(
        f"{cell['task']:9s} x{cell['concurrency']:<3d} auto over {cell['picked']:9s} {best['median']:.3f} "
        f"({best['q1']:.2f} to {best['q3']:.2f}){'' if best['median'] >= bar else f' below {bar}'}"
        f"  over off {cell['auto_over_off']['median']:.2f}  {cell['tokens_per_s']}"
    )


if __name__ == "__main__":
    main()
