"""Soak the server: python -m benchmarks.soak [--num-requests 10000].

A server process on the embedded pair with speculation on, and many clients at once: streams and whole answers, clients
that leave, bad bodies, stops, several answers, log-probabilities, seeds and temperatures, JSON schemas. Every answer
is compared with that of a lone engine with speculation off; what the server counts, with what came over the wire.
Exit code 1 unless every demand is met.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from benchmarks.harness.command import DOCS, command
from benchmarks.soak.run import Plan, soak
from slipstream.profiling.provenance import provenance

RESULT = DOCS / "soak.json"


def main() -> None:
    default = Plan()
    parser = command(__doc__, RESULT)
    parser.add_argument("--num-requests", type=int, default=default.num_requests)
    parser.add_argument("--num-clients", type=int, default=default.num_clients)
    parser.add_argument("--num-cases", type=int, default=default.num_cases, help="different requests")
    parser.add_argument("--max-tokens", type=int, default=default.max_tokens, help="of the longest answer")
    parser.add_argument("--seed", type=int, default=default.seed)
    parser.add_argument("--spec", help="the server's drafter in short; the embedded draft unless given")
    options = vars(parser.parse_args())
    output: Path = options.pop("output")
    result = {"provenance": provenance()} | soak(Plan(**options))
    output.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    for name, demand in result["checks"].items():
        print(f"{'met ' if demand['met'] else 'FAIL'} {name}")
    print(f"{result['num_requests']:,} requests in {result['wall_s']} s; written: {output.name}")
    sys.exit(0 if result["passed"] else 1)


if __name__ == "__main__":
    main()
