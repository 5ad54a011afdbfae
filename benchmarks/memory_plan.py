"""Whether `slipstream plan` tells the truth: planned peaks beside measured ones, each of a process of its own.

    python -m benchmarks.memory_plan [--only NAME ...]

Every case loads an engine with exactly the batch and context that were planned, answers requests that fill both, then
as many short ones as the cache has room for, and reads the highest resident memory that the process ever had. The
weights' files are mapped while they are read, so their pages count. Then processes that only load a model: the most
that they ever held over what they hold afterwards, both beyond what they held before. The models are made for it: the
embedded target enlarged to 0.3 G, in float32 and in bfloat16, and to 1 G in bfloat16.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness.command import DOCS, ROOT, command
from benchmarks.harness.kept import Kept, write_result
from benchmarks.harness.models import expanded
from benchmarks.harness.processes import answer_of
from slipstream.assets import EMBEDDED_DRAFT, EMBEDDED_EAGLE3, EMBEDDED_TARGET
from slipstream.config import EngineConfig, SpeculativeConfig
from slipstream.plan.planner import Planner
from slipstream.plan.process import USUAL, ProcessMemory, process_memory
from slipstream.profiling.provenance import commit, provenance

RESULT = DOCS / "memory_plan.json"
LIMITS = (-0.02, 0.05)
"""A planned peak may be this much under and over the measured one."""

DRAFT = {"method": "draft_model", "model": EMBEDDED_DRAFT, "num_speculative_tokens": 4}
SUFFIX = {
    "method": "suffix",
    "suffix_decoding_max_cached_tokens": 100_000,
    "suffix_decoding_max_spec_offset": 16,
    "suffix_decoding_min_token_prob": 0.0,
}
"""Drafts as many tokens as it may, whatever the text."""
CASES: dict[str, dict[str, Any]] = {
    "embedded, off": {"model": "embedded", "batch": 1, "context": 128},
    "embedded, draft tree": {
        "model": "embedded",
        "batch": 4,
        "context": 1024,
        "spec": {**DRAFT, "tree_top_k": 3, "num_draft_nodes": 12},
    },
    "embedded, eagle3": {
        "model": "embedded",
        "batch": 32,
        "context": 256,
        "spec": {"method": "eagle3", "model": EMBEDDED_EAGLE3},
    },
    "embedded, suffix": {"model": "embedded", "batch": 8, "context": 512, "spec": SUFFIX},
    "0.3 G float32, off": {"model": "float32", "batch": 1, "context": 512},
    "0.3 G float32, draft": {"model": "float32", "batch": 2, "context": 512, "spec": DRAFT},
    "0.3 G int8, suffix": {
        "model": "float32",
        "quantization": "int8",
        "batch": 1,
        "context": 1024,
        "spec": SUFFIX,
    },
    "0.3 G int8, long batch": {"model": "float32", "quantization": "int8", "batch": 8, "context": 512},
    "0.3 G from bfloat16, self in int8": {
        "model": "bfloat16",
        "batch": 1,
        "context": 256,
        "spec": {"method": "self", "quantization": "int8"},
    },
    "0.3 G from bfloat16, PyTorch's kernels": {
        "model": "bfloat16",
        "batch": 2,
        "context": 128,
        "cpu_kernels": "torch",
    },
    "0.3 G from bfloat16, off": {"model": "bfloat16", "batch": 2, "context": 1024},
    "0.3 G int8, int8 cache": {
        "model": "bfloat16",
        "quantization": "int8",
        "kv_cache_dtype": "int8",
        "batch": 8,
        "context": 1024,
    },
    "0.3 G float32, float16 cache": {
        "model": "float32",
        "kv_cache_dtype": "float16",
        "batch": 4,
        "context": 1024,
    },
}
LOADS: dict[str, dict[str, Any]] = {
    "0.3 G, bfloat16 as stored": {"model": "bfloat16"},
    "0.3 G, bfloat16 to int8": {"model": "bfloat16", "quantization": "int8"},
    "0.3 G, bfloat16 to float32": {"model": "bfloat16", "dtype": "float32"},
    "0.3 G, float32 as stored": {"model": "float32"},
    "0.3 G, float32 to int8": {"model": "float32", "quantization": "int8"},
    "1 G, bfloat16 as stored": {"model": "1G bfloat16"},
    "1 G, bfloat16 to int8": {"model": "1G bfloat16", "quantization": "int8"},
}
"""Models to load, and nothing else."""
LOADING_LIMIT = 1.15
"""The most that loading may hold over what the model takes."""

LOADER = """
import json, sys
import psutil
from benchmarks.harness.models import expanded
from slipstream.assets import EMBEDDED_DRAFT
from slipstream.models import load_model

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) * 1024

path, options = json.loads(sys.argv[1])
load_model(EMBEDDED_DRAFT)  # what loading sets up
before = psutil.Process().memory_info().rss
with open("/proc/self/clear_refs", "w") as reset:
    reset.write("5")
