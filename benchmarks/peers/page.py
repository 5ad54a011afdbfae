"""Writes the page and the picture of the results, from the JSON alone.

python -m benchmarks.peers.page                # docs/benchmarks/cpu_peers.json -> cpu.md and cpu_peers.svg beside it
python -m benchmarks.peers.page RESULTS.json PAGE.md
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.peers.picture import MODEL, picture
from benchmarks.peers.report import page
from benchmarks.peers.results import Results, load
from slipstream.errors import SlipstreamError

ROOT = Path(__file__).parents[2]


def write(results: Results, source: Path, target: Path) -> list[Path]:
    """Write the page `target` of the results in `source`, and the picture where its model was measured."""
    target.write_text(page(results, source.name), encoding="utf-8")
    if not any(key.startswith(f"{MODEL}: ") for key in results.modes):
        return [target]
    drawing = source.with_suffix(".svg")
    drawing.write_text(picture(results), encoding="utf-8")
    return [target, drawing]


def main(arguments: list[str]) -> int:
    source = Path(arguments[0]) if arguments else ROOT / "docs/benchmarks/cpu_peers.json"
    target = Path(arguments[1]) if len(arguments) > 1 else source.with_name("cpu.md")
    try:
        written = write(load(source), source, target)
    except SlipstreamError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(*written, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
