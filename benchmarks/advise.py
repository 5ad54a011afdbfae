"""Is the advice right? Predictions beside measurements, and the choice beside the best of an exhaustive grid.

    python -m benchmarks.advise            # three models, two kinds of traffic, 1, 4 and 16 requests at once
    python -m benchmarks.advise --quick    # the same 18 cells with fewer requests, settings and rounds: minutes

For each model and traffic the advice records, measures costs and predicts as `slipstream advise` does. Then, at each
load, what it predicts to be best, the best other drafter and off are measured, which is the advice's own check. After
that every setting of the grid runs on the same requests, in rounds in which the settings take turns; the advised
setting is compared with the best one there, and the predictions with these times. Larger models are cost-expanded
copies, made in `--folder` once. A run that is stopped goes on from its last cell.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from benchmarks.advise_page import write_page
from benchmarks.control.traffic import TARGETS, checkpoints
from benchmarks.kept import Kept, say
from slipstream.assets import EMBEDDED_DRAFT, EMBEDDED_EAGLE3, EMBEDDED_TARGET
from slipstream.assets.workload.reading import Workload
from slipstream.config import SpeculativeConfig
from slipstream.core.meter import meter
from slipstream.engine.closed_loop import closed_loop
from slipstream.profiling.provenance import provenance
from slipstream.sampling.params import SamplingParams
from slipstream.tools.advise.candidates import OFF, Candidate, Setting, setting_name, settings
from slipstream.tools.advise.check import CheckedSetting
from slipstream.tools.advise.engines import CheckEngines
from slipstream.tools.advise.job import AdviceJob
from slipstream.tools.advise.kept_parts import KeptParts
from slipstream.tools.advise.predict import MIN_GAIN
from slipstream.tools.advise.run import AdviceWork
from slipstream.tools.advise.simulate import always
from slipstream.tools.advise.traffic import Requests, read_traffic

RESULTS = Path(__file__).parents[1] / "docs/benchmarks"
MODELS = ("embedded", "300m", "300m-int8")
LOADS = (1, 4, 16)
TRAFFIC = {"code": (("sql", "code", "api_call"), 0.0), "creative": (("creative", "chat"), 1.0)}
"""Name to tasks and temperature: text that is easy to predict, and text that is not."""
BARS = {"within": 0.10, "cells": 15, "choice": 0.97}
MAX_TURNS = 40
QUICK = {"max_tokens": 32, "rounds": 2, "cell_seconds": 20.0, "minutes": 0.6}


def main() -> None:
    """Measure all cells, then say how many keep the bars."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--traffic", default=",".join(TRAFFIC))
    parser.add_argument("--loads", default=",".join(map(str, LOADS)))
    parser.add_argument("--folder", type=Path, default=Path("build/control"), help="for cost-expanded copies")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5, help="over the whole grid, at least")
    parser.add_argument(
        "--cell-seconds", type=float, default=60.0, help="go on with rounds over the grid so long, at least"
    )
    parser.add_argument("--minutes", type=float, default=4.0, help="of each advice, its check apart")
    parser.add_argument(
        "--requests", type=int, default=32, help="of each traffic, at least two for each at once"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--output", type=Path, default=None, help="the result, in docs/benchmarks unless given"
    )
    options = parser.parse_args()
    if options.quick:
        vars(options).update(QUICK)
    file = options.output or RESULTS / f"advise{'_quick' if options.quick else ''}.json"
    kept = Kept(file, vars(options))
    cells = [
        cell
        for model in options.models.split(",")
        for traffic in options.traffic.split(",")
        for cell in measure_traffic(model, traffic, options, kept)
    ]
    result = {"provenance": provenance(num_threads=options.threads), "quick": options.quick, "cells": cells}
    result["summary"] = summary(cells)
    say(str(result["summary"]))
    kept.finish(result)
    write_page(result, file)


