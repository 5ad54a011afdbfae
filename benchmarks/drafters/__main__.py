"""Every drafter on one target, by task: acceptance, speed, memory and training cost.

    python -m benchmarks.drafters --trained OUT --expanded FOLDER      # all of docs/benchmarks/drafters.md
    python -m benchmarks.drafters --prompts 2 --repeats 1 --no-page    # a quick look

`OUT` is what `python -m recipes.drafters` made; without it, what needs more than the embedded pair is left out.
`FOLDER` is a cost-expanded target (`python -m recipes.cost_expanded target`). Acceptance is counted on 7 tasks x 50
held-out prompts, greedy and at temperature 0.8, and needs no quiet machine; speed does, so it is a part of its own.
Each part that is measured replaces its part of docs/benchmarks/drafters.json, from which the page's tables and
pictures are drawn.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.drafters import acceptance, page, plots, speed
from benchmarks.drafters.lineup import UNTRAINED, trained, training_costs
from benchmarks.harness.command import DOCS, command, names
from benchmarks.harness.kept import Kept
from benchmarks.harness.page import write_between

RESULT = DOCS / "drafters.json"
PAGE = DOCS / "drafters.md"
PARTS = ("acceptance", "speed", "page")


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("--trained", type=Path, help="what the recipe made")
    parser.add_argument("--expanded", help="a cost-expanded target, timed beside the embedded one")
    parser.add_argument("--parts", type=names(PARTS), default=list(PARTS), help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--only", default="", help="with --no-page: drafters whose name contains this")
    parser.add_argument("--prompts", type=int, default=50, help="prompts a task, acceptance")
    parser.add_argument("--max-tokens", type=int, default=96, help="of an answer, acceptance")
    parser.add_argument("--jobs", type=int, default=1, help="drafters at once, acceptance")
    parser.add_argument("--timed-prompts", type=int, default=4, help="prompts a task, speed")
    parser.add_argument("--repeats", type=int, default=3, help="speed")
    parser.add_argument("--threads", type=int, default=2, help="speed")
    parser.add_argument("--no-page", action="store_true", help="leave result and page as they are; print")
    options = parser.parse_args()
    if options.only and not options.no_page:
        parser.error("--only is for a look with --no-page; the page is of one run of all")

    entries = UNTRAINED + ([] if options.trained is None else trained(options.trained))
    chosen = [entry for entry in entries if options.only in entry.name]
    results: dict[str, Any] = {"speed": [], "acceptance": {"rows": []}, "training": {}, "trained": {}}
    if RESULT.exists() and not options.no_page:
        results |= {key: value for key, value in json.loads(RESULT.read_text()).items() if key in results}
    asked = options.parts
    kept = Kept(RESULT, vars(options))
    kept.origin["command"] = _without_names(kept.origin["command"])
    if "acceptance" in asked:
        left = [entry for entry in chosen if not kept.has(entry.name)]
        found = acceptance.measure(left, options.prompts, options.max_tokens, options.jobs) if left else ()
        for entry, rows_of_it in zip(left, found, strict=True):
            kept.put(entry.name, rows_of_it)
        rows = [row for entry in chosen for row in kept.get(entry.name)]
        sizes = {"prompts_a_task": options.prompts, "max_tokens": options.max_tokens}
        results["acceptance"] = {"provenance": kept.origin, **sizes, "rows": rows}
        results["training"] = training_costs(options.trained)
        results["trained"] = {entry.name: entry.trained for entry in entries if entry.trained}
    if "speed" in asked:
        timed = [entry for entry in chosen if entry.timed]
        results["speed"] = kept.cell("speed", lambda: _speeds(timed, options, kept.origin))
    if options.no_page:
        print(page.measured(results))
        kept.partial.unlink(missing_ok=True)
        return
    kept.finish(results)
    if "page" in asked:
        write_between(PAGE, page.BEGIN, page.END, page.measured(results))
        plots.draw(results, RESULT.parent)


def _speeds(entries: list[Any], options: argparse.Namespace, origin: dict[str, Any]) -> list[dict[str, Any]]:
    engine = {"num_threads": options.threads, "kv_cache_bytes": 64 << 20}
    sizes = {"prompts_per_task": options.timed_prompts, "repeats": options.repeats, "max_tokens": 64}
    found = [speed.measure(entries, None, engine, **sizes)]
    if options.expanded is not None:
        engine["kv_cache_bytes"] = 160 << 20
        sizes["prompts_per_task"] = max(1, options.timed_prompts // 2)
        sizes["repeats"] = max(1, options.repeats - 1)
        with tempfile.TemporaryDirectory() as folder:
            larger = speed.expanded(entries, options.expanded, Path(folder))
            found.append(speed.measure(larger, options.expanded, engine, **sizes))
    return [{"provenance": origin, **one} for one in found]


def _without_names(command_line: str) -> str:
    """Without the folders' names on this machine, which tell a reader nothing."""
    words = command_line.split(" ")
    for flag, name in (("--trained", "OUT"), ("--expanded", "FOLDER")):
        if flag in words:
            words[words.index(flag) + 1] = name
    return " ".join(words)


if __name__ == "__main__":
    main()
