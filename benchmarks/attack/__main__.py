"""Attack a server of this checkout, or of another one: python -m benchmarks.attack [--before FILE].

Each scenario starts a server of its own on 127.0.0.1, with the embedded pair. While it is attacked, one client after
another asks it for two tokens, and another for /health; the longest of these delays, the server's memory, its log lines
and the statuses are what is reported. Scenarios that are complete are kept when the run is stopped, and the same
command goes on from them.

    python -m benchmarks.attack --server-python-path OLD/src --output before.json
    python -m benchmarks.attack --before before.json
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.attack.run import Bounds, attack
from benchmarks.attack.scenarios import SCENARIOS
from benchmarks.attack.table import table
from benchmarks.harness.command import DOCS, ROOT, add_settings, command
from benchmarks.harness.kept import Kept

RESULT = DOCS / "attack.json"


def main() -> None:
    parser = command(__doc__, RESULT)
    parser.add_argument("--only", nargs="+", choices=list(SCENARIOS), help="scenarios; all unless given")
    add_settings(
        parser,
        Bounds(),
        scale="of the number of attacking requests",
        seconds="the longest an attack may last",
        memory_bytes="resident memory of the server and its children at which it is killed",
    )
    parser.add_argument(
        "--server-python-path",
        type=Path,
        default=ROOT / "src",
        help="the `src` folder of the checkout whose server is attacked",
    )
    parser.add_argument("--before", type=Path, help="an earlier result to set beside this one")
    options = parser.parse_args()
    if not (options.server_python_path / "slipstream").is_dir():
        parser.error(f"there is no package slipstream in {options.server_python_path}")
    earlier = _read(parser, options.before)
    about = {
        "server_commit": _commit(options.server_python_path),
        "scale": options.scale,
        "memory_bytes": options.memory_bytes,
    }
    kept = Kept(options.output, {**about, "seconds": options.seconds})
    bounds = Bounds(options.scale, options.seconds, options.memory_bytes)
    names = options.only or list(SCENARIOS)
    stopped = False
    try:
        left = [name for name in names if not kept.has(name)]
        for name, figures in attack(options.server_python_path, left, bounds):
            kept.put(name, figures)
    except KeyboardInterrupt:
        stopped = True
    scenarios = {name: kept.get(name) for name in names if kept.has(name)}
    print(table(scenarios, None if earlier is None else earlier["scenarios"]))
    if stopped:
        print(f"stopped; {len(scenarios)} scenarios are kept")
        sys.exit(130)
    kept.finish({**about, "scenarios": scenarios, **({} if earlier is None else {"before": earlier})})


def _read(parser: argparse.ArgumentParser, file: Path | None) -> dict[str, Any] | None:
    """An earlier result, without the one that it was itself set beside."""
    if file is None:
        return None
    try:
        earlier: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        earlier.pop("before", None)
        earlier["scenarios"].keys()
    except (OSError, ValueError, KeyError, AttributeError) as error:
        parser.error(f"--before {file}: not a result of this benchmark ({error})")
    return earlier


def _commit(source: Path) -> str | None:
    """Return the commit of the checkout that holds `source`, with `+changes` where its sources differ from it."""
    found = [
        subprocess.run(
            ["git", "-C", str(source), *arguments], capture_output=True, text=True, check=False
        ).stdout.strip()
        for arguments in (("rev-parse", "HEAD"), ("status", "--porcelain", "--", "."))
    ]
    return found[0] + ("+changes" if found[1] else "") if found[0] else None


if __name__ == "__main__":
    main()