def candidates(quick: bool, head: str | None) -> list[Candidate]:
    """The grid's settings; the advice chooses from the same."""
    draft = SpeculativeConfig(
        "draft_model",
        options={"model": EMBEDDED_DRAFT, "num_speculative_tokens": 4 if quick else 6},
    )
    found = [
        Candidate("suffix", SpeculativeConfig("suffix")),
        Candidate("draft", draft, (1, 2, 4) if quick else (1, 2, 3, 4, 6)),
    ]
    if quick or head is None:
        return found
    eagle = {"model": head, "num_speculative_tokens": 4, "tree_top_k": 1, "num_draft_nodes": None}
    tree = {**draft.options, "tree_top_k": 3, "num_speculative_tokens": 4, "num_draft_nodes": 8}
    return [
        *found,
        Candidate("ngram", SpeculativeConfig("ngram", options={"num_speculative_tokens": 4}), (2, 4)),
        Candidate("draft tree", SpeculativeConfig("draft_model", options=tree)),
        Candidate("eagle3", SpeculativeConfig("eagle3", options=eagle), (1, 2, 4)),
    ]


def requests_of(traffic: str) -> Requests:
    """The sample's prompts of some tasks; their order mixes the tasks."""
    tasks, _ = TRAFFIC[traffic]
    every = read_traffic("sample", None, None).workload
    return Requests(Workload(traffic, [one for one in every.questions if one.task in tasks]))


