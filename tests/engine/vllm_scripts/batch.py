"""Many prompts with parameters of their own, and a bar."""

import os

from vllm import LLM, SamplingParams


def main() -> None:
    llm = LLM(model=os.environ["MODEL"], max_num_seqs=8, swap_space=0, seed=1, disable_log_stats=True)
    prompts = [f"{number} plus one is" for number in range(20)]
    params = [SamplingParams(temperature=0.5, seed=number, max_tokens=1 + number % 4) for number in range(20)]
    outputs = llm.generate(prompts, params, use_tqdm=True)
    assert [output.prompt for output in outputs] == prompts
    assert all(len(o.outputs[0].token_ids) <= p.max_tokens for o, p in zip(outputs, params, strict=True))


if __name__ == "__main__":
    main()
