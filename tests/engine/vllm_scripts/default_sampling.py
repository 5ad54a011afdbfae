"""The model's own parameters, a little changed."""

import os

from vllm import LLM


def main() -> None:
    llm = LLM(model=os.environ["MODEL"], gpu_memory_utilization=0.5, max_model_len=256)
    params = llm.get_default_sampling_params()
    params.max_tokens = 5
    params.temperature = 0.2
    for output in llm.generate(["One", "Two"], params, use_tqdm=False):
        assert len(output.outputs[0].token_ids) <= 5
        print(output.outputs[0].finish_reason, output.outputs[0].stop_reason)


if __name__ == "__main__":
    main()
