"""Runs in vLLM's environment, for cross_check.py: request on standard input, answers and counters on output."""

from __future__ import annotations

import json
import os
import sys
from contextlib import redirect_stdout

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

from vllm import LLM, SamplingParams


def main() -> None:
    request = json.load(sys.stdin)
    with redirect_stdout(sys.stderr):
        llm = LLM(
            request["target"],
            dtype="float32",
            max_model_len=1024,
            enforce_eager=True,
            enable_prefix_caching=False,
            disable_log_stats=False,
            speculative_config=request["speculative_config"],
        )
        params = SamplingParams(
            temperature=0, max_tokens=request["max_tokens"], ignore_eos=True, detokenize=False
        )
        inputs = [{"prompt_token_ids": prompt} for prompt in request["prompts"]]
        outputs = llm.generate(inputs, params, use_tqdm=False)
        counters = {
            metric.name.removeprefix("vllm:spec_decode_"): getattr(metric, "value", None)
            or getattr(metric, "values", None)
            for metric in llm.get_metrics()
            if metric.name.startswith("vllm:spec_decode_")
        }
    print(json.dumps({"token_ids": [list(o.outputs[0].token_ids) for o in outputs], "counters": counters}))


if __name__ == "__main__":
    main()
