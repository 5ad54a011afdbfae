"""Prompts that are tokens already, and what the model thought of each token."""

import os

import numpy as np
from vllm import LLM, SamplingParams, TokensPrompt


def main() -> None:
    llm = LLM(model=os.environ["MODEL"], skip_tokenizer_init=False, dtype="float", kv_cache_dtype="auto")
    tokenizer = llm.get_tokenizer()
    ids = tokenizer.encode("SELECT name FROM")
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=2, prompt_logprobs=1, detokenize=False)
    outputs = llm.generate(
        [
            {"prompt_token_ids": ids},
            TokensPrompt(prompt_token_ids=np.array(ids)),
            {"prompt": "SELECT name FROM"},
        ],
        params,
    )
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    answer = outputs[0].outputs[0]
    for token_id, alternatives in zip(answer.token_ids, answer.logprobs, strict=True):
        best = alternatives[token_id]
        assert best.rank == 1
        print(repr(best.decoded_token), round(best.logprob, 3), len(alternatives))
    assert outputs[0].prompt_logprobs[0] is None
    total = sum(
        one[token_id].logprob for token_id, one in zip(answer.token_ids, answer.logprobs, strict=True)
    )
    assert abs(answer.cumulative_logprob - total) < 1e-6


if __name__ == "__main__":
    main()
