"""Slipstream. `options` of a mode: `speculative_config`, and any field of `EngineConfig`."""

from __future__ import annotations

import importlib.metadata
import time
from typing import Any

from benchmarks.peers.workers.loop import Answers, Loaded, serve
from slipstream import LLM, SamplingParams, __version__


class Slipstream:
    def __init__(self, llm: LLM) -> None:
        self.llm = llm

    def generate(self, prompts: list[list[int]], max_tokens: int, options: dict[str, Any]) -> Answers:
        self.llm.reset_caches()  # no prefix and no learned text from an earlier prompt
        options = dict(options)
        ignore_eos = options.pop("ignore_eos", True)
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=ignore_eos)
        started_s = time.perf_counter()
        outputs = self.llm.generate(prompts, params, **options)
        seconds = time.perf_counter() - started_s
        first = min(output.metrics.time_to_first_token_s for output in outputs)
        num_steps = sum(output.metrics.num_steps for output in outputs)
        return Answers([output.outputs[0].token_ids for output in outputs], seconds, first, num_steps)


def load(request: dict[str, Any]) -> Loaded:
    options = request["options"]
    engine = {
        # Integer formats round what the checkpoint stores; without one, float32 means float32.
        "dtype": "auto" if options.get("quantization") else "float32",
        "device": "cpu",
        "cpu_kernels": "native",
        "num_threads": request["threads"],
        "max_model_len": request["max_model_len"],
        "max_num_seqs": request["max_num_seqs"],
        **options,
    }
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    return Loaded(Slipstream(LLM(request["target"], **engine)), {"slipstream": __version__, **versions}, [])


if __name__ == "__main__":
    serve(load)
