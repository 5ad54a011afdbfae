"""What the server costs: python -m benchmarks.overhead [--spec off,draft].

Closed loops of streamed chats, 8 at any time: over HTTP from a client in a process of its own, at `slipstream serve`
in another; and without a server, at an `AsyncEngine` in a third, whose texts are read as they grow. Same model,
questions, seeds and threads; the sides take turns, and which goes first alternates. The engine has `--threads` cores;
the server's event loop and the client share what is left, so on two cores some of the client's cost is in the
server's figure: `cpu_us_per_token` tells each process's own.

Exit code 1 where some text is not the same on both sides.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

from benchmarks.kept import Kept
from benchmarks.overhead.rounds import Plan, facts, measure
from slipstream.provenance import provenance

RESULT = Path(__file__).parents[2] / "docs/benchmarks/overhead.json"
BAR = 0.03


def main() -> None:
    default = Plan()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="the embedded pair's target unless given")
    parser.add_argument("--spec", default=",".join(default.specs), help="drafters in short, with commas")
    parser.add_argument("--streams", type=int, default=default.streams)
    parser.add_argument("--rounds", type=int, default=default.rounds)
    parser.add_argument("--requests", type=int, default=default.requests, help="of a round")
    parser.add_argument("--max-tokens", type=int, default=default.max_tokens)
    parser.add_argument("--temperature", type=float, default=default.temperature)
    parser.add_argument("--threads", type=int, default=default.threads, help="of each engine")
    parser.add_argument("--kv-cache-bytes", type=int, default=default.kv_cache_bytes)
    parser.add_argument("--output", type=Path, default=RESULT)
    options = vars(parser.parse_args())
    output: Path = options.pop("output")
    plan = Plan(specs=options.pop("spec").split(","), **options)
    origin = provenance()
    kept = Kept(output, {**facts(plan), "model": plan.model})
    cells = [kept.cell(spec, partial(measure, plan, spec)) for spec in plan.specs]
    for cell in cells:
        cell["met"] = cell["overhead"]["median"] <= BAR
        median, interval = cell["overhead"]["median"], cell["overhead"]["interval"]
        rates = cell["tokens_per_s"]
        print(
            f"{cell['spec']}: {100 * median:.1f} % of {rates['engine']} tokens/s "
            f"(together, 95 %: {interval}), CPU µs a token {cell['cpu_us_per_token']}"
        )
    result = {"provenance": origin, "plan": facts(plan), "bar": BAR, "results": cells}
    kept.finish(result)
    sys.exit(1 if any(cell["texts_that_differ"] for cell in cells) else 0)


if __name__ == "__main__":
    main()
