"""Drive clients against `slipstream serve`: python -m benchmarks.clients [NAME ...] --python NAME=INTERPRETER.

Each client needs an environment of its own, made by hand (`python -m venv`, `pip install`), whose interpreter is given
by `--python` or by the variable SLIPSTREAM_CLIENT_NAME. Without names all that have an interpreter are driven. Results
of the others are kept as they were. Exit code 1 unless all that was driven met its checks.
"""

from __future__ import annotations

import json
import sys

from benchmarks.clients.driving import clients, drive, interpreters, variable
from benchmarks.clients.server import serving
from benchmarks.harness.command import DOCS, command
from slipstream.profiling.provenance import provenance

RESULT = DOCS / "clients.json"


def main() -> None:
    parser = command(__doc__, RESULT)
    parser.add_argument("clients", nargs="*", metavar="NAME", help=", ".join(clients()))
    parser.add_argument("--python", action="append", default=[], metavar="NAME=INTERPRETER")
    options = parser.parse_args()
    given = dict(item.partition("=")[::2] for item in options.python)
    for name in [*options.clients, *given]:
        if name not in clients():
            parser.error(f"there is no client {name!r}; there are {', '.join(clients())}")
    pythons = interpreters(given)
    wanted = options.clients or list(pythons)
    for name in wanted:
        if name not in pythons:
            parser.error(f"{name} needs an interpreter: --python {name}=PATH, or {variable(name)}")
    if not wanted:
        parser.error("no client has an interpreter; give --python NAME=PATH")
    met = True
    for name in wanted:
        with serving() as server:
            report = drive(name, pythons[name], server)
        for check, told in report.get("checks", {}).items():
            print(f"{'met ' if told['met'] else 'FAIL'} {name}: {check}", flush=True)
        if "error" in report:
            print(f"FAIL {name}: {report['error']}", flush=True)
        met = met and report["met"]
        result = json.loads(options.output.read_text()) if options.output.exists() else {}
        result[name] = {"provenance": provenance(), **report}
        ordered = {name: result[name] for name in sorted(result)}
        options.output.write_text(json.dumps(ordered, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"written: {options.output.name}")
    sys.exit(0 if met else 1)


if __name__ == "__main__":
    main()
