"""Real pretrained files: SmolLM2-135M-Instruct and Gemma 3 270M, as GGUF.

What is recorded here was compared with llama.cpp on the same files: token ids of prompts (their number, and for Gemma
the ids themselves), and the most probable next token.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM

from slipstream import LLM, RequestOutput, SamplingParams
from slipstream.assets import sample_prompts
from slipstream.models import load_tokenizer
from slipstream.serve.app import create_app
from slipstream.serve.config import ServeConfig
from slipstream.text.prompts import encode_chat
from tests.kit.threaded_host import ThreadedHost
from tests.serve.serve_cases import running

NUM_PROMPTS = 6
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
    "own-head": {"method": "eagle3", "model": "smollm2"},
    "auto": {"method": "auto", "drafters": [{"method": "suffix"}, {"method": "ngram"}]},
}
SMOLLM2_IDS = {
    "The capital of France is": [504, 3575, 282, 4649, 314],
    "Roses are red, violets are": [66, 4243, 359, 2382, 28, 386, 1119, 6770, 359],
    "1, 2, 3, 4, 5, 6,": [33, 28, 216, 34, 28, 216, 35, 28, 216, 36, 28, 216, 37, 28, 216, 38, 28],
    "don't  stop": [12420, 982, 216, 2853],
    "def f(x):\n    return x+1": [1604, 275, 24, 104, 727, 472, 1003, 1792, 27, 33],
    "<|im_start|>user\nHi<|im_end|>\n": [1, 4093, 198, 26843, 2, 198],
}
GEMMA3_IDS = {
    "The capital of France is": [2, 818, 5279, 529, 7001, 563],
    "Roses are red, violets are": [2, 205251, 659, 2604, 236764, 81758, 8524, 659],
    "don't  stop": [2, 13246, 236789, 236745, 138, 11412],
    "a   b    c": [2, 236746, 139, 236763, 140, 236755],
    "def f(x):\n    return x+1": [2, 2063, 517, 236769, 236781, 1473, 107, 140, 2060, 1123, 236862, 236770],
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
    return texts(answers(off, prompts))


def answers(llm: LLM, prompts: list[list[int]]) -> list[RequestOutput]:
    """Return the answers to all prompts, each greedy and seeded at temperature 0.8."""
    params = [
        SamplingParams(temperature=temperature, max_tokens=MAX_TOKENS, seed=number)
        for temperature in (0.0, 0.8)
        for number in range(len(prompts))
    ]
    return llm.generate(prompts * 2, params)


def texts(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_smollm2_chats(off: LLM) -> None:
    [output] = off.chat(QUESTION, SamplingParams(temperature=0, max_tokens=24))
    assert output.outputs[0].text == ANSWER
    assert output.outputs[0].finish_reason == "stop"


def test_gemma3_continues(gemma3: str) -> None:
    llm = LLM(gemma3, max_num_seqs=2, max_model_len=256)
    beginnings = ["The capital of France is", "Roses are red, violets are", "1, 2, 3, 4, 5, 6,"]
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=2)
    outputs = llm.generate(beginnings, params)
    assert [output.outputs[0].text for output in outputs] == [" the", " blue", " "]
    assert list(outputs[0].prompt_token_ids) == [2, 818, 5279, 529, 7001, 563]


def test_prompt_ids_are_those_of_llama_cpp(smollm2: str, gemma3: str) -> None:
    for file, expected in ((smollm2, SMOLLM2_IDS), (gemma3, GEMMA3_IDS)):
        tokenizer = load_tokenizer(file)
        assert {text: list(tokenizer(text).input_ids) for text in expected} == expected


def test_logits_in_pytorch_are_those_of_transformers(smollm2: str) -> None:
    """Without our kernels nothing is rounded: the file's numbers in float32 arithmetic."""
    llm = LLM(smollm2, cpu_kernels="torch", dtype="float32", max_num_seqs=2, max_model_len=256)
    prompt = encode_chat(llm.engine.tokenizer, QUESTION)
    [output] = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0))
    folder, name = Path(smollm2).parent, Path(smollm2).name
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([prompt])).logits[0]
    expected = logits.log_softmax(dim=-1)
    given = output.prompt_logprobs
    assert given is not None
    for position, token in enumerate(prompt[1:], start=1):
        ours = given[position][token].logprob
        assert ours == pytest.approx(float(expected[position - 1, token]), abs=1e-3)
    assert output.outputs[0].token_ids == [int(logits[-1].argmax())]


@pytest.mark.parametrize("name", SPECS)
def test_texts_are_those_without_speculation(
    name: str, smollm2: str, prompts: list[list[int]], references: list[list[int]]
) -> None:
    """In a batch of another size than without speculation."""
    llm = LLM(smollm2, speculative_config=SPECS[name], max_num_seqs=5, max_model_len=1024)
    outputs = answers(llm, prompts)
    assert texts(outputs) == references
    assert llm.engine.integrity() == []
    assert llm.engine.stats().num_draft_failures == 0
    if name != "auto":  # which may find that it does not pay here
        assert sum(output.metrics.num_draft_tokens for output in outputs) > 0


def test_server_answers_a_client(smollm2: str) -> None:
    llm = LLM(smollm2, speculative_config={"method": "suffix"}, max_num_seqs=2, max_model_len=1024)
    host = ThreadedHost(llm.engine)
    try:
        with running(create_app(host.remote, ServeConfig(), "SmolLM2")) as (address, _):
            client = openai.OpenAI(base_url=f"{address}/v1", api_key="none")
            chunks = client.chat.completions.create(
                model="SmolLM2", messages=QUESTION, temperature=0, max_tokens=24, stream=True
            )
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER
    finally:
        host.close()


def test_weights_take_what_the_file_does(off: LLM, smollm2: str) -> None:
    """Matrices are kept in the file's four bits; the embedding is not held a second time as the head."""
    assert off.engine.model.weight_bytes < 1.15 * Path(smollm2).stat().st_size
