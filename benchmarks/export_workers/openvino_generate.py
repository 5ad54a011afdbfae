"""OpenVINO GenAI's answers to `benchmarks.export_engines`, a request at a time.

Of each the tokens, how many of them the prompt's pass yielded, and the target passes behind it.
"""

from __future__ import annotations

import json
import sys

EXACT = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}


def main() -> None:
    import numpy as np
    import openvino
    import openvino_genai

    request = json.load(sys.stdin)
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False
    scheduler.max_num_seqs = 1
    scheduler.cache_size = 1
    values = request["values"]
    draft = openvino_genai.draft_model(values["draft_model"], "CPU", **EXACT)
    pipeline = openvino_genai.LLMPipeline(
        values["model"], "CPU", draft_model=draft, scheduler_config=scheduler, **EXACT
    )
    config = openvino_genai.GenerationConfig()
    config.ignore_eos = True
    config.do_sample = False
    config.num_assistant_tokens = values["num_assistant_tokens"]
    answers = []
    for prompt, length in zip(request["prompts"], request["lengths"], strict=True):
        config.max_new_tokens = length
        ids = np.array([prompt], dtype=np.int64)
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        result = pipeline.generate(inputs, config)
        yielded = result.extended_perf_metrics.main_model_metrics.raw_metrics.m_batch_sizes
        answers.append([[int(token) for token in result.tokens[0]], yielded[0], len(yielded) - 1])
    print(json.dumps({"version": openvino_genai.__version__, "answers": answers}))


if __name__ == "__main__":
    main()
