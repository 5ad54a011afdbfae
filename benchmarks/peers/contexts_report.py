"""The page of the runs with prompts of given lengths: a pure function of the JSON.

`python -m benchmarks.peers.page` writes it and the picture. Two modes are compared by paired ratios, text by text; a
length has few of them, so intervals are Student's, of the logarithms.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.page import refusals, table, wrapped
from benchmarks.peers.catalog import OURS, PRECISIONS
from benchmarks.peers.cells import (
    Cells,
    Side,
    Speed,
    condition_of,
    decode_rate,
    label,
    length_of,
    memory_gib,
    prompt_rate,
    step_ms,
)
from benchmarks.peers.figures import equal_texts
from benchmarks.peers.markdown import versions
from benchmarks.peers.results import Results


@dataclass(frozen=True)
class Bar:
    """Ours over theirs, at these lengths (all where none is named), and what it has to reach."""

    what: str
    least: float
    speed: Speed
    ours: Side
    theirs: Side
    lengths: tuple[int, ...] = ()


def _same_bits(precision: str, *, caches: tuple[str, ...] = ()) -> tuple[Side, Side]:
    return Side(True, precision, caches=caches), Side(False, precision)


OPENVINO = ("openvino",)
BARS = (
    Bar(
        "bfloat16 off, float32 cache, over float32 off: decode",
        1.7,
        decode_rate,
        Side(True, "bfloat16", caches=("float32",)),
        Side(True, "float32"),
    ),
    *(
        Bar(
            f"prompt, {precision}, over the best peer's",
            1.0,
            prompt_rate,
            *_same_bits(precision),
            (512, 1536, 8192),
        )
        for precision in ("float32", "bfloat16", "int8", "int4")
    ),
    *(
        Bar(
            f"{what}, int8 weights and cache, over OpenVINO int8",
            1.3,
            speed,
            Side(True, "int8", caches=("int8",)),
            Side(False, "int8", peers=OPENVINO),
            (8192,),
        )
        for what, speed in (("first token", prompt_rate), ("decode", decode_rate))
    ),
    Bar(
        "without speculation, int4, over the best peer's: decode",
        1.15,
        decode_rate,
        *_same_bits("int4"),
        (128, 1536),
    ),
    *(
        Bar(
            f"best mode over the best peer's best, {precision}: decode",
            least,
            decode_rate,
            Side(True, precision, kinds=()),
            Side(False, precision, kinds=()),
            (128, 1536),
        )
        for precision, least in (("int8", 2.2), ("bfloat16", 1.5), ("int4", 1.6))
    ),
)


# --- the page ---


def page(results: Results, file_name: str, picture_name: str | None) -> str:
    """The whole page in Markdown; `file_name` is the JSON beside it."""
    cells = [Cells(results, name) for name in results.settings["models"] if name in results.models]
    cells = [of_model for of_model in cells if of_model.samples]
    parts = [_heading(results, file_name, picture_name), _bars(cells)]
    for of_model in cells:
        parts += [
            f"## {of_model.title[0].upper()}{of_model.title[1:]}\n",
            _table(of_model, "prompt tokens/s", prompt_rate, ".0f"),
            _table(of_model, "ms a token after the prompt", step_ms, ".1f"),
            _table(of_model, "peak memory, GiB", memory_gib, ".2f", spread=False),
            _texts(of_model),
            _beside(of_model),
            refusals((label(mode), reason) for mode, reason in of_model.refused.items()),
        ]
    modes = ((of_model, mode) for of_model in cells for mode in of_model.modes)
    parts.append(versions((label(mode), of_model.entries[mode]) for of_model, mode in modes))
    text = "\n".join(part for part in parts if part)
    return wrapped(text)


def _heading(results: Results, file_name: str, picture_name: str | None) -> str:
    lines = [
        "# Long prompts on a CPU",
        "",
        "Written by `python -m benchmarks.peers.page`; do not edit. How to run it again is in "
        "[benchmarks/peers](../../benchmarks/peers/README.md); short prompts by task are on [their page](cpu.md).",
        "",
        "One request. A prompt is a text of sample conversations, cut to exactly so many tokens, the same for all; the "
        "prompt's rate is its tokens over the time to the first token, ms a token the time after the first token over "
        "the tokens after it. With drafts the first step may give some of these tokens. Every figure is the median, "
        "with least and most. All formats are made of one checkpoint in bfloat16. The model was trained on 2,048 "
        "positions: behind more it computes the same, but its text means nothing.",
        "",
        f"Raw results with every output: [{file_name}]({file_name}).",
        "",
    ]
    if results.sessions:
        session = results.sessions[-1]
        lines += [
            f"- {session['cpu']} ({session.get('instructions', 'instructions not noted')}), {session['cores']} cores, "
            f"{session['threads']} threads, {session['memory_bytes'] / 2**30:.0f} GiB; memory read at "
            f"{session['read_bandwidth_bytes_per_s'] / 1e9:.1f} GB/s",
            f"- {session['date']}, commit {session['commit'][:12]}, code {results.code}, Python {session['python']}",
            *(f"- `{each['command']}`" for each in results.sessions),
            f"- {_quiet(results)}",
            *(["- modes of different starts did not take turns"] if len(results.sessions) > 1 else []),
            "",
        ]
    if picture_name is not None:
        lines += [f"![ms a token over the prompt's length, by engine]({picture_name})", ""]
    return "\n".join(lines)


def _quiet(results: Results) -> str:
    """How much else the machine did while it was to do nothing else."""
    alone = [sample for sample in results.samples if not condition_of(sample.task)]
    seconds = sum(sample.seconds for sample in alone)
    if not seconds:
        return "no samples without neighbours"
    others = sum(sample.other_cpu_s for sample in alone) / seconds
    return f"while a sample was taken, everything else on the machine used {others:.3f} cores on average"


def _bars(cells: Sequence[Cells]) -> str:
    lines = [
        "## Bars",
        "",
        "Paired ratios, text by text, with Student's 95 % intervals. Each side takes its fastest mode of those that "
        "the row allows; peers in bfloat16 also compute in it, which the float32 arithmetic of ours does not.",
        "",
        *table(
            ("what", "model", "prompt", "ours", "against", "bar", "reached", "pairs", "yes or no"),
            (
                row
                for bar in BARS
                for of_model in cells
                for task in of_model.tasks
                if not condition_of(task) and (not bar.lengths or length_of(task) in bar.lengths)
                for row in _bar_rows(bar, of_model, task)
            ),
        ),
    ]
    return "\n".join([*lines, ""])


def _bar_rows(bar: Bar, cells: Cells, task: str) -> list[list[object]]:
    ours, theirs = (cells.fastest(side, task, bar.speed) for side in (bar.ours, bar.theirs))
    if ours is None or theirs is None:
        return []
    ratio = cells.ratio(task, ours, theirs, bar.speed)
    if ratio is None:
        return []
    verdict = "yes" if ratio.value >= bar.least else "**no**"
    named = [bar.what, cells.name, task, label(ours), label(theirs)]
    return [[*named, f"≥ {bar.least}", ratio, ratio.num_pairs, verdict]]


def _table(cells: Cells, what: str, speed: Speed, form: str, *, spread: bool = True) -> str:
    """Modes by lengths, nothing beside."""
    tasks = [task for task in cells.tasks if not condition_of(task)]
    if not tasks:
        return ""
    rows = (
        [label(mode), *(_figure(cells.values(task, mode, speed), form, spread=spread) for task in tasks)]
        for mode in cells.modes
    )
    head = [what, *(f"{length_of(task):,}" for task in tasks)]
    return "\n".join([*table(head, (row for row in rows if any(row[1:]))), ""])


def _figure(values: Sequence[float], form: str, *, spread: bool) -> str:
    if not values:
        return ""
    middle = format(statistics.median(values), form)
    if not spread or len(values) == 1:
        return middle
    return f"{middle} ({min(values):{form}} to {max(values):{form}})"


def _texts(cells: Cells) -> str:
    """Whether our texts are those of the same weights and cache without speculation, and 16-bit ones float32's."""
    rows = []
    for mode in cells.modes:
        definition = cells.definition(mode)
        reference = _reference(cells, definition)
        if definition["peer"] != OURS or reference is None or reference == mode:
            continue
        counts = [
            equal_texts(cells.samples.get((task, mode), []), cells.samples.get((task, reference), []))
            for task in cells.tasks
        ]
        equal, total = sum(count[0] for count in counts), sum(count[1] for count in counts)
        if total:
            rows.append((label(mode), label(reference), f"{equal} of {total}"))
    return "\n".join([*table(("texts of", "equal to those of", "equal"), rows), ""]) if rows else ""


