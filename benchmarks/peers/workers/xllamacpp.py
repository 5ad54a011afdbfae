"""llama.cpp in this process, by the prebuilt wheels of `xllamacpp`, on a GGUF file as it is.

`options` of a mode: `speculative`, a name of `xllamacpp.common_speculative_type` without its prefix (`ngram_mod`).
"""

from __future__ import annotations

import importlib.metadata
import time
from typing import Any

import xllamacpp

from benchmarks.peers.workers.loop import Answers, Loaded, Refused, serve


class LlamaCpp:
    def __init__(self, server: Any) -> None:
        self.server = server

    def generate(self, prompts: list[list[int]], max_tokens: int, options: dict[str, Any]) -> Answers:
        [prompt] = prompts
        body = {
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "samplers": ["temperature"],
            "ignore_eos": True,
            "cache_prompt": False,  # the same prompts come again in every round
            "logprobs": 0,
            **options,
        }
        started_s = time.perf_counter()
        answer = self.server.handle_completions(body)
        seconds = time.perf_counter() - started_s
        if "usage" not in answer:
            raise Refused(f"llama.cpp answered {answer}")
        # Its interface of completions returns the text and how many tokens it has, not the tokens.
        tokens = [0] * answer["usage"]["completion_tokens"]
        return Answers([tokens], seconds, answer["timings"]["prompt_ms"] / 1e3)


def load(request: dict[str, Any]) -> Loaded:
    params = xllamacpp.CommonParams()
    params.model.path = request["target"]
    params.n_ctx = request["max_model_len"]
    params.n_parallel = request["max_num_seqs"]
    params.n_gpu_layers = 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = request["threads"]
    notes = ["in this process, prompt cache off"]
    if kind := request["options"].get("speculative"):
        types = xllamacpp.common_speculative_type
        params.speculative.types = [getattr(types, f"COMMON_SPECULATIVE_TYPE_{kind.upper()}")]
    version = importlib.metadata.version("xllamacpp")
    return Loaded(LlamaCpp(xllamacpp.Server(params)), {"xllamacpp": version}, notes)


if __name__ == "__main__":
    serve(load)
