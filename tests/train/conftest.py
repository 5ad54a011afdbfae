"""A tiny target and a little arithmetic to learn, for every test of training."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from slipstream.assets import EMBEDDED_TARGET
from slipstream.models import load_tokenizer
from slipstream.train.batches import TrainingDocument, read_documents
from slipstream.train.target import FrozenTarget
from tests.kit.small_llama import sizes

ROW_LENGTH = 48


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    return load_tokenizer(EMBEDDED_TARGET)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerBase) -> str:
    """A target of three layers with grouped keys and the embedded pair's tokenizer."""
    torch.manual_seed(0)
    config = LlamaConfig(
        **sizes(
            32, 3, 4, 2, vocab=len(tokenizer), inner=64, context=256, tied=True, eos=tokenizer.eos_token_id
        )
    )
    folder = tmp_path_factory.mktemp("tiny")
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(10)  # tied; so that its distributions have something to say
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def target(tiny: str) -> FrozenTarget:
    return FrozenTarget(tiny, torch.device("cpu"), torch.float32)


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(0)
    file = tmp_path_factory.mktemp("data") / "data.jsonl"
    with file.open("w") as stream:
        for _ in range(40):
            a, b = rng.integers(100, size=2)
            messages = [
                {"role": "user", "content": f"What is {a} + {b}?"},
                {"role": "assistant", "content": f"{a} + {b} = {a + b}"},
            ]
            stream.write(json.dumps({"task": "math", "messages": messages}) + "\n")
    return file


@pytest.fixture(scope="session")
def documents(data: Path, tokenizer: PreTrainedTokenizerBase) -> list[TrainingDocument]:
    return read_documents([data], tokenizer, ROW_LENGTH)
