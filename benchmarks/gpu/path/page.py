"""The parts' results as a section of docs/benchmarks/gpu.md, the bars first."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu.path.part import MISSING
from benchmarks.gpu.path.runner import PARTS, SUMMARY
from benchmarks.harness.kept import write_result
from benchmarks.harness.page import table, wrapped, write_between

BEGIN = "<!-- measured: python -m benchmarks.gpu.path -->"
END = "<!-- end of the CUDA path -->"
RESULT = "gpu_path.json"

Cells = Mapping[str, Any]
Result = Mapping[str, Any]
"""`run`, and by part: `cells`, `missing`, `provenance`."""
WAYS = ("fused", "captured")
"""How passes are computed that bars are about: the first that was measured."""


class Bar(NamedTuple):
    """What is measured, against what it must be."""

    name: str
    limit: float
    value: float | None
    """None where it was not measured."""
    is_least: bool = False
    """Whether the value must be at least the limit, and not at most."""

    @property
    def holds(self) -> bool:
        return self.value is not None and (
            self.value >= self.limit if self.is_least else self.value <= self.limit
        )


def read(folder: Path) -> dict[str, Any]:
    """What is in a folder of results, of unfinished parts too."""
    found: dict[str, Any] = {}
    for name in PARTS:
        whole, partial = folder / f"{name}.json", folder / f"{name}.partial.json"
        if whole.exists():
            found[name] = json.loads(whole.read_text())
        elif partial.exists():
            cells = json.loads(partial.read_text())["cells"]
            found[name] = {"missing": cells.pop(MISSING, {}), "cells": cells}
    run = folder / SUMMARY
    return {"run": json.loads(run.read_text()) if run.exists() else {}, **found}


def publish(folder: Path, docs: Path) -> str:
    """Write all results as one file and the tables into the page; returns the tables."""
    result = read(folder)
    text = tables(result)
    write_result(docs / RESULT, result)
    write_between(docs / "gpu.md", BEGIN, END, text)
    return text


def tables(result: Result) -> str:
    """The bars, and every part that was measured."""
    writers: dict[str, Callable[[Cells], list[str]]] = {
        "device": _device,
        "kernels": _kernels,
        "bits": _bits,
        "steps": _steps,
        "baseline": _baseline,
        "engine": _engine,
        "tests": _tests,
    }
    parts = ["### Bars", "\n".join(_bar_table(result))]
    for name, writer in writers.items():
        if result.get(name, {}).get("cells"):
            parts += writer(result[name]["cells"])
    parts += _unmeasured(result)
    ran = result["run"].get("provenance")
    if ran:
        parts.append(
            f"{ran['device']}, {ran['date']}, commit {ran['commit'] or 'unknown'}: `{ran['command']}`. "
            f"Raw results: [{RESULT}]({RESULT})."
        )
    return "\n\n".join(map(wrapped, parts))


def bars(result: Result) -> list[Bar]:
    """What the CUDA path must reach."""
    return [*_first_bars(result), *_second_bars(result)]


def _first_bars(result: Result) -> list[Bar]:
    """Those of captured passes."""
    steps, engine = _cells(result, "steps"), _cells(result, "engine")
    one = _of(engine, "step_ms", configuration="off", requests=1)
    found = [
        Bar("1 G in bfloat16, off, one request: ms a step", 3.5, one.get("step_ms")),
        Bar("the same: share of a step that the GPU is idle", 0.15, one.get("idle")),
    ]
    for context in (128, 2048):
        few, many = (_pass(steps, "1G", context, rows) for rows in (1, 64))
        found.append(Bar(f"64 rows over one at 1 G, context {context:,}", 1.15, _ratio(many, few)))
    few, many = (_pass(steps, "1G", 128, 1, sequences) for sequences in (1, 8))
    found.append(Bar("a pass of eight requests over one of one, 1 G, context 128", 1.15, _ratio(many, few)))
    outside, unequal = share_outside(engine), unequal_texts(engine)
    found.append(Bar("passes outside graphs after warm-up, targets and drafts", 0.01, outside))
    found.append(Bar("answers that differ from off, of 28, at one and at eight requests", 0, unequal))
    return found


def _second_bars(result: Result) -> list[Bar]:
    """Those of the fused decoder, the draft loop and overlapped steps."""
    steps, engine, baseline = (_cells(result, part) for part in ("steps", "engine", "baseline"))
    ms = {
        name: _of(engine, "step_ms", configuration=name, requests=1).get("step_ms")
        for name in ("off", "chain of 4")
    }
    many_ms = _of(engine, "step_ms", configuration="off", requests=64).get("step_ms")
    copied = _cells(result, "device").get("rates", {}).get("copy_gb_per_s")
    large_ms = _pass(steps, "8B", 128, 1)
    gain, predicted = best_gain(engine)
    many = _ratio(ms["off"], many_ms)
    found = [
        Bar("8 G in bfloat16, off: share of the copies' rate", 0.75, _ratio(_rate(steps, "8B"), copied), True),
        Bar("1 G in bfloat16, off, one request: ms a step", 1.55, ms["off"]),
        Bar("chain of 4, a step over one of off", 1.35, _ratio(ms["chain of 4"], ms["off"])),
        Bar("the best drafter over off, one request", 2.5, gain, True),
        Bar("the same over what its step and its accepted tokens predict", 0.95, _ratio(gain, predicted), True),
        Bar("64 requests, off: tokens a second over one's", 40, None if many is None else 64 * many, True),
        Bar("a drafter that is loaded and not asked: a step over off", 1.01, _of(engine, "over_off").get("over_off")),
    ]  # fmt: skip
    for rows in (1, 64):
        ours, theirs = (
            _of(steps, "ms", shape="1G", way=way, context=128, rows=rows, sequences=1).get("ms")
            for way in ("fused", "fused, cuBLAS")
        )
        name = f"our products over cuBLAS's, a pass of {rows} at 1 G"
        found.append(Bar(name, 1.05, _ratio(ours, theirs)))
    for name, own in (("1G", ms["off"]), ("8B", large_ms)):
        theirs = baseline.get(f"{name}, compiled", {}).get("ms")
        found.append(
            Bar(
                f"Transformers' compiled `generate` over ours, off, ms a token, {name}",
                1,
                _ratio(theirs, own),
                True,
            )
        )
    return found


def best_gain(engine: Cells) -> tuple[float | None, float | None]:
    """Tokens a second of the drafter that gains most at one request, over off's; and what was to be expected: its
    tokens a step over off's, over what a step of its takes."""
    found = []
    off = _of(engine, "texts", configuration="off", requests=1)
    off_step = _of(engine, "step_ms", configuration="off", requests=1)
    for cell in _speeds(engine) if off and off_step else ():
        step = _of(engine, "step_ms", configuration=cell["configuration"], requests=1)
        if cell["requests"] != 1 or cell["configuration"] == "off" or not step:
            continue
        per_step, plain = (each["num_tokens"] / each["decoding_steps"] for each in (cell, off))
        predicted = per_step / plain / (step["step_ms"] / off_step["step_ms"])
        found.append((cell["tokens_per_s"] / off["tokens_per_s"], predicted))
    return max(found, default=(None, None))