model = load_model(path, **options)
after = psutil.Process().memory_info().rss
print(json.dumps({"weight_bytes": model.weight_bytes, "peak_bytes": peak() - before, "final_bytes": after - before}))
"""

WORKER = """
import json, random, resource, sys
from slipstream import LLM, SamplingParams

case = json.loads(sys.argv[1])
llm = LLM(case["model"], speculative_config=case["spec"], **case["engine"])
batch, context, answer = case["batch"], case["context"], case["answer"]
numbers = random.Random(0)
vocabulary = llm.engine.model.vocab_size

def run(how_many, length, answer):
    params = SamplingParams(temperature=0.8, max_tokens=answer, ignore_eos=True, seed=1)
    words = [numbers.randrange(5, vocabulary) for _ in range(200)]
    llm.generate([numbers.choices(words, k=length - answer) for _ in range(how_many)], params)

plan = llm.engine.memory_plan
run(batch, context, answer)
run(plan.num_slots // 64, 62, 6)  # all slots: a cache that has run for a while has no page that was never written
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
print(json.dumps({"peak_bytes": peak, "num_slots": plan.num_slots, "engine_plan": str(plan)}))
"""


def main() -> None:
    """Measure every case, write the result and its table."""
    parser = command(__doc__)
    parser.add_argument(
        "--only", nargs="*", choices=[*CASES, *LOADS], help="some of the cases; nothing is written"
    )
    parser.add_argument("--answer", type=int, default=24, help="tokens of each answer")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="where the 0.3 G models are kept for the next run")
    parser.add_argument(
        "--replan", action="store_true", help="plan again what was measured before, and write the result anew"
    )
    options = parser.parse_args()
    settings = {"answer": options.answer, "threads": options.threads}
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        if options.replan:
            found = json.loads(RESULT.read_text(encoding="utf-8"))
        elif options.only:
            rows = [measured(name, folder, settings) for name in options.only if name in CASES]
            loads = [loaded(name, folder) for name in options.only if name in LOADS]
            found = _of(rows, loads, settings)
        else:
            kept = Kept(RESULT, {**settings, "cases": CASES, "loads": LOADS})
            rows = [kept.cell(name, partial(measured, name, folder, settings)) for name in CASES]
            loads = [kept.cell(f"load {name}", partial(loaded, name, folder)) for name in LOADS]
            found = _of(rows, loads, settings)
        process = ProcessMemory(**found["process"])
        found["planned_at"] = commit()
        found["cases"] = [
            {**row, **planned(row, folder, found["settings"], process)} for row in found["cases"]
        ]
    for row in found["cases"]:
        print(_line(row))
    for row in found["loads"]:
        sizes = [f"{row[key] / 2**20:,.0f} MiB" for key in ("weight_bytes", "final_bytes", "peak_bytes")]
        print(f"{row['name']}: weights {sizes[0]}, held {sizes[1]}, at most {sizes[2]}, {row['ratio']:.3f}")
    if options.only:
        return
    if options.replan:
        write_result(RESULT, found, page)
    else:
        kept.finish(found, page)


def _of(
    rows: list[dict[str, Any]], loads: list[dict[str, Any]], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """A result without plans."""
    return {
        "provenance": provenance(num_threads=settings["threads"]),
        "settings": settings,
        "limits": LIMITS,
        "process": asdict(process_memory()),
        "cases": rows,
        "loads": loads,
    }


def planner_of(name: str, folder: Path, settings: Mapping[str, Any], process: ProcessMemory) -> Planner:
    """Plans for the model and the drafter of a case."""
    case = CASES[name]
    engine = {key: case[key] for key in ("quantization", "cpu_kernels", "kv_cache_dtype") if key in case}
    config = EngineConfig(_model(case["model"], folder), num_threads=settings["threads"], **engine)
    return Planner(config, SpeculativeConfig.from_mapping(_spec(name)), process)


def planned(
    row: Mapping[str, Any], folder: Path, settings: Mapping[str, Any], process: ProcessMemory
) -> dict[str, Any]:
    """What is planned for a case, beside what was measured."""
    plan = planner_of(row["name"], folder, settings, process).at(row["batch"], row["context"])
    return {
        "planned_bytes": plan.peak_bytes,
        "planned_running_bytes": plan.running_bytes,
        "planned_loading_bytes": plan.loading_bytes,
        "error": plan.peak_bytes / row["measured_bytes"] - 1,
        "slots_as_planned": row["num_slots"] == plan.num_slots,
        "parts": {part.name: part.num_bytes for part in plan.parts if part.num_bytes},
        "stages": {stage.name: stage.num_bytes for stage in plan.stages},
    }


def measured(name: str, folder: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What a process of its own comes to hold in one case."""
    case = CASES[name]
    planner = planner_of(name, folder, settings, USUAL)
    plan = planner.at(case["batch"], case["context"])
    engine = {
        "quantization": planner.config.quantization,
        "cpu_kernels": planner.config.cpu_kernels,
        "kv_cache_dtype": planner.config.kv_cache_dtype,
        "num_threads": planner.config.num_threads,
        "max_num_seqs": plan.batch,
        "max_model_len": plan.context,
        "kv_cache_bytes": plan.kv_cache_bytes,
    }
    size = {"batch": plan.batch, "context": plan.context}
    work = {"model": planner.config.model, "spec": _spec(name), "engine": engine, **size, **settings}
    ran = _run(name, WORKER, work)
    return {
        "name": name,
        "spec": _spec(name)["method"],
        "weights": planner.target.weight_format.name,
        "cache": str(planner.target.cache_dtype).removeprefix("torch."),
        **size,
        "measured_bytes": ran["peak_bytes"],
        "num_slots": ran["num_slots"],
    }


def loaded(name: str, folder: Path) -> dict[str, Any]:
    """What a process holds that loads a model, beyond what it held before: at most, and afterwards."""
    options = dict(LOADS[name])
    ran = _run(name, LOADER, (_model(options.pop("model"), folder), options))
    return {"name": name, **ran, "ratio": ran["peak_bytes"] / ran["final_bytes"]}


def _run(name: str, program: str, work: object) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    return answer_of([sys.executable, "-c", program, json.dumps(work)], environment=environment)


def _spec(name: str) -> dict[str, Any]:
    return CASES[name].get("spec") or {"method": "off"}


def page(found: Mapping[str, Any]) -> str:
    """The table of the documentation."""
    origin = found["provenance"]
    low, high = found["limits"]
    within = sum(low <= row["error"] <= high for row in found["cases"])
    lines = [
        "# Planned and measured memory",
        "",
        "Written by `python -m benchmarks.memory_plan`; do not edit.",
        "",
        "`slipstream plan` before anything is loaded, and the peak resident memory of a process of its own that loads",
        "the engine and answers requests which fill batch and context. A peak is that of running or that of loading,",
        f"whichever is larger. {within} of {len(found['cases'])} plans are between {100 * -low:.0f} % under and",
        f"{100 * high:.0f} % over the measured peak.",
        "",
        "| case | weights | cache | drafter | requests | context | planned, MiB | measured, MiB | over | peak of |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in found["cases"]:
        loading = row["planned_loading_bytes"] > row["planned_running_bytes"]
        types = f"{row['weights']} | {row['cache']}"
        lines.append(
            f"| {row['name']} | {types} | {row['spec']} | {row['batch']} | {row['context']} | "
            f"{row['planned_bytes'] / 2**20:,.0f} | {row['measured_bytes'] / 2**20:,.0f} | {row['error']:+.1%} | "
            f"{'loading' if loading else 'running'} |"
        )
    few = sum(row["ratio"] <= LOADING_LIMIT for row in found["loads"])
    lines += [
        "",
        "While a model is loaded: the most that its process ever held over what it holds afterwards, both beyond",
        f"what it held before. {few} of {len(found['loads'])} are at most {LOADING_LIMIT}.",
        "",
        "| loaded | weights, MiB | held, MiB | at most, MiB | at most over held |",
        "|---|---|---|---|---|",
    ]
    for row in found["loads"]:
        sizes = [f"{row[key] / 2**20:,.0f}" for key in ("weight_bytes", "final_bytes", "peak_bytes")]
        lines.append(f"| {row['name']} | {' | '.join(sizes)} | {row['ratio']:.2f} |")
    lines += [
        "",
        f"Measured {origin['date']} on {origin['cpu']}, {found['settings']['threads']} threads, commit "
        f"{str(origin['commit'])[:7]}, planned at {str(found['planned_at'])[:7]},",
        f"PyTorch {origin['versions']['torch']}, Transformers {origin['versions']['transformers']}. The process itself "
        f"took {found['process']['running_bytes'] / 2**20:,.0f} MiB, as `slipstream plan` measures it",
        "once on a machine. [Samples](memory_plan.json).",
        "",
    ]
    return "\n".join(lines)


def _line(row: Mapping[str, Any]) -> str:
    mebibytes = {key: value / 2**20 for key, value in row.items() if key.endswith("_bytes")}
    parts = ", ".join(f"{part} {size / 2**20:.0f}" for part, size in row["parts"].items())
    return (
        f"{row['name']}: planned {mebibytes['planned_bytes']:,.1f} MiB "
        f"(running {mebibytes['planned_running_bytes']:,.1f}, loading {mebibytes['planned_loading_bytes']:,.1f}), "
        f"measured {mebibytes['measured_bytes']:,.1f}, "
        f"{row['error']:+.2%}{'' if row['slots_as_planned'] else ', OTHER NUMBER OF SLOTS'} [{parts}]"
    )


def _model(name: str, folder: Path) -> str:
    if name == "embedded":
        return EMBEDDED_TARGET
    size, dtype = name.split() if " " in name else ("0.3G", name)
    return expanded(folder / f"{size}-{dtype}", {"0.3G": "300M"}.get(size, size), dtype=dtype)


if __name__ == "__main__":
    main()
