"""The advice as a page that needs no knowledge of speculation to be read."""

from __future__ import annotations

import json

from slipstream.tools.advise.advice import Advice
from slipstream.tools.advise.tables import tables
from slipstream.tools.advise.verdict import remarks, verdict
from slipstream.tools.bench.report.page import Page, Plot, legend, provenance_rows
from slipstream.tools.bench.report.plots import Estimate, estimates, lines
from slipstream.tools.bench.result import EMBEDDED, WorkloadSummary

_METHOD = (
    "The target answered the prompts once without speculation. Beside it every drafter said what it would have "
    "drafted after each token. A draft token is right or wrong whichever drafter runs, since the target's token "
    "depends on the text, the seed and the position alone; so the steps that each setting would have taken were "
    "counted, not estimated.",
    "What steps and drafts take was measured on this machine with this engine, by requests at once, rows and levels. "
    "The scheduler was simulated with these steps and times. The advised setting, the runner-up and off were then "
    "measured on the same requests in turns.",
    "Break-even acceptance rates are summaries for people: α + α² + … + α^γ > γc + v - 1 with the measured γc + v. No "
    "choice rests on them.",
)


def render(advice: Advice) -> str:
    """The page as HTML."""
    provenance = advice.provenance
    workload = WorkloadSummary(advice.traffic, advice.num_requests, advice.max_tokens, 0, 0)
    name = "the embedded pair" if advice.model == EMBEDDED else advice.model
    page = Page(
        title=f"Should {name} speculate?",
        subtitle=f"{provenance['date']} · {provenance['cpu']} · Slipstream {provenance['slipstream']}",
        verdict=verdict(advice),
        warnings=list(advice.notes),
        legend=legend(_names(advice), 1),
        plots=_plots(advice),
        grids=tables(advice),
        remarks=[line for line in remarks(advice) if line not in advice.notes],
        method=_METHOD,
        details=[
            *provenance_rows(provenance, workload, 1),
            ("setting", json.dumps(advice.speculative, ensure_ascii=False)),
        ],
        command=provenance["command"],
    )
    return page.html()


def _names(advice: Advice) -> list[str]:
    return [candidate.name for candidate in advice.candidates]


def _plots(advice: Advice) -> list[Plot]:
    return [plot for plot in (_by_load(advice), _by_depth(advice), _checks(advice)) if plot is not None]


def _by_load(advice: Advice) -> Plot | None:
    """Each drafter at its best depth."""
    if len(advice.loads) < 2:
        return None
    series: dict[int, dict[float, float]] = {}
    for place, name in enumerate(_names(advice), start=1):
        for load in advice.loads:
            found = [
                cell.speedup
                for cell in advice.predicted
                if cell.task is None
                and cell.concurrency == load.concurrency
                and cell.setting.split(" γ=")[0] == name
            ]
            if found:
                series.setdefault(place, {})[load.concurrency] = max(found)
    drawing = lines(series, "requests at once", "times speculation off", logarithmic=True)
    return Plot(
        "What speculation gains as load grows",
        drawing,
        "Predicted, each drafter at its best depth. Below 1 it is slower than no speculation.",
    )


def _by_depth(advice: Advice) -> Plot | None:
    """Chains at the smallest load."""
    first = advice.loads[0].concurrency
    series: dict[int, dict[float, float]] = {}
    for place, candidate in enumerate(advice.candidates, start=1):
        for depth in candidate.depths:
            for cell in advice.predicted:
                here = cell.task is None and cell.concurrency == first
                if depth and here and cell.setting == f"{candidate.name} γ={depth}":
                    series.setdefault(place, {})[depth] = cell.speedup
    if not series:
        return None
    drawing = lines(series, "draft tokens a step", "speedup by depth")
    return Plot(
        "How deep to draft",
        drawing,
        f"Predicted, times speculation off, with {first} request{'s' * (first > 1)}.",
    )


def _checks(advice: Advice) -> Plot | None:
    rows: dict[str, dict[int, Estimate]] = {}
    for load in advice.loads:
        for one in load.checked:
            if one.measured_speedup is not None and one.predicted_speedup is not None:
                rows[f"{one.name}, {one.concurrency} at once"] = {
                    1: Estimate(one.predicted_speedup),
                    2: Estimate(one.measured_speedup, one.interval),
                }
    if not rows:
        return None
    return Plot(
        "Predicted and measured",
        estimates(rows, "times speculation off", 1.0),
        "Measured with 95 % intervals over blocks of requests.",
        legend=legend(["predicted", "measured"], 1),
    )
