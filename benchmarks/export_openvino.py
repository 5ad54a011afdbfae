"""Runs in OpenVINO's environment, for export_engines.py: request on standard input, tokens and passes on output."""

from __future__ import annotations

import json
import sys

import numpy as np
import openvino
import openvino_genai

EXACT = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}


def main() -> None:
    request = json.load(sys.stdin)
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False
    scheduler.max_num_seqs = 1
    scheduler.cache_size = 1
    draft = openvino_genai.draft_model(request["draft"], "CPU", **EXACT)
    pipeline = openvino_genai.LLMPipeline(
        request["target"], "CPU", draft_model=draft, scheduler_config=scheduler, **EXACT
    )
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = request["max_tokens"]
    config.ignore_eos = True
    config.do_sample = False
    config.num_assistant_tokens = request["depth"]
    num_tokens = num_passes = 0
    for prompt in request["prompts"]:
        ids = np.array([prompt], dtype=np.int64)
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        result = pipeline.generate(inputs, config)
        num_tokens += len(result.tokens[0])
        num_passes += len(result.extended_perf_metrics.main_model_metrics.raw_metrics.m_batch_sizes)
    print(json.dumps({"num_tokens": num_tokens, "num_passes": num_passes}))


if __name__ == "__main__":
    main()