def _bar_table(result: Result) -> list[str]:
    rows = []
    for bar in bars(result):
        verdict = "not measured" if bar.value is None else "held" if bar.holds else "**missed**"
        sign = "≥" if bar.is_least else "≤"
        rows.append(
            (bar.name, f"{sign} {bar.limit:g}", "" if bar.value is None else f"{bar.value:.3g}", verdict)
        )
    return table(("bar", "must be", "measured", ""), rows)


def _cells(result: Result, part: str) -> Cells:
    found: Cells = result.get(part, {}).get("cells", {})
    return found


def _of(cells: Cells, having: str, **fields: Any) -> dict[str, Any]:
    """The cell with these fields that has `having`; empty where there is none."""
    found = (cell for cell in cells.values() if having in cell and fields.items() <= cell.items())
    return next(found, {})


def _pass_cell(cells: Cells, shape: str, context: int, rows: int, sequences: int = 1) -> dict[str, Any]:
    """A recorded pass."""
    asked = {"shape": shape, "context": context, "rows": rows, "sequences": sequences}
    found = (_of(cells, "ms", way=way, **asked) for way in WAYS)
    return next(filter(None, found), {})


def _pass(cells: Cells, shape: str, context: int, rows: int, sequences: int = 1) -> float | None:
    """Milliseconds of a recorded pass."""
    return _pass_cell(cells, shape, context, rows, sequences).get("ms")


def _rate(cells: Cells, shape: str) -> float | None:
    """GB of weights a second that a pass of one row reads behind 128 tokens."""
    cell = _pass_cell(cells, shape, 128, 1)
    return cell["bytes_read"] / cell["ms"] / 1e6 if cell else None


def _ratio(above: float | None, below: float | None) -> float | None:
    return None if above is None or below is None else above / below


