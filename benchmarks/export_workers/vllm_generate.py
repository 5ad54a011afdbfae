"""vLLM's answers to `benchmarks.export_engines`, a request at a time.

Of each the tokens, how many of them the prompt's pass yielded, and the target passes behind it.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import redirect_stdout

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


def main() -> None:
    request = json.load(sys.stdin)
    with redirect_stdout(sys.stderr):
        import vllm

        llm = vllm.LLM(
            request["target"],
            dtype="float32",
            max_model_len=1024,
            max_num_seqs=1,
            enforce_eager=True,
            enable_prefix_caching=False,
            disable_log_stats=False,
            speculative_config=request["speculative_config"],
        )
        answers = []
        for prompt, length in zip(request["prompts"], request["lengths"], strict=True):
            params = vllm.SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False)
            before = num_drafts(llm)
            [output] = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
            # every pass but the prompt's has drafts to check
            answers.append([list(output.outputs[0].token_ids), 1, num_drafts(llm) - before])
    print(json.dumps({"version": vllm.__version__, "answers": answers}))


def num_drafts(llm) -> int:
    return sum(metric.value for metric in llm.get_metrics() if metric.name == "vllm:spec_decode_num_drafts")


if __name__ == "__main__":
    main()
