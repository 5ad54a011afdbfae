"""What is done with a model that was handed over: each step uses a verb as a user would, and returns what it said."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import psutil

from slipstream.assets import sample_prompts
from slipstream.assets.workload.prompts import Prompt
from slipstream.rpc.client import ServerAddress, ask, connect

SLIPSTREAM = [sys.executable, "-m", "slipstream.cli.main"]
LEARNED = 100
"""Observations that the drift test learns from before it can raise an alarm."""
USUAL = {"temperature": 0.0}
UNUSUAL = {"temperature": 1.6}
"""What the model was not made for: drafts that are mostly rejected."""


def verb(*words: str, codes: tuple[int, ...] = (0,)) -> dict[str, Any]:
    """What a verb prints as JSON; raises where it fails."""
    done = subprocess.run(
        [*SLIPSTREAM, *words, "--json"], capture_output=True, text=True, check=False, timeout=3600
    )
    if done.returncode not in codes:
        raise SystemExit(f"slipstream {' '.join(words)} exits with {done.returncode}: {done.stderr[-2000:]}")
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def dashboard(watch_url: str) -> dict[str, Any]:
    """The page's data."""
    said: dict[str, Any] = httpx2.get(f"{watch_url}/dashboard/data", timeout=10).json()
    return said


def bench(url: str, prompts_per_task: int) -> dict[str, Any]:
    """`slipstream bench --url`: its figures over all tasks, by concurrency."""
    words = ("--prompts-per-task", str(prompts_per_task), "--repeats", "1", "--max-tokens", "48")
    said = verb("bench", "--url", f"{url}/v1", *words, "--concurrency", "1,4")
    return {
        "complete": said["complete"],
        "figures": [figures for figures in said["figures"] if figures["task"] is None],
    }


def load(url: str, num_requests: int) -> dict[str, Any]:
    """`slipstream load`: its figures over all tasks."""
    words = ("--num-requests", str(num_requests), "--concurrency", "4", "--max-tokens", "48")
    said = verb("load", url, *words)
    return {
        "complete": said["complete"],
        "statuses": said["statuses"],
        "figures": [figures for figures in said["figures"] if figures["task"] is None],
    }


def audit(url: str, against: str, answers: int, folder: Path) -> dict[str, Any]:
    """`slipstream audit`: the certificate; 1 and 2 are decisions too."""
    words = ("--answers", str(answers), "--max-tokens", "48", "--output", str(folder))
    return verb("audit", url, "--against", against, *words, codes=(0, 1, 2))


def alarm(
    url: str, watch_url: str, model: str, say: Callable[[str], None], most: int = 400
) -> dict[str, Any]:
    """Usual traffic until the drift test has learned, then unusual traffic until it raises its alarm."""

    def drift() -> dict[str, Any]:
        [task] = dashboard(watch_url)["tasks"] or [{"drift": {"state": "learning", "num_learned": 0}}]
        found: dict[str, Any] = task["drift"]
        return found

    server = ServerAddress(f"{url}/v1", model, f"{url}/metrics")
    asked = {"usual": 0, "unusual": 0}

    async def traffic(kind: str, until: Callable[[], bool], sampling: dict[str, Any]) -> None:
        async with connect(server) as client:
            while asked[kind] < most and not await asyncio.to_thread(until):
                for row in sample_prompts()[asked[kind] : asked[kind] + 5] or sample_prompts()[:5]:
                    messages = [message for message in row["messages"] if message["role"] == "user"][:1]
                    prompt = Prompt(row["task"], "sample", 24, None, tuple(messages))
                    exchange = await ask(client, server, 0, prompt, False, {**sampling, "seed": asked[kind]})
                    if exchange.error is not None:
                        raise SystemExit(f"the server fails: {exchange.error}")
                    asked[kind] += 1

    asyncio.run(traffic("usual", lambda: drift()["state"] == "steady", USUAL))
    learned = drift()
    say(f"learned from {asked['usual']} requests: {learned}")
    raised_before = dashboard(watch_url)["alarms"]
    asyncio.run(traffic("unusual", lambda: drift()["state"] == "drifting", UNUSUAL))
    said = dashboard(watch_url)
    metrics = httpx2.get(f"{watch_url}/metrics", timeout=10).text
    series = [line for line in metrics.splitlines() if line.startswith("slipstream_alarm{")]
    return {
        "requests_at_temperature_0": asked["usual"],
        "learned": learned,
        "alarms_before": raised_before,
        "requests_at_temperature_1.6": asked["unusual"],
        "alarms": said["alarms"],
        "metrics": series,
    }


def unreachable(pid: int, watch_url: str) -> dict[str, Any]:
    """Hold the server's process until the alarm of a server that does not answer, then let it go on."""

    def raised() -> list[dict[str, Any]]:
        return [one for one in dashboard(watch_url)["alarms"] if one["kind"] == "server_unreachable"]

    server = psutil.Process(pid)
    started_s = time.monotonic()
    server.suspend()
    try:
        alarms = wait_for(lambda: raised() or None, 120) or []
    finally:
        server.resume()
    after_s = time.monotonic() - started_s
    cleared = wait_for(lambda: None if raised() else True, 120)
    return {"alarms": alarms, "after_s": after_s, "cleared": bool(cleared)}


def wait_for(look: Callable[[], Any], timeout_s: float) -> Any:
    """What `look` returns once it is not None; None after the time."""
    end_s = time.monotonic() + timeout_s
    while time.monotonic() < end_s:
        found = look()
        if found is not None:
            return found
        time.sleep(1.0)
    return None