def _speeds(cells: Cells) -> list[dict[str, Any]]:
    return [cell for cell in cells.values() if "texts" in cell]


def _outside_of(cell: Mapping[str, Any]) -> float:
    """The share of a cell's passes that no graph computed."""
    outside = sum(sum(each["outside"].values()) for each in cell["passes"])
    return outside / max(1, outside + sum(each["replayed"] for each in cell["passes"]))


def share_outside(cells: Cells) -> float | None:
    """The largest share of any configuration."""
    return max(map(_outside_of, _speeds(cells)), default=None)


def _unequal_of(cell: Mapping[str, Any], cells: Cells) -> int | None:
    off = _of(cells, "texts", configuration="off", requests=cell["requests"])
    if not off:
        return None
    return sum(mine != plain for mine, plain in zip(cell["texts"], off["texts"], strict=True))


def unequal_texts(cells: Cells) -> int | None:
    """The most answers of any configuration that differ from off's; None before all are there."""
    found = [_unequal_of(cell, cells) for cell in _speeds(cells) if cell["configuration"] != "off"]
    known = [number for number in found if number is not None]
    return max(known) if known and len(known) == len(found) else None


def _number(value: float | None, digits: int = 2) -> str:
    return "" if value is None or math.isnan(value) else f"{value:,.{digits}f}"


def _device(cells: Cells) -> list[str]:
    found = []
    if "description" in cells:
        about = cells["description"]
        found.append(f"{about['name']}, driver {about['driver']}, PyTorch {about['torch']}")
    if "rates" in cells:
        rates = cells["rates"]
        found.append(f"copies {rates['copy_gb_per_s']:,.0f} GB/s, reads {rates['read_gb_per_s']:,.0f} GB/s")
    if "launches" in cells:
        found.append(f"{cells['launches']['launch_us']:.1f} µs to launch a small kernel from Python")
    nodes = [f"{value['us_a_node']:.2f} µs ({name})" for name, value in cells.items() if "us_a_node" in value]
    if nodes:
        found.append(f"one more kernel in a graph costs {', '.join(nodes)}")
    return ["### The device", "; ".join(found) + "."]


def _kernels(cells: Cells) -> list[str]:
    found = []
    if "compiled" in cells:
        done = cells["compiled"]
        found += [f"**A kernel failed to launch:** {error}" for error in done["failed_launches"]]
        found.append(
            f"{done['kernels']} kernels compiled for it: {len(done['spilling'])} spill, "
            f"at most {done['most_registers']} registers and {done['most_shared_bytes'] // 1024} KiB of shared memory."
        )
    errors = [
        (name, cell["dtype"], f"{cell['error']:.1e}") for name, cell in cells.items() if "error" in cell
    ]
    equal = [f"{cell['equal']} of {cell['rows']} ({name})" for name, cell in cells.items() if "equal" in cell]
    if equal:
        found.append(f"Tokens that are the host's: {', '.join(equal)}.")
    head = ("kernel against float64", "type", "largest error over the largest number")
    return ["### Kernels", *found, *(["\n".join(table(head, errors))] if errors else []), *_rates(cells)]


def _rates(cells: Cells) -> list[str]:
    """Microseconds and bytes a second of products of linear layers."""
    rows = []
    for name, cell in cells.items():
        if not name.startswith("rates of "):
            continue
        for kind, each in cell.items():
            times = [
                f"{count}: {us:.1f} µs, {each['gb_per_s'][count]:,.0f} GB/s"
                for count, us in each["us"].items()
            ]
            rows.append((name.removeprefix("rates of "), kind, "; ".join(times)))
    head = ("product, outputs × inputs", "weights", "by rows")
    return ["\n".join(table(head, rows))] if rows else []


def _bits(cells: Cells) -> list[str]:
    def held(cell: Mapping[str, Any], name: str) -> str:
        return ", ".join(f"{size}: {'yes' if value else '**no**'}" for size, value in cell[name].items())

    products = [
        (name.removeprefix("product "), held(cell, "places"), held(cell, "neighbours"),
         "yes" if cell["buckets_agree"] else "no", "yes" if cell["alone_agrees"] else "no")
        for name, cell in cells.items() if "places" in cell
    ]  # fmt: skip
    head = (
        "product, cuBLAS's or our own",
        "same in every place",
        "beside any rows",
        "in 16, 32, 64 rows",
        "and alone",
    )
    found = ["### Bits of a row", "\n".join(table(head, products))]
    shares = [(name, f"{cell['equal']} of {cell['rows']}") for name, cell in cells.items() if "equal" in cell]
    for name, cell in cells.items():
        if name.startswith("passes of"):
            shares += [
                (f"{name}, {tree}", f"{each['equal']} of {each['rows']}") for tree, each in cell.items()
            ]
    if shares:
        found.append("\n".join(table(("drafted rows with the bits of plain decoding", ""), shares)))
    if "noise" in cells:
        noise = cells["noise"]
        found.append(
            f"Noise: its integers are {'' if noise['integers_equal'] else '**not** '}the host's; of "
            f"{noise['numbers']:,} logarithms {noise['that_differ']:,} differ, by at most {noise['by_at_most']:.1e}."
        )
    return found


