"""What the server costs: python -m benchmarks.overhead [--spec off,draft] [--expand 300M --quantization int8].

Closed loops of streamed chats, 8 at any time: over HTTP from a client in a process of its own, at `slipstream serve`
of one process and of two; and without a server, at an `AsyncEngine` in a process, whose texts are read as they grow.
Same model, questions, seeds and threads; the sides take turns, and which goes first alternates. The engine has
`--threads` cores; the server's event loop and the client share what is left, so on two cores some of the client's cost
is in the server's figure: `cpu_us_per_token` tells each process's own. `--expand` enlarges the embedded target to so
many parameters at the same text, so that a step takes what a larger model's takes.

Exit code 1 where some text is not the same on both sides.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.harness.command import DOCS, add_settings, command, numbers
from benchmarks.harness.kept import Kept
from benchmarks.harness.models import expanded
from benchmarks.overhead.rounds import Plan, describe_plan, measure

RESULT = DOCS / "overhead.json"
BARS = {"the embedded pair's target": 0.05}
BAR = 0.03
"""For a model whose steps take some 10 ms."""


def main() -> None:
    default = Plan()
    parser = command(__doc__, RESULT)
    parser.add_argument("--model", help="the embedded pair's target unless given")
    parser.add_argument("--spec", default=",".join(default.specs), help="drafters in short, with commas")
    own = ("streams", "rounds", "max_tokens", "temperature", "kv_cache_bytes")
    add_settings(parser, default, requests="of a round", threads="of each engine", **dict.fromkeys(own, ""))
    parser.add_argument("--processes", type=numbers, default=[1, 2], help="of the servers, with commas")
    parser.add_argument("--expand", help="parameters of the enlarged target, as in 300M")
    parser.add_argument("--quantization", help="of the target")
    options = vars(parser.parse_args())
    output: Path = options.pop("output")
    size, processes = options.pop("expand"), tuple(options.pop("processes"))
    with TemporaryDirectory() as folder:
        if size is not None:
            options["model"] = expanded(Path(folder) / size, size)
            options["name"] = f"the embedded pair's target at the cost of {size} parameters"
        specs = options.pop("spec").split(",")
        run(Plan(specs=specs, processes=processes, **options), output)


def run(plan: Plan, output: Path) -> None:
    """Measure what the plan says and keep it in `output`."""
    kept = Kept(output, describe_plan(plan))
    cells = [kept.cell(spec, partial(measure, plan, spec)) for spec in plan.specs]
    bar = BARS.get(describe_plan(plan)["model"], BAR)
    servers = [(cell["spec"], server) for cell in cells for server in cell["servers"]]
    for spec, server in servers:
        server["met"] = server["overhead"]["median"] <= bar
        median, interval = server["overhead"]["median"], server["overhead"]["interval"]
        print(
            f"{spec}, processes {server['processes']}: {100 * median:.1f} % of {server['tokens_per_s']['engine']} "
            f"tokens/s (together, 95 %: {interval}), CPU µs a token {server['cpu_us_per_token']}, "
            f"gaps in ms {server['gap_ms']}"
        )
    kept.finish({"plan": describe_plan(plan), "bar": bar, "results": cells})
    sys.exit(1 if any(server["texts_that_differ"] for _, server in servers) else 0)


if __name__ == "__main__":
    main()
