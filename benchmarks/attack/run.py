"""One scenario after the other, each against a server of its own."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.attack.bystander import SMALL, Bystander
from benchmarks.attack.scenarios import FORGED, SCENARIOS, Scenario
from benchmarks.attack.server import AttackedServer
from benchmarks.attack.target import Target
from benchmarks.harness.kept import say

_BASELINE_S = 2.0
_SETTLE_S = 3.0
"""Before and after an attack the well-behaved clients are alone."""
_LINE_ENDS = re.compile(r"\r\n|[\n\r\x0b\x0c\x1c-\x1e\u0085\u2028\u2029]")
"""What some reader of logs takes for the end of a line."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much is done at most."""

    scale: float = 1.0
    """Share of each attack's requests."""
    seconds: float = 180.0
    """The longest an attack may last."""
    memory_bytes: int = 6 * 2**30
    """Resident memory at which the server is killed."""


def attack(source: Path, names: Seq[str], bounds: Bounds) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and figures of each scenario, as they are complete; `source` holds the package that serves."""
    for number, name in enumerate(names, 1):
        say(f"{number}/{len(names)} {name}: {SCENARIOS[name].what}")
        figures = _one(source, SCENARIOS[name], bounds)
        told = {key: figures[key] for key in ("survived", "statuses")}
        delays = f"longest delay {figures['small_requests']['longest_s']} s"
        say(f"    {figures['attack_s']} s, {delays}, {told}")
        yield name, figures


def _one(source: Path, scenario: Scenario, bounds: Bounds) -> dict[str, Any]:
    limits = bounds.memory_bytes, scenario.max_descriptors
    with (
        TemporaryDirectory() as folder,
        AttackedServer(source, scenario.arguments, *limits, Path(folder) / "log") as server,
    ):
        asking = Bystander(server.port, "/v1/completions", SMALL, scenario.key)
        looking = Bystander(server.port, "/health", None)
        with asking, looking:
            time.sleep(_BASELINE_S)
            rss_bytes = server.rss_bytes
            began_s = time.monotonic()
            target = Target(server.port, bounds.scale, bounds.seconds)
            with suppress(OSError):  # a server that is gone is in the figures
                scenario.attack(target)
            attack_s = time.monotonic() - began_s
            time.sleep(_SETTLE_S)
        survived, exit_code = server.is_alive, server.process.poll()
        server.stop()
        log = server.log_text().strip()
    lines = _LINE_ENDS.split(log)
    return {
        "what": scenario.what,
        "attack_s": round(attack_s, 1),
        "statuses": dict(sorted(target.statuses.items())),
        "finish_reasons": dict(sorted(target.finish_reasons.items())),
        "small_requests": asking.figures(),
        "health": looking.figures(),
        "survived": survived,
        "exit_code": exit_code,
        "killed_for_memory": server.killed_for_memory,
        "rss_before_bytes": rss_bytes,
        "rss_peak_growth_bytes": max(0, server.peak_rss_bytes - rss_bytes),
        "rss_growth_bytes": server.rss_bytes - rss_bytes,
        "num_log_lines": len(lines),
        "num_warning_lines": sum(bool(re.search(r'"level": "warning"| WARNING ', line)) for line in lines),
        "num_forged_lines": count_forged(log),
        **target.extra,
    }


def count_forged(log_text: str) -> int:
    """Lines that begin as a client wrote them."""
    lines = _LINE_ENDS.split(log_text)
    return sum(line.removeprefix("\x1b[2K").startswith(FORGED) for line in lines)
