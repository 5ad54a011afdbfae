"""How long it takes from the start of a process to the first token, and where the time goes.

    python -m benchmarks.start [--repeats 7] [--models embedded,smollm2,gemma3,1g] [--xllamacpp-python PYTHON]

Every start is a process of its own. A first start has an empty folder for what Slipstream keeps between starts
(compiled kernels among it); a second start has what the first left. Files of models are in the system's cache in both.
`PYTHON` is that of an environment with `xllamacpp`; then llama.cpp starts on the same GGUF files in between. The
checkpoint of 1 GiB is the embedded target, enlarged in bfloat16 in a temporary folder. Finished starts are kept when
the run is stopped, and the same command goes on from them. Writes docs/benchmarks/start.json and start.md.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness.command import DOCS, command, names
from benchmarks.harness.kept import Kept, say
from benchmarks.harness.models import expanded
from benchmarks.harness.page import machine, table
from benchmarks.harness.processes import answer_of
from recipes.real_models import GEMMA3, SMOLLM2, fetch
from slipstream.assets import EMBEDDED_TARGET
from slipstream.errors import ModelError

MODELS = {
    "embedded": "the embedded target, float16",
    "smollm2": "SmolLM2-135M-Instruct, Q4_1, GGUF",
    "gemma3": "Gemma 3 270M, Q4_K_M, GGUF",
    "1g": "a Llama of 1 GiB, bfloat16",
}
LARGE_PARAMETERS = 2**29
PHASES = ("interpreter", "import", "read", "check", "pack", "load_other", "first_token")
HEAD = (
    *("model", "engine", "start", "whole (least to greatest)"),
    *("interpreter", "import", "read", "check", "pack", "load", "first token"),
)

SLIPSTREAM = """
import functools, json, os, sys, time
stamps = {"interpreter": time.monotonic()}
from slipstream import LLM, SamplingParams
from slipstream.models import loading
from slipstream.models.executor.cpu_kernels import CpuKernels
from slipstream.models.executor.eager import EagerExecutor
from slipstream.models.canary import StockPass
from slipstream.models.verdicts import LoadVerdict
stamps["import"] = time.monotonic()
spent = {"read": 0.0, "check": 0.0, "pack": 0.0}
running = []
def timed(phase, owner, name):
    function = getattr(owner, name, None)
    if function is None:  # renamed since: its time is then part of what is not told apart
        return
    @functools.wraps(function)
    def call(*args, **kwargs):
        running.append([phase, 0.0])
        began = time.monotonic()
        try:
            return function(*args, **kwargs)
        finally:
            whole = time.monotonic() - began
            spent[phase] += whole - running.pop()[1]
            if running:
                running[-1][1] += whole
    setattr(owner, name, call)
timed("read", loading, "load_weights")
for name in ("probe_layers", "check_masks", "check_cache", "_verdict"):
    timed("check", loading, name)
for owner, names in ((StockPass, ("run", "check_packed")), (LoadVerdict, ("is_kept", "keep"))):
    for name in names:
        timed("check", owner, name)
for executor in (CpuKernels, EagerExecutor):
    timed("pack", executor, "__init__")
llm = LLM(sys.argv[1], speculative_config={"method": "off"}, max_num_seqs=1, max_model_len=512)
stamps["loaded"] = time.monotonic()
[output] = llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
stamps["first_token"] = time.monotonic()
print(json.dumps({"stamps": stamps, "spent": spent, "modules": len(sys.modules)}), flush=True)
os._exit(0)
"""
LLAMA_CPP = """
import json, os, sys, time
stamps = {"interpreter": time.monotonic()}
import xllamacpp
stamps["import"] = time.monotonic()
params = xllamacpp.CommonParams()
params.model.path = sys.argv[1]
params.n_ctx, params.n_parallel, params.n_gpu_layers = 512, 1, 0
server = xllamacpp.Server(params)
stamps["loaded"] = time.monotonic()
body = {"prompt": "The capital of France is", "max_tokens": 1, "temperature": 0, "ignore_eos": True}
assert server.handle_completions(body)["usage"]["completion_tokens"] == 1
stamps["first_token"] = time.monotonic()
print(json.dumps({"stamps": stamps, "spent": {}, "modules": len(sys.modules)}), flush=True)
os._exit(0)
"""


def main() -> None:
    options = parse()
    settings = {
        "repeats": options.repeats,
        "models": options.models,
        "peer": options.xllamacpp_python is not None,
    }
    kept = Kept(options.output, settings)
    with tempfile.TemporaryDirectory() as scratch:
        places = {name: place_of(name, Path(scratch)) for name in options.models}
        cells = []
        for cell in plan(options):
            measure = partial(start, cell, places, options, Path(scratch))
            cells.append({**cell, **kept.cell(cell_name(cell), measure)})
    kept.finish({"settings": settings, "starts": cells, "summary": summary(cells)}, page)


def parse() -> argparse.Namespace:
    parser = command(__doc__, DOCS / "start.json")
    parser.add_argument("--repeats", type=int, default=7, help="second starts of each model; 2 first ones")
    parser.add_argument("--models", type=names(MODELS), default=list(MODELS), help=", ".join(MODELS))
    parser.add_argument("--xllamacpp-python", help="Python of an environment with xllamacpp")
    return parser.parse_args()


def place_of(name: str, scratch: Path) -> str:
    """The path of a model; makes or fetches it."""
    if name == "embedded":
        return str(EMBEDDED_TARGET)
    if name == "1g":
        say("writing the checkpoint of 1 GiB …")
        return expanded(scratch / "large", LARGE_PARAMETERS, dtype="bfloat16")
    try:
        return str(fetch(SMOLLM2 if name == "smollm2" else GEMMA3))
    except ModelError as error:
        raise SystemExit(f"{error}; leave {name} out of --models") from None


def plan(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The starts in the order in which they are made: engines and models interleaved, first starts in front."""
    for number in range(min(2, options.repeats)):
        for name in options.models:
            yield {"model": name, "engine": "slipstream", "kind": "first", "number": number}
    for number in range(options.repeats):
        for name in options.models:
            yield {"model": name, "engine": "slipstream", "kind": "second", "number": number}
            if options.xllamacpp_python is not None and name in ("smollm2", "gemma3"):
                yield {"model": name, "engine": "llama.cpp", "kind": "second", "number": number}


