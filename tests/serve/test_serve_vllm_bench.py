"""`vllm bench serve` against a real server. vLLM is no dependency: its command is found on PATH, or named by
SLIPSTREAM_VLLM; without one there is nothing to test."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from serve_cases import DRAFT, MODEL, running

from slipstream import LLM, AsyncEngine
from slipstream.assets import EMBEDDED_TARGET
from slipstream.serve.app import create_app
from slipstream.serve.config import ServeConfig

COMMAND = os.environ.get("SLIPSTREAM_VLLM") or shutil.which("vllm")
NUM_PROMPTS = 6
NUM_TOKENS = 12


@pytest.mark.long
@pytest.mark.skipif(COMMAND is None, reason="there is no vllm command")
@pytest.mark.parametrize(
    ("backend", "endpoint"), [("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")]
)
def test_its_benchmark_counts_what_was_asked(backend: str, endpoint: str, tmp_path: Path) -> None:
    llm = LLM(speculative_config=DRAFT, kv_cache_bytes=40 * 2**20, max_num_seqs=4)
    with running(create_app(AsyncEngine(engine=llm.engine), ServeConfig(), MODEL)) as (url, _):
        command = [
            *(str(COMMAND), "bench", "serve", "--backend", backend, "--base-url", url),
            *("--endpoint", endpoint, "--model", MODEL, "--tokenizer", str(EMBEDDED_TARGET)),
            *("--dataset-name", "random", "--random-input-len", "32"),
            *("--random-output-len", str(NUM_TOKENS), "--num-prompts", str(NUM_PROMPTS), "--ignore-eos"),
            *("--save-result", "--result-dir", str(tmp_path), "--result-filename", "result.json"),
        ]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stdout + run.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["completed"] == NUM_PROMPTS
    assert result["total_output_tokens"] == NUM_PROMPTS * NUM_TOKENS
    assert result["mean_ttft_ms"] > 0