def _reference(cells: Cells, definition: dict[str, Any]) -> str | None:
    weights = definition["weights"]
    if definition["kind"] == "off":
        if (weights, definition["cache"]) != ("bfloat16", "float32"):
            return None
        weights = "float32"
    for mode in cells.modes:
        other = cells.definition(mode)
        wanted = ("off", weights, definition["peer"], definition["cache"])
        if (other["kind"], other["weights"], other["peer"], other["cache"]) == wanted:
            return mode
    return None


def _beside(cells: Cells) -> str:
    """Each of our modes over the peers' same kind at the same bits: alone, and with what else was beside it."""
    lengths = sorted({length_of(task) for task in cells.tasks if condition_of(task)})
    rows = []
    for length in lengths:
        tasks = [task for task in cells.tasks if length_of(task) == length]
        for mode in cells.modes:
            definition = cells.definition(mode)
            if definition["peer"] != OURS:
                continue
            precision = PRECISIONS[definition["weights"]]
            theirs = Side(False, precision, kinds=(definition["kind"],), peers=OPENVINO)
            for task in tasks:
                other = cells.fastest(theirs, task, decode_rate)
                if other is None or not cells.values(task, mode, step_ms):
                    continue
                ratios = [cells.ratio(task, mode, other, speed) for speed in (prompt_rate, decode_rate)]
                times = [
                    _figure(cells.values(task, each, step_ms), ".1f", spread=False) for each in (mode, other)
                ]
                beside = condition_of(task) or "alone"
                rows.append([f"{length:,}", label(mode), label(other), beside, *times, *ratios])
    if not rows:
        return ""
    head = (
        *("prompt", "ours", "against", "beside"),
        *("our ms a token", "theirs", "prompt, ours over theirs", "decode"),
    )
    about = (
        "With neighbours and under a quota. A neighbour computes without end at the same priority; a quota is imposed "
        "when the models are loaded."
    )
    return "\n".join([about, "", *table(head, rows), ""])
