"""A choice, an expression, a schema, a grammar."""

import json
import os

from vllm import LLM, SamplingParams, StructuredOutputsParams

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "size": {"enum": ["small", "large"]}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
GRAMMAR = """
root ::= "SELECT " column " FROM " table
column ::= "name" | "age"
table ::= "people" | "cities"
"""


def main() -> None:
    llm = LLM(model=os.environ["MODEL"], max_model_len=200, guided_decoding_backend="auto")

    def ask(prompt: str, **form: object) -> str:
        params = SamplingParams(max_tokens=60, seed=1, structured_outputs=StructuredOutputsParams(**form))
        text: str = llm.generate(prompt, sampling_params=params)[0].outputs[0].text
        print(text)
        return text

    assert ask("Is it good?", choice=["Positive", "Negative"]) in ("Positive", "Negative")
    assert ask("A number:", regex=r"\d{3}-\d{4}")[3] == "-"
    assert json.loads(ask("A box, as JSON:", json=SCHEMA, disable_any_whitespace=True)).keys() == {
        "name",
        "size",
    }
    assert ask("As SQL:", grammar=GRAMMAR).startswith("SELECT ")


if __name__ == "__main__":
    main()
