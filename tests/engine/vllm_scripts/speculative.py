"""With and without drafts; the method named, or told by the model."""

import os

from vllm import LLM, SamplingParams


def main() -> None:
    prompts = ["SELECT name FROM people WHERE name", "The river is the river is the"]
    params = SamplingParams(temperature=0, max_tokens=24)
    expected = None
    for speculative_config in (
        None,
        {
            "method": "ngram",
            "num_speculative_tokens": 2,
            "prompt_lookup_max": 5,
            "prompt_lookup_min": 2,
            "draft_tensor_parallel_size": 1,
        },
        {
            "model": os.environ["DRAFT"],
            "num_speculative_tokens": 3,
            "enforce_eager": False,
            "max_model_len": 512,
        },
        {"model": os.environ["EAGLE3"], "num_speculative_tokens": 3, "disable_padded_drafter_batch": False},
    ):
        llm = LLM(model=os.environ["MODEL"], speculative_config=speculative_config, max_model_len=512)
        token_ids = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
        expected = expected or token_ids
        assert token_ids == expected


if __name__ == "__main__":
    main()
