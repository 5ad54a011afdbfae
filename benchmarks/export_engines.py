"""Exported checkpoints in the engines that they are for: do they load, and are as many draft tokens accepted as here?

    python -m benchmarks.export_engines --vllm-python VENV/bin/python --llama-server BUILD/bin/llama-server \\
        --openvino-python VENV/bin/python

Greedy chains on the same prompt tokens and lengths, the end token ignored where the engine can. What is compared is
output tokens a target pass, the prompts' passes included. An engine that is not named is left out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx2

from benchmarks.kept import Kept
from slipstream import LLM, SamplingParams
from slipstream.assets import EMBEDDED_DRAFT, EMBEDDED_EAGLE3, EMBEDDED_TARGET, sample_prompts
from slipstream.export.checkpoints import convert
from slipstream.export.record import SpeculativeRecord
from slipstream.metrics.request import RequestMetrics
from slipstream.provenance import provenance
from slipstream.text.prompts import encode_chat

HERE = Path(__file__).parent
RESULT = HERE.parent / "docs/benchmarks/export_engines.json"
NUM_TOKENS = 4
DRAFTS = {"draft_model": EMBEDDED_DRAFT, "eagle3": EMBEDDED_EAGLE3}
Measured = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vllm-python")
    parser.add_argument("--llama-server")
    parser.add_argument("--openvino-python")
    parser.add_argument("--eagle1", help="folder of an EAGLE-1 head of the embedded target")
    parser.add_argument("--prompts", type=int, default=14)
    parser.add_argument("--max-tokens", type=int, default=64)
    options = parser.parse_args()
    drafts = DRAFTS | ({"eagle": options.eagle1} if options.eagle1 else {})
    tokenizer = LLM().engine.tokenizer
    rows = sample_prompts()[: options.prompts]
    prompts = [list(encode_chat(tokenizer, row["messages"])) for row in rows]
    engines: dict[str, tuple[str | None, Callable[..., Measured]]] = {
        "vllm": (options.vllm_python, vllm),
        "llama_cpp": (options.llama_server, llama_cpp),
        "openvino": (options.openvino_python, openvino),
    }
    kept, cells = Kept(RESULT, vars(options)), []
    for method, model in drafts.items():
        here = kept.cell(f"slipstream {method}", partial(ours, method, model, prompts, options.max_tokens))
        for engine, (program, run) in engines.items():
            if program is None or (method == "eagle" and engine != "vllm"):
                continue
            record = SpeculativeRecord(method=method, target=EMBEDDED_TARGET, model=model, depth=NUM_TOKENS)
            measure = partial(_loaded, run, program, record, prompts, options.max_tokens)
            there = kept.cell(f"{engine} {method}", measure)
            ratio = there["tokens_per_pass"] / here["tokens_per_pass"] if there["loads"] else None
            cells.append({"engine": engine, "method": method, "ours": here, "theirs": there, "ratio": ratio})
            print(json.dumps(cells[-1]), flush=True)
    settings = {"prompts": options.prompts, "max_tokens": options.max_tokens, "depth": NUM_TOKENS}
    kept.finish({"provenance": provenance(), **settings, "cells": cells})


def ours(method: str, model: str, prompts: list[list[int]], max_tokens: int) -> Measured:
    config = {"method": method, "model": model, "num_speculative_tokens": NUM_TOKENS, "tree_top_k": 1}
    if method != "draft_model":
        config["num_draft_nodes"] = None
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    outputs = LLM(speculative_config=config).generate(prompts, params)
    metrics = RequestMetrics.merged([output.metrics for output in outputs])
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    return _measured(num_tokens, num_tokens - metrics.num_accepted_tokens)


def vllm(
    python: str, record: SpeculativeRecord, folder: Path, prompts: list[list[int]], max_tokens: int
) -> Measured:
    made = convert(record, "vllm", folder / "head", version="0.32")
    speculative = {
        "method": record.method,
        "model": str(made.draft or record.model),
        "num_speculative_tokens": record.depth,
    }
    request = {"target": record.target, "speculative_config": speculative}
    answer = _ask(python, "cross_check_vllm.py", {**request, "prompts": prompts, "max_tokens": max_tokens})
    num_tokens = sum(len(tokens) for tokens in answer["token_ids"])
    return _measured(num_tokens, answer["counters"]["num_drafts"] + len(prompts))


def openvino(
    python: str, record: SpeculativeRecord, folder: Path, prompts: list[list[int]], max_tokens: int
) -> Measured:
    made = convert(record, "openvino", folder)
    path = f"{Path(python).parent}:/usr/bin:/bin"
    subprocess.run(["sh", folder / "convert.sh"], env={"PATH": path}, check=True, capture_output=True)
    request = {"target": str(made.target), "draft": str(made.draft), "depth": record.depth}
    answer = _ask(python, "export_openvino.py", {**request, "prompts": prompts, "max_tokens": max_tokens})
    return _measured(answer["num_tokens"], answer["num_passes"])


def llama_cpp(
    server: str, record: SpeculativeRecord, folder: Path, prompts: list[list[int]], max_tokens: int
) -> Measured:
    made = convert(record, "llama_cpp", folder)
    kind = "draft-eagle3" if record.method == "eagle3" else "draft-simple"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [
        *(server, "-m", str(made.target), "-md", str(made.draft), "--spec-type", kind),
        *("--spec-draft-n-max", str(record.depth), "--spec-draft-p-min", "0", "--parallel", "1"),
        *("--cache-type-k", "f32", "--cache-type-v", "f32", "--ctx-size", "2048", "--port", port),
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        return _served(f"http://127.0.0.1:{port}", process, prompts, max_tokens)
    finally:
        process.kill()
        process.wait()


def _served(
    url: str, process: subprocess.Popen[bytes], prompts: list[list[int]], max_tokens: int
) -> Measured:
    while True:
        if process.poll() is not None:
            raise RuntimeError(f"llama-server ended with {process.returncode} while it started")
        with contextlib.suppress(httpx2.HTTPError):
            if httpx2.get(f"{url}/health").status_code == 200:
                break
        time.sleep(0.2)
    num_tokens = num_accepted = 0
    for prompt in prompts:
        body = {"prompt": prompt, "n_predict": max_tokens, "temperature": 0, "return_tokens": True}
        body |= {"samplers": ["temperature"], "cache_prompt": False}
        answer = httpx2.post(f"{url}/completion", json=body, timeout=600).json()
        num_tokens += len(answer["tokens"])
        num_accepted += answer["timings"].get("draft_n_accepted", 0)
    return _measured(num_tokens, num_tokens - num_accepted)


def _loaded(
    run: Callable[..., Measured],
    program: str,
    record: SpeculativeRecord,
    prompts: list[list[int]],
    max_tokens: int,
) -> Measured:
    """What `run` measures, or the engine's own reason not to load."""
    with tempfile.TemporaryDirectory() as scratch:
        try:
            return run(program, record, Path(scratch), prompts, max_tokens)
        except (RuntimeError, subprocess.CalledProcessError) as error:
            return {"loads": False, "why": str(error)[-400:]}


def _ask(python: str, script: str, request: dict[str, Any]) -> dict[str, Any]:
    done = subprocess.run(
        [python, str(HERE / script)], input=json.dumps(request), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError("\n".join(done.stderr.strip().splitlines()[-3:]))
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def _measured(num_tokens: int, num_passes: int) -> Measured:
    return {
        "loads": True,
        "num_tokens": num_tokens,
        "num_passes": num_passes,
        "tokens_per_pass": num_tokens / num_passes,
    }


if __name__ == "__main__":
    main()
