"""What a server that learns must hold while it serves.

    python -m benchmarks.learn_serving [PART ...] [--quick]

answers   10,000 answers while versions are promoted, rolled back, damaged and forgotten: each is the one without
          speculation, memory is flat, nothing of those who opted out is in any file, a tenant's version drafts for
          nobody else; how long a swap's steps take is noted too
kills     server and learner are killed at 100 random instants: nothing that was seen is lost, each restart serves
broken    promoted versions that break are rolled back within 200 requests, with an alarm
latency   p95 of requests at half load, in turns with a server that does not learn; at full load the learner rests

The embedded pair; the base drafter is its draft with noise, so that learning has something to gain. All parts but
`latency` and the steps of `answers` count and time nothing, so they may run beside others. A part that has ended is in
docs/benchmarks/learn_serving.json and on the page beside it; the same command at the same commit does not measure it
again. With --quick it is a tenth of the requests, in learn_serving_quick.json and without a page.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness.command import DOCS, command
from benchmarks.harness.kept import say, write_result
from benchmarks.learn_serving.answers import answers
from benchmarks.learn_serving.broken import broken
from benchmarks.learn_serving.kills import kills
from benchmarks.learn_serving.load import latency
from benchmarks.learn_serving.page import page
from slipstream.profiling.provenance import commit, provenance

RESULT = DOCS / "learn_serving.json"
PARTS = ("answers", "kills", "broken", "latency")


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], help="all unless given")
    parser.add_argument("--quick", action="store_true", help="a tenth of the requests")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=8, help="of latency")
    parser.add_argument("--window", type=float, default=12.0, help="seconds of a round's turn, of latency")
    options = parser.parse_args()
    part = 10 if options.quick else 1
    result = RESULT.with_name("learn_serving_quick.json") if options.quick else RESULT
    settings = {name: value for name, value in vars(options).items() if name != "parts"}
    measures: dict[str, Callable[[Path], dict[str, Any]]] = {
        "answers": partial(answers, number=10_000 // part),
        "kills": partial(kills, number=100 // part, seed=options.seed),
        "broken": partial(broken, tries=10 // min(part, 5)),
        "latency": partial(latency, rounds=options.rounds, window_s=options.window, seed=options.seed),
    }
    for name in options.parts or PARTS:
        before = _read(result).get(name)
        if before and before["settings"] == settings and before["provenance"]["commit"] == commit():
            say(f"{name}: kept")
            continue
        say(f"{name} …")
        measured = {"provenance": provenance(), "settings": settings, **_in_a_place(measures[name])}
        found = {**_read(result), name: measured}
        there = {one: found[one] for one in PARTS if one in found}
        write_result(result, there, None if options.quick else page)
    print(page(_read(result)))


def _read(result: Path) -> dict[str, Any]:
    """The parts that are there: another run may have written one meanwhile."""
    found: dict[str, Any] = json.loads(result.read_text()) if result.exists() else {}
    return found


def _in_a_place(measure: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="learn-serving-", ignore_cleanup_errors=True) as place:
        return measure(Path(place))


if __name__ == "__main__":
    main()
