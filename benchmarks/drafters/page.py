"""The measured part of docs/benchmarks/drafters.md, made of what was measured alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from math import prod
from typing import Any

from benchmarks.harness.page import table

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"

RATIOS = (
    ("distilling", "distilled draft_model, chain of 4", ["draft_model, chain of 4"]),
    ("EAGLE-3 tree over distilled chain", "eagle3, tree of 60", ["distilled draft_model, chain of 4"]),
    ("another tokenizer (TLI)", "tli, chain of 4", ["another draft_model, chain of 4"]),
    (
        "ensemble over its best member",
        "ensemble: suffix, distilled",
        ["suffix, tree of 16", "distilled draft_model, tree of 16"],
    ),
)
"""What is compared: τ of a drafter over that of another, or of the best of several, task by task."""


def measured(results: Mapping[str, Any]) -> str:
    """All tables, between the two marks."""
    acceptance, speeds = results["acceptance"], results["speed"]
    tasks = sorted({row["task"] for row in acceptance["rows"]})
    parts = ["", *_costs(results), ""]
    for speed in speeds:
        parts += [f"### Speed: {speed['model']}", "", *_speeds(speed), ""]
    for temperature in sorted({row["temperature"] for row in acceptance["rows"]}):
        title = "greedy" if temperature == 0 else f"temperature {temperature}"
        parts += [f"### Acceptance: {title}", "", *_acceptance(acceptance["rows"], temperature, tasks), ""]
    parts += ["### One over another, in τ", "", *_ratios(acceptance["rows"], tasks), ""]
    return "\n".join(parts)


def _costs(results: Mapping[str, Any]) -> list[str]:
    """A line a drafter: what it saves and what it costs."""
    tau = {
        temperature: _pooled(results["acceptance"]["rows"], temperature)
        for temperature in sorted({row["temperature"] for row in results["acceptance"]["rows"]})
    }
    speeds = results["speed"]
    names = list(dict.fromkeys(row["drafter"] for row in results["acceptance"]["rows"]))
    head = ["drafter", *(f"τ at {t:g}" for t in tau), *(f"speedup, {s['model']}" for s in speeds)]
    rows = []
    for name in names:
        timed = [next((r for r in s["rows"] if r["drafter"] == name), None) for s in speeds]
        memory = next((_megabytes(row["draft_bytes"]) for row in timed if row is not None), "–")
        rows.append(
            [
                name,
                *(f"{rates[name]:.2f}" if name in rates else "–" for rates in tau.values()),
                *(f"{row['speedup']:.2f}" if row is not None else "–" for row in timed),
                memory,
                _training(results["training"].get(results["trained"].get(name, ""))),
            ]
        )
    return table([*head, "memory", "training"], rows)


def _training(cost: Mapping[str, Any] | None) -> str:
    if cost is None:
        return "none"
    threads = f"{cost['threads']} thread{'s' if cost['threads'] > 1 else ''}"
    return f"{cost['minutes']:.0f} min, {threads}, {cost['tokens'] / 1e6:.1f} M tokens"


def _megabytes(num_bytes: int | None) -> str:
    return "–" if num_bytes is None else f"{num_bytes / 1e6:.1f} MB"


def _pooled(rows: Seq[Mapping[str, Any]], temperature: float) -> dict[str, float]:
    """τ over all tasks together."""
    sums: dict[str, list[int]] = {}
    for row in rows:
        if row["temperature"] == temperature:
            tokens, steps = sums.setdefault(row["drafter"], [0, 0])
            # The first token of an answer comes with its prompt's pass, which is no step of a draft.
            sums[row["drafter"]] = [tokens + row["tau"] * row["num_steps"], steps + row["num_steps"]]
    return {name: tokens / steps for name, (tokens, steps) in sums.items()}


def _speeds(speed: Mapping[str, Any]) -> list[str]:
    rows = speed["rows"]
    tasks = list(rows[0]["speedup_by_task"])
    lines = []
    for row in rows[1:]:
        interval = row["speedup_interval"]
        spread = "–" if interval is None else f"{interval['low']:.2f} to {interval['high']:.2f}"
        by_task = [_number(row["speedup_by_task"][task]) for task in tasks]
        lines.append([row["drafter"], *by_task, f"**{_number(row['speedup'])}**", spread])
    return table(["drafter", *tasks, "all", "95 % interval"], lines)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _acceptance(rows: Seq[Mapping[str, Any]], temperature: float, tasks: Seq[str]) -> list[str]:
    """A cell is α / τ / steps saved."""
    chosen = [row for row in rows if row["temperature"] == temperature]
    lines = []
    for name in dict.fromkeys(row["drafter"] for row in chosen):
        cells = {row["task"]: row for row in chosen if row["drafter"] == name}
        figures = [
            f"{cells[t]['alpha']:.2f} / {cells[t]['tau']:.2f} / {cells[t]['steps_saved']:.0%}" for t in tasks
        ]
        equal = sum(row["texts_equal_to_off"] for row in cells.values())
        total = sum(row["texts"] for row in cells.values())
        same = f"{equal} of {total}" if "verifier" not in name else "same distribution, other draws"
        lines.append([name, *figures, same])
    return table(["drafter", *tasks, "texts equal"], lines)


def ratios(
    rows: Seq[Mapping[str, Any]], tasks: Seq[str]
) -> Iterator[tuple[str, float, dict[str, float], float]]:
    """Title, temperature, τ over τ by task, and pooled over all tasks' geometric mean."""
    tau = {(row["drafter"], row["temperature"], row["task"]): row["tau"] for row in rows}
    for title, name, others in RATIOS:
        for temperature in sorted({row["temperature"] for row in rows}):
            if any((one, temperature, task) not in tau for one in (name, *others) for task in tasks):
                continue
            by_task = {
                task: tau[name, temperature, task] / max(tau[other, temperature, task] for other in others)
                for task in tasks
            }
            yield title, temperature, by_task, prod(by_task.values()) ** (1 / len(by_task))


def _ratios(rows: Seq[Mapping[str, Any]], tasks: Seq[str]) -> list[str]:
    lines = [
        [
            f"{title}, {temperature or 'greedy'}",
            *(f"{by_task[t]:.2f}" for t in tasks),
            f"**{mean:.2f}**",
        ]
        for title, temperature, by_task, mean in ratios(rows, tasks)
    ]
    return table(["", *tasks, "geometric mean"], lines)
