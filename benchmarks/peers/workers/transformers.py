"""Hugging Face Transformers: `generate` in float32 with SDPA attention. `options` of a call go to `generate`.

`draft: true` adds the assistant with a constant number of draft tokens and without its confidence threshold, which
would otherwise be tuned while it runs.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.streamers import BaseStreamer

from benchmarks.peers.workers.loop import Answers, Loaded, Refused, serve


class FirstToken(BaseStreamer):
    """Notes when the first new token comes; the prompt is streamed first."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.first_token_s: float | None = None

    def put(self, value: torch.Tensor) -> None:
        self.num_calls += 1
        if self.num_calls == 2:
            self.first_token_s = time.perf_counter()

    def end(self) -> None:
        pass


class Transformers:
    def __init__(self, target: Any, draft: Any) -> None:
        self.target = target
        self.draft = draft

    def generate(self, prompts: list[list[int]], max_tokens: int, options: dict[str, Any]) -> Answers:
        options = dict(options)
        assistant = self.draft if options.pop("draft", False) else None
        if assistant is not None:
            assistant.generation_config.num_assistant_tokens = options.pop("num_assistant_tokens")
            assistant.generation_config.num_assistant_tokens_schedule = "constant"
            assistant.generation_config.assistant_confidence_threshold = 0.0
        speculative = assistant is not None or "prompt_lookup_num_tokens" in options
        if speculative and len(prompts) > 1:
            raise Refused(
                "Transformers' assisted generation takes one request at a time (batch_size > 1 raises)"
            )
        width = max(len(prompt) for prompt in prompts)
        rows = [[0] * (width - len(prompt)) + prompt for prompt in prompts]  # padded on the left
        mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        config = GenerationConfig(
            do_sample=False,
            max_new_tokens=max_tokens,
            min_new_tokens=None,
            eos_token_id=None,
            pad_token_id=0,
            use_cache=True,
            **options,
        )
        streamer = FirstToken() if len(prompts) == 1 else None
        started_s = time.perf_counter()
        output = self.target.generate(
            input_ids=torch.tensor(rows),
            attention_mask=torch.tensor(mask),
            generation_config=config,
            assistant_model=assistant,
            streamer=streamer,
        )
        token_ids = output[:, width:].tolist()
        seconds = time.perf_counter() - started_s
        first = streamer.first_token_s - started_s if streamer and streamer.first_token_s else None
        return Answers(token_ids, seconds, first)


def load(request: dict[str, Any]) -> Loaded:
    torch.set_num_threads(request["threads"])
    models = [_load(request[name]) for name in ("target", "draft")]
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    return Loaded(Transformers(*models), versions, ["float32, SDPA attention, dynamic cache"])


def _load(path: str) -> Any:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa")
    model.generation_config.eos_token_id = None  # the end token is ignored, here and by the assistant
    return model.eval()


if __name__ == "__main__":
    serve(load)