def measure_traffic(name: str, traffic: str, options: argparse.Namespace, kept: Kept) -> list[dict[str, Any]]:
    """The cells of one model and traffic."""
    loads = [int(load) for load in options.loads.split(",")]
    cells = {load: f"{name}, {traffic}, {load} at once" for load in loads}
    if all(kept.has(cell) for cell in cells.values()):
        return [kept.get(cell) for cell in cells.values()]
    target = TARGETS[name]
    options.folder.mkdir(parents=True, exist_ok=True)
    model, head = checkpoints(name, None if options.quick else EMBEDDED_EAGLE3, options.folder)
    tasks, temperature = TRAFFIC[traffic]
    job = AdviceJob(
        requests=requests_of(traffic),
        candidates=candidates(options.quick, head),
        params=SamplingParams(temperature=temperature, seed=1),
        model=None if model == EMBEDDED_TARGET else model,
        engine_options={"quantization": target.quantization, "num_threads": options.threads},
        loads=loads,
        prompts_per_task=-(-options.requests // len(tasks)),
        max_tokens=options.max_tokens,
        budget_s=60 * options.minutes,
    )
    with meter("advise", refreshes=False) as shown:
        work = AdviceWork(job, KeptParts(None, {}, False), shown)
        work.record()
        work.measure()
        work.plan()
    engines = CheckEngines(job, work.engine)
    found = []
    for load in loads:

        def measure(load: int = load) -> dict[str, Any]:
            return measure_cell(work, engines, load, options)

        cell = kept.cell(cells[load], measure)
        found.append({"model": name, "traffic": traffic, **cell})
        show(found[-1])
    return found


def measure_cell(
    work: AdviceWork, engines: CheckEngines, load: int, options: argparse.Namespace
) -> dict[str, Any]:
    """The advice's own check, then the whole grid."""
    places = range(min(len(work.jobs), max(4, 2 * load)))
    jobs = [work.jobs[place] for place in places]
    listed = [OFF, *settings(work.job.candidates)]
    names = {setting: setting_name(setting, work.job.candidates) for setting in listed}
    runner = GridRunner(work, engines, jobs, load)
    best, rival = work.contest.settings_at(load)
    for setting in listed:
        runner.run(setting, warm=True)
    checks = runner.turns([OFF, best, rival], max(options.rounds // 2, 1), options.cell_seconds / 2)
    advised = work.contest.decide(load, checked(checks, names)).setting
    turns = runner.turns(listed, options.rounds, options.cell_seconds)
    goodput = {names[one]: statistics.median(turn[one] for turn in turns) for one in listed}
    predicted = {
        names[one]: work.simulator.closed_loop(places, load, always(one), used(one)).goodput for one in listed
    }
    fastest = max(goodput, key=lambda name: goodput[name])
    gain = {name: statistics.median(turn[one] / turn[OFF] for turn in turns) for one, name in names.items()}
    return {
        "load": load,
        "advised": advised,
        "fastest": fastest,
        "advised_over_fastest": round(goodput[advised] / goodput[fastest], 3),
        "predicted_best": names[best],
        "turns": len(turns),
        "goodput": {name: round(value, 2) for name, value in goodput.items()},
        "predicted_goodput": {name: round(value, 2) for name, value in predicted.items()},
        "speedup": {name: round(value, 3) for name, value in gain.items()},
        "predicted_speedup": {name: round(value / predicted["off"], 3) for name, value in predicted.items()},
    }


def used(setting: Setting) -> list[int]:
    return [] if setting.is_off else [setting.candidate]


class GridRunner:
    """Runs settings on the same requests."""

    def __init__(self, work: AdviceWork, engines: CheckEngines, jobs: Seq[Any], load: int) -> None:
        self._work, self._engines, self._jobs, self._load = work, engines, jobs, load

    def run(self, setting: Setting, warm: bool = False) -> float:
        """Tokens a second."""
        candidates = self._work.job.candidates
        own = None if setting.is_off else candidates[setting.candidate]
        name = "off" if own is None else own.name
        engine = self._engines.get(name, SpeculativeConfig() if own is None else own.speculative)
        jobs = self._jobs[:1] if warm else self._jobs
        answers, _, seconds = closed_loop(engine, jobs, self._load, setting.depth or None)
        return sum(len(answer.token_ids) for answer in answers) / seconds

    def turns(self, listed: Seq[Setting], least: int, seconds: float) -> list[dict[Setting, float]]:
        """So many turns at least, and for so long."""
        ends_s = time.perf_counter() + seconds
        found: list[dict[Setting, float]] = []
        while len(found) < least or (time.perf_counter() < ends_s and len(found) < MAX_TURNS):
            found.append(self.turn(listed, len(found)))
        return found

    def turn(self, listed: Seq[Setting], number: int) -> dict[Setting, float]:
        """Each setting once, beginning with another one each time."""
        order = list(dict.fromkeys(listed))
        start = number % len(order)
        return {setting: self.run(setting) for setting in (*order[start:], *order[:start])}


def checked(turns: Seq[Mapping[Setting, float]], names: Mapping[Setting, str]) -> list[CheckedSetting]:
    """The turns of a check as the advice reads them."""
    found = []
    for setting in turns[0]:
        rate = statistics.median(turn[setting] for turn in turns)
        gain = statistics.median(turn[setting] / turn[OFF] for turn in turns)
        measured = None if setting.is_off else gain
        found.append(CheckedSetting(names[setting], 0, rate, rate, measured, measured, None, len(turns)))
    return found


def error(cell: Mapping[str, Any], what: str) -> float:
    """Return the error of the setting that was predicted to be best: predicted over measured, less one."""
    name = cell["predicted_best"]
    return float(cell[f"predicted_{what}"][name] / cell[what][name] - 1)


def summary(cells: Seq[Mapping[str, Any]]) -> dict[str, Any]:
    """How many cells keep each bar."""
    off_is_best = [cell for cell in cells if max(cell["speedup"].values()) < MIN_GAIN]
    return {
        "cells": len(cells),
        "speedup_within_10_percent": sum(abs(error(cell, "speedup")) <= BARS["within"] for cell in cells),
        "goodput_within_10_percent": sum(abs(error(cell, "goodput")) <= BARS["within"] for cell in cells),
        "choice_within_3_percent": sum(cell["advised_over_fastest"] >= BARS["choice"] for cell in cells),
        "off_is_best": len(off_is_best),
        "of_them_advised_off": sum(cell["advised"] == "off" for cell in off_is_best),
    }


def show(cell: Mapping[str, Any]) -> None:
    say(
        f"{cell['model']:10s} {cell['traffic']:9s} x{cell['load']:<3d} advised {cell['advised']:10s} "
        f"fastest {cell['fastest']:10s} {cell['advised_over_fastest']:.3f}  "
        f"{cell['predicted_best']}: speedup {error(cell, 'speedup'):+.0%}, goodput {error(cell, 'goodput'):+.0%}"
    )


if __name__ == "__main__":
    main()
