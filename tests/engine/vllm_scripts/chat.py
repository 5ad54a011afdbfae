"""One conversation, a batch of them, a template of our own."""

import os

from vllm import LLM, SamplingParams

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


def main() -> None:
    llm = LLM(model=os.environ["MODEL"])
    params = SamplingParams(max_tokens=8)
    conversation = [
        {"role": "system", "content": "You answer in one line."},
        {"role": "user", "content": [{"type": "text", "text": "Name a river."}]},
    ]
    [output] = llm.chat(conversation, params, use_tqdm=False)
    print(output.outputs[0].text)
    outputs = llm.chat([conversation] * 4, sampling_params=params, use_tqdm=True)
    assert len(outputs) == 4
    llm.chat(
        messages=[conversation],
        sampling_params=params,
        chat_template=TEMPLATE,
        add_generation_prompt=False,
        chat_template_content_format="string",
        use_tqdm=False,
    )


if __name__ == "__main__":
    main()
