"""Writes the page and the picture of results, from their JSON alone.

python -m benchmarks.peers.page                # docs/benchmarks/cpu_peers.json -> cpu.md and cpu_peers.svg beside it
                                               # and cpu_contexts.json, if it is there, in the same way
python -m benchmarks.peers.page RESULTS.json PAGE.md
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.harness.command import DOCS
from benchmarks.peers import contexts_picture, contexts_report
from benchmarks.peers.picture import MODEL, picture
from benchmarks.peers.report import page
from benchmarks.peers.results import Results, load
from slipstream.errors import SlipstreamError

PAGES = {"cpu_peers.json": "cpu.md", "cpu_contexts.json": "cpu_contexts.md"}
"""What lies in docs/benchmarks, and its page beside it."""


def write(results: Results, source: Path, target: Path) -> list[Path]:
    """Write the page `target` of the results in `source`, and the picture where its model was measured."""
    drawing = source.with_suffix(".svg")
    if results.settings.get("contexts"):
        drawn = contexts_picture.picture(results)
        target.write_text(
            contexts_report.page(results, source.name, drawing.name if drawn else None), encoding="utf-8"
        )
    else:
        measured = any(key.startswith(f"{MODEL}: ") for key in results.modes)
        drawn = picture(results) if measured else None
        target.write_text(page(results, source.name), encoding="utf-8")
    if drawn is None:
        return [target]
    drawing.write_text(drawn, encoding="utf-8")
    return [target, drawing]


def main(arguments: list[str]) -> int:
    pages = {DOCS / source: DOCS / name for source, name in PAGES.items() if (DOCS / source).is_file()}
    if arguments:
        source = Path(arguments[0])
        target = (
            Path(arguments[1]) if len(arguments) > 1 else source.with_name(PAGES.get(source.name, "cpu.md"))
        )
        pages = {source: target}
    try:
        written = [path for source, target in pages.items() for path in write(load(source), source, target)]
    except SlipstreamError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(*written, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
