"""Transformers' answers to `benchmarks.export_engines`, a request at a time: tokens and target passes of each."""

from __future__ import annotations

import json
import sys


def main() -> None:
    import torch
    import transformers

    request = json.load(sys.stdin)
    values = request["values"]
    model, assistant = (
        transformers.AutoModelForCausalLM.from_pretrained(values[name], dtype=torch.float32)
        for name in ("model", "assistant_model")
    )
    for name in ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"):
        setattr(assistant.generation_config, name, values[name])
    passes = []
    model.register_forward_hook(lambda *_: passes.append(1))
    answers = []
    for prompt, length in zip(request["prompts"], request["lengths"], strict=True):
        passes.clear()
        tokens = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            assistant_model=assistant,
            do_sample=False,
            max_new_tokens=length,
        )
        answers.append([tokens[0, len(prompt) :].tolist(), len(passes)])
    print(json.dumps({"version": transformers.__version__, "answers": answers}))


if __name__ == "__main__":
    main()
