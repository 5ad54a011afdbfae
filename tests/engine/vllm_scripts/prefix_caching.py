"""The same beginning, computed once."""

import os

from vllm import LLM, SamplingParams

PREFIX = "You are an expert who answers questions about rivers, cities and people, shortly and rightly. " * 2


def main() -> None:
    prompts = [PREFIX + question for question in ("The river is", "The city is", "My name is")]
    params = SamplingParams(temperature=0.0)
    plain = LLM(model=os.environ["MODEL"], enable_prefix_caching=False, gpu_memory_utilization=0.4)
    texts = [output.outputs[0].text for output in plain.generate(prompts, params)]
    del plain
    cached = LLM(model=os.environ["MODEL"], enable_prefix_caching=True, gpu_memory_utilization=0.4)
    cached.generate(prompts[0], params)
    outputs = cached.generate(prompts, params)
    assert [output.outputs[0].text for output in outputs] == texts
    assert all(output.num_cached_tokens for output in outputs)


if __name__ == "__main__":
    main()
