"""Real pretrained files: SmolLM2-135M-Instruct and Gemma 3 270M, as GGUF.

What is recorded here was compared with llama.cpp on the same files: token ids of prompts, and the most probable next
token where it leads by more than rounding could change.
"""

from __future__ import annotations

from typing import Any

import openai
import pytest
import torch
from serve_cases import running
from transformers import AutoModelForCausalLM

from slipstream import LLM, SamplingParams
from slipstream.assets import sample_prompts
from slipstream.serve.app import create_app
from slipstream.serve.config import ServeConfig
from slipstream.serve.process.thread import ThreadedHost
from slipstream.text.prompts import encode_chat

NUM_PROMPTS = 24
MAX_TOKENS = 12
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
ANSWER = "The capital of France is Paris."
SPECS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram"},
    "suffix": {"method": "suffix"},
    "suffix-tree": {"method": "suffix", "tree": True},
    "token-recycling": {"method": "token_recycling"},
    "siblings": {"method": "siblings", "share": "tenant"},
    "lookahead": {"method": "lookahead"},
    "jacobi": {"method": "jacobi"},
    "layer-skip": {"method": "layer_skip", "exit_layer": 10},
    "auto": {"method": "auto", "drafters": [{"method": "suffix"}, {"method": "ngram"}]},
}


@pytest.fixture(scope="module")
def off(smollm2: str) -> LLM:
    """SmolLM2 without speculation."""
    return LLM(smollm2, max_num_seqs=8, max_model_len=1024)


@pytest.fixture(scope="module")
def prompts(off: LLM) -> list[list[int]]:
    """The shortest of the sample prompts, as conversations."""
    encoded = [encode_chat(off.engine.tokenizer, row["messages"]) for row in sample_prompts()]
    return sorted(encoded, key=len)[:NUM_PROMPTS]


@pytest.fixture(scope="module")
def references(off: LLM, prompts: list[list[int]]) -> list[list[int]]:
    return texts(off, prompts)


def texts(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    """Token ids of all prompts, each greedy and seeded at temperature 0.8."""
    params = [
        SamplingParams(temperature=temperature, max_tokens=MAX_TOKENS, seed=number)
        for temperature in (0.0, 0.8)
        for number in range(len(prompts))
    ]
    return [output.outputs[0].token_ids for output in llm.generate(prompts * 2, params)]


def test_smollm2_chats(off: LLM) -> None:
    [output] = off.chat(QUESTION, SamplingParams(temperature=0, max_tokens=24))
    assert output.outputs[0].text == ANSWER
    assert output.outputs[0].finish_reason == "stop"


def test_gemma3_continues(gemma3: str) -> None:
    llm = LLM(gemma3, max_num_seqs=2, max_model_len=256)
    beginnings = ["The capital of France is", "Roses are red, violets are", "1, 2, 3, 4, 5, 6,"]
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=2)
    outputs = llm.generate(beginnings, params)
    assert [output.outputs[0].text for output in outputs] == [" Paris", " blue", " "]
    assert list(outputs[0].prompt_token_ids) == [2, 818, 5279, 529, 7001, 563]
