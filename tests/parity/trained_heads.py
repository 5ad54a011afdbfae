"""Heads for the embedded target, trained on the spot: random ones would hardly ever be right, and prove little."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from slipstream import LLM, SamplingParams
from slipstream.assets import EMBEDDED_TARGET, sample_prompts
from slipstream.engine.inputs import encode_chat
from slipstream.heads.hydra import HydraConfig, HydraHeads, save_hydra
from slipstream.heads.medusa import MedusaConfig, MedusaHeads, save_medusa

NUM_TEXTS = 60
NUM_TOKENS = 48
"""Of each text's end, the target's own greedy answer for the most part."""
NUM_STEPS = 40


@functools.cache
def trained_heads(method: str) -> str:
    """A folder of `medusa` or `hydra` heads that share the target's output layer; seconds of training, seeded."""
    target = AutoModelForCausalLM.from_pretrained(EMBEDDED_TARGET, dtype=torch.float32).requires_grad_(False)
    hidden, embeddings, token_ids = (part.detach() for part in _answers(target))
    config: dict[str, Any] = {"hidden_size": 320, "vocab_size": 4096, "num_heads": 4, "shares_lm_head": True}
    folder = Path(tempfile.mkdtemp(prefix="slipstream-test-heads-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    if method == "medusa":
        medusa = MedusaHeads(MedusaConfig(**config), target.lm_head)
        _train(medusa, [hidden], token_ids)
        save_medusa(medusa, folder)
    else:
        hydra = HydraHeads(HydraConfig(**config), target.lm_head)
        _train(hydra, [hidden, embeddings], token_ids)
        save_hydra(hydra, folder)
    return str(folder)


def _answers(target: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The target's states, embeddings and tokens at the ends of its own answers, [texts, tokens, ...]."""
    llm = LLM(max_num_seqs=16)
    prompts = [encode_chat(llm.engine.tokenizer, row["messages"]) for row in sample_prompts()[-NUM_TEXTS:]]
    wanted = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    texts = [
        prompt + out.outputs[0].token_ids
        for prompt, out in zip(prompts, llm.generate(prompts, wanted), strict=True)
    ]
    with torch.no_grad():
        states = [target.model(torch.tensor([text])).last_hidden_state[0, -NUM_TOKENS:] for text in texts]
    token_ids = torch.tensor([text[-NUM_TOKENS:] for text in texts])
    return torch.stack(states), target.get_input_embeddings()(token_ids), token_ids


def _train(heads: Any, inputs: list[torch.Tensor], token_ids: torch.Tensor) -> None:
    torch.manual_seed(0)
    optimizer = torch.optim.Adam(heads.parameters(), lr=3e-3)
    for _ in range(NUM_STEPS):
        chosen = torch.randint(NUM_TEXTS, (8,))
        optimizer.zero_grad()
        logits = heads(*(part[chosen] for part in inputs))  # [heads, batch, length, vocab]
        sum(_loss(rows, token_ids[chosen], head) for head, rows in enumerate(logits)).backward()
        optimizer.step()


def _loss(logits: torch.Tensor, token_ids: torch.Tensor, head: int) -> torch.Tensor:
    """Cross-entropy of one head's `logits` [batch, length, vocab]: row t guesses token t + 2 + head."""
    wanted = token_ids[:, head + 2 :]
    return torch.nn.functional.cross_entropy(logits[:, : wanted.shape[1]].flatten(0, 1), wanted.flatten())
