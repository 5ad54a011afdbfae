"""Some prompts, one set of parameters."""

import os

from vllm import LLM, SamplingParams


def main() -> None:
    llm = LLM(model=os.environ["MODEL"], enforce_eager=True, tensor_parallel_size=1)
    params = SamplingParams(temperature=0.8, top_p=0.95)
    outputs = llm.generate(["The name of the river is", "SELECT name FROM", "In the year"], params)
    for output in outputs:
        print(f"{output.prompt!r} -> {output.outputs[0].text!r}")
        assert output.finished
        assert 1 <= len(output.outputs[0].token_ids) <= 16


if __name__ == "__main__":
    main()