def cell_name(cell: dict[str, Any]) -> str:
    return f"{cell['model']}, {cell['engine']}, {cell['kind']} start {cell['number'] + 1}"


def start(
    cell: dict[str, Any], places: dict[str, str], options: argparse.Namespace, scratch: Path
) -> dict[str, Any]:
    """One process from its start to its first token: seconds by phase."""
    of_peer = cell["engine"] == "llama.cpp"
    python, program = (options.xllamacpp_python, LLAMA_CPP) if of_peer else (sys.executable, SLIPSTREAM)
    kept_between = scratch / f"{cell['model']}-cache"
    is_first = cell["kind"] == "first"
    if is_first and kept_between.exists():
        kept_between = Path(tempfile.mkdtemp(dir=scratch))
    if (
        not is_first and not of_peer and not kept_between.exists()
    ):  # the run goes on from one that was stopped
        start({**cell, "kind": "first"}, places, options, scratch)
    environment = {**os.environ, "SLIPSTREAM_CACHE": str(kept_between)}
    began_s = time.monotonic()
    try:
        told = answer_of([python, "-c", program, places[cell["model"]]], environment=environment)
    except RuntimeError as error:
        return {"failed": str(error).splitlines()[-1]}
    return {"phases": phases(began_s, told), "modules": told["modules"]}


def phases(began_s: float, told: dict[str, Any]) -> dict[str, float]:
    """Seconds of each phase, which add up to the whole. `time.monotonic` is the same clock in all processes."""
    stamps, spent = told["stamps"], told["spent"]
    load_s = stamps["loaded"] - stamps["import"]
    found = {
        "interpreter": stamps["interpreter"] - began_s,
        "import": stamps["import"] - stamps["interpreter"],
        **spent,
        "load_other": load_s - sum(spent.values()),
        "first_token": stamps["first_token"] - stamps["loaded"],
    }
    return {**found, "whole": stamps["first_token"] - began_s}


def summary(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return median, least and greatest whole, and each phase's median, by model, engine and kind of start."""
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for cell in cells:
        groups.setdefault((cell["model"], cell["engine"], cell["kind"]), []).append(cell)
    rows = []
    for (model, engine, kind), group in groups.items():
        ended = [cell["phases"] for cell in group if "phases" in cell]
        row: dict[str, Any] = {"model": model, "engine": engine, "kind": kind, "starts": len(ended)}
        if failed := [cell["failed"] for cell in group if "failed" in cell]:
            row["failed"] = failed[0]
        if ended:
            wholes = [each["whole"] for each in ended]
            row |= {"median_s": statistics.median(wholes), "least_s": min(wholes), "greatest_s": max(wholes)}
            row["phases"] = {
                name: statistics.median(each[name] for each in ended) for name in PHASES if name in ended[0]
            }
        rows.append(row)
    return rows


def _row(row: dict[str, Any]) -> list[str]:
    named = [MODELS[row["model"]], row["engine"], row["kind"]]
    if "phases" not in row:
        return [*named, f"failed: {row['failed']}", *("" for _ in PHASES)]
    whole = f"{row['median_s']:.2f} ({row['least_s']:.2f} to {row['greatest_s']:.2f})"
    return [
        *named,
        whole,
        *(f"{row['phases'][name]:.2f}" if name in row["phases"] else "–" for name in PHASES),
    ]


def page(result: dict[str, Any]) -> str:
    """The Markdown page of a result."""
    origin = result["provenance"]
    lines = [
        "# From the start of a process to the first token",
        "",
        "Each row is the median of several processes; seconds. *Load* is what reading, checking and packing leave of",
        "the load. A first start has nothing that Slipstream keeps between starts, a second one has it; the model's",
        "file is in the system's cache in both. llama.cpp reads the same GGUF files, by `xllamacpp`.",
        "",
        *table(HEAD, map(_row, result["summary"])),
        "",
        f"{machine(origin)}, Python {origin['python']}, torch {origin['versions']['torch']}, "
        f"transformers {origin['versions']['transformers']}. Written by",
        "`python -m benchmarks.start`; every start is in [start.json](start.json).",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
