"""GuideLLM: its load on completions and chats; what it counts is what was asked and what the server counts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

from wire import Job, Report, expect, run

NUM_REQUESTS = 8
NUM_PROMPT_TOKENS = 32
NUM_OUTPUT_TOKENS = 24
PATHS = {"completions": "/v1/completions", "chats": "/v1/chat/completions"}


def counted(job: Job) -> tuple[float, float]:
    """Prompt and output tokens that the server has counted, over all requests."""
    with urllib.request.urlopen(f"{job.base_url}/metrics", timeout=30) as response:
        lines = response.read().decode().splitlines()
    values = {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in lines if "{" in line}
    return values["vllm:prompt_tokens_total"], values["vllm:generation_tokens_total"]


def measure(job: Job, name: str) -> dict[str, Any]:
    """What the tool reports of one run."""
    output = Path(job.folder) / f"{name}.json"
    backend = f"kind=openai_http,target={job.base_url},model={job.model},api_key={job.api_key}"
    sizes = f"prompt_tokens={NUM_PROMPT_TOKENS},output_tokens={NUM_OUTPUT_TOKENS}"
    command = [
        *(str(Path(sys.executable).parent / "guidellm"), "run"),
        *("--backend", f"{backend},request_format={PATHS[name]}"),
        *("--profile", "kind=concurrent,streams=4"),
        *("--constraint", f"kind=max_requests,count={NUM_REQUESTS}"),
        *("--tokenizer", f"kind=huggingface_auto,model={job.tokenizer}"),
        *("--data", f"kind=synthetic_text,{sizes}"),
        *("--output", f"kind=json,path={output}", "--disable-console-interactive"),
    ]
    done = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, check=False)
    expect(done.returncode == 0, done.stdout[-1500:] + done.stderr[-1500:])
    [benchmark] = json.loads(output.read_text(encoding="utf-8"))["benchmarks"]
    metrics: dict[str, Any] = benchmark["metrics"]
    return metrics


def drive(job: Job, report: Report) -> None:
    for name in PATHS:
        with report.check(f"{name}: its counts are what was asked and what the server counted") as told:
            before = counted(job)
            metrics = measure(job, name)
            prompt_tokens, output_tokens = (
                after - known for after, known in zip(counted(job), before, strict=True)
            )
            told |= metrics["request_totals"]
            expect(told["successful"] == told["total"] == NUM_REQUESTS, "requests failed")
            outputs = metrics["output_token_count"]["successful"]
            told["output_tokens"], told["server_output_tokens"] = outputs["total_sum"], output_tokens
            expect(outputs["min"] == outputs["max"] == NUM_OUTPUT_TOKENS, "answers have another length")
            expect(outputs["total_sum"] == output_tokens, "the server counted other output tokens")
            prompts = metrics["prompt_token_count"]["successful"]
            told["prompt_tokens"], told["server_prompt_tokens"] = prompts["total_sum"], prompt_tokens
            expect(prompts["total_sum"] == prompt_tokens, "the server counted other prompt tokens")
            expect(prompts["min"] >= NUM_PROMPT_TOKENS, "prompts are too short")
            for measured in ("time_to_first_token_ms", "inter_token_latency_ms"):
                expect(metrics[measured]["successful"]["min"] > 0, f"{measured} is missing")
            per_chunk = metrics["output_tokens_per_iteration"]["successful"]["mean"]
            report.figures[name] = {"output_tokens_per_iteration": round(per_chunk, 3)}


if __name__ == "__main__":
    run(("guidellm", "transformers"), drive)
