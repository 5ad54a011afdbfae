"""The page and the picture of `benchmarks.real_models`."""

from __future__ import annotations

import statistics
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from benchmarks.harness.page import machine, refusals, table, wrapped
from benchmarks.harness.pictures import drawing
from benchmarks.peers.figures import Ratio, over_tasks, paired_ratios
from benchmarks.peers.results import Sample

OFF = "slipstream/off"
TITLES = {
    "smollm2": "SmolLM2-135M-Instruct, Q4_1",
    "gemma3": "Gemma 3 270M (a base model: plain text, no chat template), Q4_K_M",
}


def samples(name: str, model: dict[str, Any]) -> dict[str, list[Sample]]:
    """By way, in the order in which the ways were loaded; answers without a token are left out."""
    found: dict[str, list[Sample]] = {way: [] for way in model["about"]}
    for row in model["samples"]:
        if row["token_ids"]:
            found[row["way"]].append(
                Sample(
                    name,
                    row["way"],
                    row["round"],
                    row["category"],
                    row["index"],
                    row["seconds"],
                    row["first_token_s"],
                    [row["token_ids"]],
                    row["cpu_s"],
                    row["other_cpu_s"],
                )
            )
    return {way: rows for way, rows in found.items() if rows}


def page(result: dict[str, Any], raw: Path) -> str:
    """The page, in Markdown."""
    origin = result["provenance"]
    lines = [
        "# Real pretrained models",
        "",
        f"Written by `python -m benchmarks.real_models`; do not edit. Raw results: [{raw.name}]({raw.name}).",
        "",
        f"The first turns of MT-bench's {result['num_prompts']} questions, one request at a time, greedy, up to "
        f"{result['max_tokens']} tokens, whole calls, rounds: {result['rounds']}. All engines read the same GGUF file "
        "with the same threads, and take turns prompt by prompt in an order drawn for each. Nothing is kept from one "
        "request to the next. A ratio is of tokens a second, prompt by prompt; it is the geometric mean over "
        "categories, with a 95 % interval by bootstrap over categories and prompts. Where texts differ, ratios compare "
        "answers of different lengths.",
        "",
        "*Texts as off*: token for token those of Slipstream without speculation. Another engine's arithmetic rounds "
        "otherwise, so its greedy text turns off at the first near-tie; one that returns no token ids is not compared. "
        "*First token* is from the call to the first token that the caller has, the prompt included.",
        "",
        f"{machine(origin)}, {origin['threads']} threads. "
        f"Other programs used {origin['cores_in_use_before']:.2f} cores as it began.",
        "",
        f"![Tokens a second by engine and drafter]({raw.with_suffix('.svg').name})",
    ]
    for name, model in result["models"].items():
        lines += ["", *_of_model(name, model)]
    command = [
        *("", "## Run it again", "", "```sh", origin["command"], "```", ""),
        "`--prompts` is FastChat's `question.jsonl` of MT-bench; `--environments` names virtual environments in which",
        "`xllamacpp` and `openvino-genai` are installed.",
    ]
    return wrapped("\n".join(lines)) + "\n" + "\n".join(command) + "\n"


def _of_model(name: str, model: dict[str, Any]) -> list[str]:
    found = samples(name, model)
    lines = [f"## {TITLES.get(name, name)}", ""]
    refused = [(way, about["refused"]) for way, about in model["about"].items() if "refused" in about]
    if OFF not in found:
        return [*lines, refusals(refused)]
    head = (
        *("way", "tokens/s, median", "over Slipstream's off"),
        *("tokens a pass", "first token", "texts as off"),
    )
    lines += table(head, (_row(model, way, rows, found[OFF]) for way, rows in found.items()))
    others = [way for way in found if way != OFF]
    lines += ["", "By category, over Slipstream's off:", ""]
    ratios = {way: paired_ratios(found[way], found[OFF]) for way in others}
    categories = sorted({row.task for row in found[OFF]})
    rows = [[each, *(_mean({each: ratios[way].get(each, [])}) for way in others)] for each in categories]
    lines += [*table(["", *others], rows), "", _versions(model)]
    if refused:
        lines += ["", refusals(refused)]
    return lines


def _row(model: dict[str, Any], way: str, rows: Seq[Sample], off: Seq[Sample]) -> tuple[object, ...]:
    ratio: Ratio | str | None = over_tasks(paired_ratios(rows, off)) if way != OFF else "1"
    mine = [row for row in model["samples"] if row["way"] == way and row["token_ids"]]
    steps = sum(row["num_steps"] or 0 for row in mine)
    tokens_a_pass = f"{sum(len(row['token_ids']) for row in mine) / steps:.2f}" if steps else ""
    firsts = [row["first_token_s"] for row in mine if row["first_token_s"] is not None]
    first = f"{1e3 * statistics.median(firsts):.0f} ms" if firsts else ""
    expected = {row.cell: row.token_ids for row in off}
    told = way.startswith("slipstream/") or any(any(row["token_ids"]) for row in mine)
    equal = sum(row.token_ids == expected.get(row.cell) for row in rows)
    texts = f"{equal} of {len(rows)}" if told else "not compared"
    speed = statistics.median(row.tokens_per_s for row in rows)
    return way, f"{speed:.1f}", ratio, tokens_a_pass, first, texts


def _mean(ratios: dict[str, list[float]]) -> str:
    ratio = over_tasks({task: values for task, values in ratios.items() if values})
    return "" if ratio is None else f"{ratio.value:.2f}"


def _versions(model: dict[str, Any]) -> str:
    versions: dict[str, str] = {}
    for about in model["about"].values():
        versions |= about.get("versions", {})
    settings = [
        f"{way}: {about['load'] | about['call']}; {', '.join(about['notes']) or 'no remarks'}"
        for way, about in model["about"].items()
        if "refused" not in about
    ]
    listed = ", ".join(f"{name} {version}" for name, version in versions.items())
    return "\n".join(
        [f"File: `{model['file']}`. Versions: {listed}. Settings:", "", *(f"- {s}" for s in settings)]
    )


def draw(result: dict[str, Any], file: Path) -> None:
    """Tokens a second of each way, the median and the quartiles over prompts; a panel a model."""
    models = result["models"]
    with drawing(file, 5.2 * len(models), 3.8) as figure:
        panels = figure.subplots(1, len(models), squeeze=False)
        for axes, (name, model) in zip(panels[0], models.items(), strict=True):
            found = samples(name, model)
            for place, (way, rows) in enumerate(found.items()):
                speeds = sorted(row.tokens_per_s for row in rows)
                median = statistics.median(speeds)
                low, high = speeds[len(speeds) // 4], speeds[(3 * len(speeds)) // 4]
                colour = "#1a7f37" if way.startswith("slipstream/") else "#8c959f"
                axes.barh(place, median, color=colour)
                axes.plot([low, high], [place, place], color="#24292f", linewidth=1)
            axes.set_yticks(range(len(found)), list(found), fontsize=8)
            axes.invert_yaxis()
            axes.set_title(TITLES.get(name, name).partition(" (")[0], fontsize=10)
            axes.set_xlabel("tokens a second, median and quartiles")
