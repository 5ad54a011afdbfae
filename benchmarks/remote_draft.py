"""The same draft in the engine's process and in a worker beside it, the machine's cores split between the two.

    python -m benchmarks.remote_draft TARGET DRAFT [--prompts 7] [--max-tokens 48] [--depths 1,2,3,4]

TARGET and DRAFT are a cost-expanded pair (docs/guides/cost-expanded-models.md). One request at a time, greedy. In the
process both use all cores, in turn. With a worker the target has one half of the cores and the draft the other, and
the next tail is drafted while the target verifies. Every mode takes its turn prompt by prompt, in an order drawn for
each. *c* is a draft pass over a target pass, each of one row with all cores.

    python -m benchmarks.remote_draft --emulate 0.2,0.4,0.6 [--pass-ms 60]

The embedded pair, whose passes are filled up with waiting: a target pass to 60 ms, a draft pass to c of that. Waiting
takes no core, so this is what overlap gains where the draft has hardware of its own. Both write
docs/benchmarks/remote_draft.json and the page beside it, each its own part.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.kept import Kept, say
from benchmarks.peers.markdown import wrapped
from benchmarks.quantization import names
from benchmarks.self_draft import pass_s
from slipstream import LLM, SamplingParams
from slipstream.assets import EMBEDDED_DRAFT, EMBEDDED_TARGET, sample_prompts
from slipstream.core.types import StepItem
from slipstream.models import load_model
from slipstream.models.cpu import threads
from slipstream.models.cpu.native import instructions
from slipstream.profiling.provenance import provenance
from slipstream.text.prompts import encode_chat
from slipstream.tools.bench.statistics import PairedTimes, geometric_mean_speedup, speedup_interval

RESULT = Path(__file__).parent.parent / "docs/benchmarks/remote_draft.json"
DRAFTS = {
    "self in int8": {"method": "self", "quantization": "int8"},
    "self in int4": {"method": "self", "quantization": "int4"},
    "draft model in float32": {"method": "draft_model", "dtype": "float32"},
    "draft model in bfloat16": {"method": "draft_model", "dtype": "bfloat16"},
}
WAITS: dict[str, dict[str, Any]] = {
    "never waits": {},
    "waits for one token": {"max_wait_ms": 200, "wait_tokens": 1},
    "waits for the tail": {"max_wait_ms": 200},
}
DEPTH = 4
PACED = "benchmarks.paced:PacedDrafter"
WORKER_TIMEOUT_S = 120


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", nargs="?")
    parser.add_argument("draft", nargs="?")
    parser.add_argument("--emulate", type=_numbers, help="draft costs over a target pass, such as 0.2,0.4")
    parser.add_argument("--pass-ms", type=float, default=60.0)
    parser.add_argument("--prompts", type=int, default=7)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--depths", type=_depths, default=[1, 2, 3, 4])
    parser.add_argument("--drafts", type=names(tuple(DRAFTS)), default=list(DRAFTS))
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    if options.emulate is None and (options.draft is None or len(cores) < 2):
        sys.exit("error: name TARGET and DRAFT, on two cores or more, or give --emulate")
    named = {key: getattr(options, key) and Path(getattr(options, key)).name for key in ("target", "draft")}
    kept = Kept(RESULT, {**vars(options), **named})
    result = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    part: dict[str, Any] = {
        "provenance": {**provenance(), "instructions": instructions()},
        "settings": {"prompts": options.prompts, "max_tokens": options.max_tokens, "num_cores": len(cores)},
    }
    if options.emulate is None:
        part["drafts"] = {
            name: kept.cell(name, partial(measure, name, options, cores)) for name in options.drafts
        }
        result["measured"] = part
    else:
        part["settings"]["pass_ms"] = options.pass_ms
        part["drafts"] = {
            f"a draft at {c:g} of a target pass": kept.cell(
                f"emulated {c:g}", partial(emulate, c, options, cores)
            )
            for c in options.emulate
        }
        result["emulated"] = part
    kept.finish(result)
    text = page(result)
    RESULT.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)


def _numbers(text: str) -> list[float]:
    return [float(each) for each in text.split(",")]


def _depths(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def emulate(c: float, options: argparse.Namespace, cores: list[int]) -> dict[str, Any]:
    """The embedded pair with passes that take as long as they should."""
    pass_s = options.pass_ms / 1000
    draft = {"method": PACED, "model": EMBEDDED_DRAFT, "pass_s": c * pass_s}
    engine: dict[str, Any] = {
        "max_num_seqs": 1,
        "max_model_len": 1024,
        "enable_prefix_caching": False,
        "num_threads": 1,
    }
    with worker(EMBEDDED_TARGET, draft, 1, cores) as address:
        sides = {
            "off": None,
            "in process": {**draft, "num_speculative_tokens": DEPTH},
            **{
                wait: {"method": "remote", "workers": address, "num_speculative_tokens": DEPTH, **keys}
                for wait, keys in WAITS.items()
            },
        }
        made = {name: _paced(LLM(speculative_config=spec, **engine), pass_s) for name, spec in sides.items()}
        modes = {"off": (made["off"], 0, False)}
        for depth in options.depths:
            modes[f"in process, {depth}"] = made["in process"], depth, False
            modes |= {f"worker, {depth}, {wait}": (made[wait], depth, False) for wait in WAITS}
        return {"c": c, "modes": take_turns(modes, options, cores, len(cores))}


def _paced(llm: LLM, pass_s: float) -> LLM:
    """The same engine, each of whose target passes takes `pass_s` at least, whatever its rows."""
    forward = llm.engine.runner.forward

    def slow(items: Seq[StepItem]) -> None:
        started_s = time.perf_counter()
        forward(items)
        time.sleep(max(pass_s - (time.perf_counter() - started_s), 0.0))

    llm.engine.runner.forward = slow  # type: ignore[method-assign]
    return llm


def measure(name: str, options: argparse.Namespace, cores: list[int]) -> dict[str, Any]:
    """Seconds of every mode and prompt, and what became of the drafts."""
    draft = dict(DRAFTS[name])
    if draft["method"] == "draft_model":
        draft["model"] = options.draft
    half = len(cores) // 2
    engine = {
        "max_num_seqs": 1,
        "max_model_len": 1024,
        "enable_prefix_caching": False,
        "kv_cache_bytes": 2**28,
    }
    whole: dict[str, Any] = {**engine, "num_threads": len(cores)}
    part: dict[str, Any] = {**engine, "num_threads": half}
    with worker(options.target, draft, half, cores[half:]) as address:
        off = LLM(options.target, **whole)
        here = LLM(options.target, speculative_config={**draft, "num_speculative_tokens": DEPTH}, **whole)
        off_part = LLM(options.target, **part)
        remote = {"method": "remote", "workers": address, "num_speculative_tokens": DEPTH}
        there = {
            wait: LLM(options.target, speculative_config={**remote, **keys}, **part)
            for wait, keys in WAITS.items()
        }
        modes: dict[str, tuple[LLM, int, bool]] = {
            "off": (off, 0, False),
            "off, half the cores": (off_part, 0, True),
        }
        for depth in options.depths:
            modes[f"in process, {depth}"] = here, depth, False
            modes |= {f"worker, {depth}, {wait}": (llm, depth, True) for wait, llm in there.items()}
        measured = take_turns(modes, options, cores, half)
        c = draft_cost(draft, options, len(cores))
    return {"c": c, "modes": measured}


def take_turns(
    modes: dict[str, tuple[LLM, int, bool]], options: argparse.Namespace, cores: list[int], half: int
) -> dict[str, Any]:
    """Mode to its seconds by task, texts that equal those without speculation, and counts."""
    params = SamplingParams(temperature=0, max_tokens=options.max_tokens, ignore_eos=True)
    found: dict[str, Any] = {
        mode: {"seconds": {}, "identical": 0, "num_steps": 0, "num_draft_tokens": 0, "num_accepted": 0}
        for mode in modes
    }
    rng = random.Random(0)
    tasks: dict[str, list[Any]] = {}
    for sample in sample_prompts():
        tasks.setdefault(sample["task"], []).append(sample)
    samples = [found_ for turn in zip(*tasks.values(), strict=False) for found_ in turn][: options.prompts]
    for number, sample in enumerate(samples):
        prompt = encode_chat(modes["off"][0].engine.tokenizer, sample["messages"])
        texts: dict[str, list[int]] = {}
        for mode in rng.sample(sorted(modes), len(modes)):
            llm, depth, split = modes[mode]
            os.sched_setaffinity(0, cores[:half] if split else cores)
            started_s = time.perf_counter()
            [output] = llm.generate([prompt], params, use_tqdm=False, max_draft_tokens=depth)
            spent_s = time.perf_counter() - started_s
            row, metrics = found[mode], output.metrics
            row["seconds"].setdefault(sample["task"], []).append(spent_s - metrics.time_to_first_token_s)
            row["num_steps"] += metrics.num_steps
            row["num_draft_tokens"] += metrics.num_draft_tokens
            row["num_accepted"] += metrics.num_accepted_tokens
            texts[mode] = list(output.outputs[0].token_ids)
        for mode, text in texts.items():
            found[mode]["identical"] += text == texts["off"]
        say(f"  {number + 1} of {len(samples)} prompts")
    os.sched_setaffinity(0, cores)
    return found


def draft_cost(draft: dict[str, Any], options: argparse.Namespace, num_threads: int) -> float:
    """A draft pass over a target pass."""
    with threads.limit(num_threads):
        target = load_model(options.target)
        if draft["method"] == "self":
            model = load_model(options.target, quantization=draft["quantization"])
        else:
            model = load_model(options.draft, dtype=draft["dtype"])
        return float(pass_s(model) / pass_s(target))


@contextmanager
def worker(target: str, draft: dict[str, Any], num_threads: int, cores: list[int]) -> Iterator[str]:
    """A draft worker on these cores; yields its address."""
    with tempfile.TemporaryDirectory() as folder:
        address = f"unix:{folder}/worker"
        command = [
            *(sys.executable, "-m", "slipstream.cli.main", "draft-worker", "--model", target),
            *("--listen", address, "--threads", str(num_threads), "--max-model-len", "1024"),
            *("--max-requests", "2"),
        ]
        command += ["--speculative-config", json.dumps(draft)]
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        os.sched_setaffinity(process.pid, cores)
        try:
            deadline_s = time.monotonic() + WORKER_TIMEOUT_S
            while not Path(address.removeprefix("unix:")).exists():
                if process.poll() is not None or time.monotonic() > deadline_s:
                    sys.exit("error: the draft worker did not start; run slipstream draft-worker to see why")
                time.sleep(0.1)
            yield address
        finally:
            process.terminate()
            process.wait()


def page(result: dict[str, Any]) -> str:
    """The result as a page."""
    lines = [
        "# A draft in the process and in a worker",
        "",
        "Written by `python -m benchmarks.remote_draft`; do not edit. Raw results: "
        "[remote_draft.json](remote_draft.json). [A drafter elsewhere](../guides/remote-drafts.md) has the guide.",
        "",
        "One request at a time, greedy. In the process draft and target take turns; with a worker the next tail is "
        "drafted while the target verifies. Speedups are over speculation off with all cores, without the prompt. *c* "
        "is a draft pass over a target pass; *tokens a step* says how much of a draft was there in time and accepted.",
    ]
    for name, about in ABOUT.items():
        if name in result:
            lines += ["", *_part(result[name], *about)]
    return wrapped("\n".join([*lines, ""]))


ABOUT = {
    "measured": (
        "## On one machine",
        "In the process draft and target use all {num_cores} cores; with a worker each has half of them, and both "
        "share the memory's bandwidth. The target has real acceptance rates at the cost of a larger model "
        "(cost-expanded); c is measured with all cores.",
    ),
    "emulated": (
        "## With hardware of its own, emulated",
        "The embedded pair with its real acceptance. Its passes are filled up with waiting: the target's to "
        "{pass_ms:g} ms, the draft's to c of that. Waiting takes no core, so this is for a draft that has hardware "
        "of its own, a fraction of a millisecond away. It is no measurement of such hardware.",
    ),
}
"""Headings and what to say of each part."""


def _part(part: dict[str, Any], heading: str, text: str) -> list[str]:
    """Best against best, and all modes."""
    about, settings = part["provenance"], part["settings"]
    lines = [
        *(heading, "", text.format(**settings), ""),
        f"{about['cpu']} ({about['instructions']}), {about['date']}, commit {(about['commit'] or 'unknown')[:12]}. "
        f"{settings['max_tokens']} tokens, {settings['prompts']} prompts of seven tasks.",
        "",
        "| draft | c | in process, best | worker, best | worker that never waits, best | best over best | interval |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, cell in part["drafts"].items():
        modes = cell["modes"]
        here, there, late = (
            best(modes, "in process"),
            best(modes, "worker"),
            best(modes, "worker", "never waits"),
        )
        pairs = paired(modes[there], modes[here])
        interval, gain = speedup_interval(pairs), geometric_mean_speedup(pairs) or 0.0
        shown = "–" if interval is None else f"{interval.low:.2f} to {interval.high:.2f}"
        lines.append(
            f"| {name} | {cell['c']:.2f} | {speedup(modes, here):.2f} ({here.partition(', ')[2]}) | "
            f"{speedup(modes, there):.2f} ({there.partition(', ')[2]}) | "
            f"{speedup(modes, late):.2f} | {gain:.2f} | {shown} |"
        )
    for name, cell in part["drafts"].items():
        lines += ["", f"### {name[0].upper()}{name[1:]}", ""]
        lines += [
            "| mode | speedup | tokens a step | drafted | accepted | texts identical |",
            "|---|---|---|---|---|---|",
        ]
        for mode, row in cell["modes"].items():
            tokens = settings["max_tokens"] * settings["prompts"]
            share = row["num_accepted"] / row["num_draft_tokens"] if row["num_draft_tokens"] else None
            lines.append(
                f"| {mode} | {speedup(cell['modes'], mode):.2f} | {tokens / max(row['num_steps'], 1):.2f} | "
                f"{row['num_draft_tokens']} | {'–' if share is None else f'{share:.0%}'} | "
                f"{row['identical']} of {settings['prompts']} |"
            )
    return lines


def best(modes: dict[str, Any], kind: str, end: str = "") -> str:
    """The fastest mode whose name begins and ends so."""
    fitting = (mode for mode in modes if mode.startswith(kind) and mode.endswith(end))
    return max(fitting, key=lambda mode: speedup(modes, mode))


def speedup(modes: dict[str, Any], mode: str) -> float:
    """Over speculation off with all cores."""
    return geometric_mean_speedup(paired(modes[mode], modes["off"])) or 0.0


def paired(on: dict[str, Any], off: dict[str, Any]) -> list[PairedTimes]:
    """The seconds of both by task; all texts have the same length."""
    return [
        PairedTimes([1] * len(seconds), seconds, [1] * len(seconds), off["seconds"][task])
        for task, seconds in on["seconds"].items()
    ]


if __name__ == "__main__":
    main()
