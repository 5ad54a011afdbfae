"""The tables of an advice."""

from __future__ import annotations

from slipstream.tools.advise.advice import Advice
from slipstream.tools.advise.predict import PredictedCell
from slipstream.tools.bench.report.grid import Grid, interval, number, share

ALL_TASKS = "all tasks"


def tables(advice: Advice) -> list[Grid]:
    """The plan, prediction next to measurement, and every prediction."""
    return [_plan(advice), *_checks(advice), _predictions(advice), *_by_task(advice)]


def _plan(advice: Advice) -> Grid:
    grid = Grid("What to run", ["task", "requests at once", "setting", "predicted speedup"])
    seen: set[str | None] = set()
    for row in advice.plan.as_json(advice.candidates):
        upto = row["max_requests"]
        loads = f"up to {upto}" if upto is not None else "more" if row["task"] in seen else "any number"
        seen.add(row["task"])
        setting = "off: do not enable" if row["setting"] == "off" else row["setting"]
        grid.add(row["task"] or ALL_TASKS, loads, setting, number(row["predicted_speedup"]))
    return grid


def _checks(advice: Advice) -> list[Grid]:
    if not any(load.checked for load in advice.loads):
        return []
    grid = Grid(
        "Predicted and measured",
        [
            "setting",
            "requests at once",
            "tokens/s",
            "predicted",
            "speedup",
            "95 %",
            "predicted",
            "weighed",
            "pairs",
        ],
        "Measured on the same blocks of requests in turns, from empty caches. Weighed: both speedups together, each by "
        "its error; it decides.",
    )
    for load in advice.loads:
        for one in load.checked:
            grid.add(
                one.name,
                str(one.concurrency),
                number(one.measured_goodput, 1),
                number(one.predicted_goodput, 1),
                number(one.measured_speedup),
                interval(one.interval),
                number(one.predicted_speedup),
                number(one.weighed_speedup),
                str(one.num_pairs),
            )
    return [grid]


def _predictions(advice: Advice) -> Grid:
    grid = Grid(
        "Every setting, predicted",
        ["setting", *(f"{load.concurrency} at once" for load in advice.loads), "τ", "accepted of drafted"],
        "Times the tokens a second of off, all tasks. From counted steps and measured costs.",
    )
    for name in dict.fromkeys(cell.setting for cell in advice.predicted):
        cells = {cell.concurrency: cell for cell in _cells(advice, name, None)}
        some = next(iter(cells.values()))
        speedups = [number(cells[load.concurrency].speedup) for load in advice.loads]
        grid.add(name, *speedups, number(some.tau), share(some.acceptance_rate))
    return grid


def _by_task(advice: Advice) -> list[Grid]:
    tasks = list(dict.fromkeys(cell.task for cell in advice.predicted if cell.task is not None))
    if not tasks:
        return []
    grid = Grid(
        "The best setting by task, predicted",
        ["task", *(f"{load.concurrency} at once" for load in advice.loads)],
        "If all requests were of this task.",
    )
    for task in tasks:
        best = []
        for load in advice.loads:
            cells = [
                cell
                for cell in advice.predicted
                if cell.task == task and cell.concurrency == load.concurrency
            ]
            cell = max(cells, key=lambda one: one.goodput)
            best.append(f"{cell.setting} {cell.speedup:.2f}")
        grid.add(task, *best)
    return [grid]


def _cells(advice: Advice, setting: str, task: str | None) -> list[PredictedCell]:
    return [cell for cell in advice.predicted if cell.setting == setting and cell.task == task]
