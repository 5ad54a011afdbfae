"""Hold answers to a JSON schema and to a regular expression. Speculation changes no text here either."""

import json

from slipstream import LLM, SamplingParams, StructuredOutput

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "guests": {"type": "integer", "minimum": 1, "maximum": 20},
        "outdoors": {"type": "boolean"},
    },
    "required": ["name", "guests", "outdoors"],
    "additionalProperties": False,
}


def main() -> None:
    llm = LLM(speculative_config={"method": "suffix"})
    booking = StructuredOutput(json_schema=SCHEMA, compact=True)
    phone = StructuredOutput(regex="[0-9]{3}-[0-9]{4}")
    outputs = llm.generate(
        ["A table for four in the garden, for Mrs Smith. As JSON:", "Her phone number:"],
        [SamplingParams(temperature=0, max_tokens=80, structured=form) for form in (booking, phone)],
    )
    parsed = json.loads(outputs[0].outputs[0].text)
    print("booking:", parsed)
    print("phone:", outputs[1].outputs[0].text)


if __name__ == "__main__":
    main()
