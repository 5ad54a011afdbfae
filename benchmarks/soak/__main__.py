"""Soak the server: python -m benchmarks.soak [--num-requests 10000].

A server process on the embedded pair with speculation on, and many clients at once: streams and whole answers, clients
that leave, bad bodies, stops, several answers, log-probabilities, seeds and temperatures, JSON schemas. Every answer
is compared with that of a lone engine with speculation off; what the server counts, with what came over the wire.
Exit code 1 unless every demand is met.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.harness.command import DOCS, add_settings, command
from benchmarks.harness.kept import write_result
from benchmarks.soak.run import Plan, soak
from slipstream.profiling.provenance import provenance

RESULT = DOCS / "soak.json"


def main() -> None:
    parser = command(__doc__, RESULT)
    helps = {
        "num_requests": "",
        "num_clients": "",
        "num_cases": "different requests",
        "max_tokens": "of the longest answer",
        "seed": "",
        "spec": "the server's drafter in short; the embedded draft unless given",
    }
    add_settings(parser, Plan(), **helps)
    options = vars(parser.parse_args())
    output: Path = options.pop("output")
    result = {"provenance": provenance()} | soak(Plan(**options))
    write_result(output, result)
    for name, demand in result["checks"].items():
        print(f"{'met ' if demand['met'] else 'FAIL'} {name}")
    print(f"{result['num_requests']:,} requests in {result['wall_s']} s; written: {output.name}")
    sys.exit(0 if result["passed"] else 1)


if __name__ == "__main__":
    main()