def _steps(cells: Cells) -> list[str]:
    head = (
        "model",
        "computed",
        "context",
        "sequences × rows",
        "ms",
        "GPU busy, ms",
        "GPU idle",
        "kernels",
        "GB/s of weights",
    )
    rows = []
    for cell in cells.values():
        rows.append(
            (
                cell["shape"],
                cell["way"],
                f"{cell['context']:,}",
                f"{cell['sequences']} × {cell['rows']}",
                _number(cell["ms"]),
                _number(cell.get("device_ms")),
                f"{cell['idle']:.0%}" if "idle" in cell else "",
                _number(cell.get("kernels"), 0),
                _number(cell["bytes_read"] / cell["ms"] / 1e6, 0),
            )
        )
    return ["### Target passes", "\n".join(table(head, rows))]


def _baseline(cells: Cells) -> list[str]:
    rows = [(name, _number(cell["ms"]), _number(cell["first_s"], 0)) for name, cell in cells.items()]
    head = ("Transformers' `generate`, static cache", "ms a token", "first answer, s")
    return ["### Baseline", "\n".join(table(head, rows))]


def _engine(cells: Cells) -> list[str]:
    head = ("requests", "drafter", "tokens/s", "over off", "texts as off's", "outside graphs",
            "step, ms", "drafting, ms", "rest, ms", "GPU idle", "waits")  # fmt: skip
    rows = []
    for cell in _speeds(cells):
        same = {"configuration": cell["configuration"], "requests": cell["requests"]}
        step = _of(cells, "step_ms", **same)
        off = _of(cells, "texts", configuration="off", requests=cell["requests"])
        unequal = _unequal_of(cell, cells)
        rows.append(
            (
                cell["requests"],
                cell["configuration"],
                _number(cell["tokens_per_s"], 0),
                _number(_ratio(cell["tokens_per_s"], off.get("tokens_per_s"))),
                "" if unequal is None else f"{len(cell['texts']) - unequal} of {len(cell['texts'])}",
                f"{_outside_of(cell):.1%}",
                _number(step.get("step_ms")),
                _number(step.get("draft_ms")),
                _number(step.get("host_ms")),
                f"{step['idle']:.0%}" if "idle" in step else "",
                _number(step.get("waits"), 0),
            )
        )
    many = _of(cells, "step_ms", configuration="off", requests=64)
    more = [f"A step of 64 requests without drafts takes {many['step_ms']:.2f} ms."] if many else []
    for cell in (each for each in cells.values() if "over_off" in each):
        most = max(cell["ratios"])
        more.append(
            f"With a drafter that is loaded and not asked ({cell['drafter']}) a step takes {cell['over_off']:.3f} "
            f"of one without it (median of {len(cell['ratios'])} turns, at most {most:.3f})."
        )
    return [
        "### The engine (embedded target at the cost of 1 G, bfloat16)",
        "\n".join(table(head, rows)),
        *more,
    ]


def _tests(cells: Cells) -> list[str]:
    found = cells["tests"]
    failed = "".join(f"\n- {name}" for name in found["failed"])
    ended = "" if found["complete"] else ", ended when its time was over"
    counts = f"{found['passed']} passed, {len(found['failed'])} failed, {found['skipped']} skipped"
    return ["### Tests", f"`tests/gpu`: {counts}, {found['seconds']:.0f} s{ended}.{failed}"]


def _unmeasured(result: Result) -> list[str]:
    """Parts that did not end well, and cells that are missing."""
    outcomes = result["run"].get("parts", {})
    lines = [
        f"- {name}: {each['outcome']}"
        for name, each in outcomes.items()
        if each["outcome"] not in ("done", "kept")
    ]
    for name in PARTS:
        missing = result.get(name, {}).get("missing", {})
        lines += [f"- {name}, {cell}: {reason[:200]}" for cell, reason in missing.items()]
    return ["### What is missing", "\n".join(lines)] if lines else []
