"""Rows that see no chunk of positions but their own: in the CPU kernels, and in an engine's texts of a Llama 4."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, Llama4TextConfig, LlamaConfig, PreTrainedTokenizerFast

from slipstream import LLM, SamplingParams
from slipstream.kv.pool import KVPool
from slipstream.models import RowGroup, adapt
from slipstream.models.attention import hook
from slipstream.models.attention.base import ATTENTION_NAME
from slipstream.models.executor.cpu_kernels import CpuKernels
from tests.kit.marks import needs_kernels
from tests.kit.small_llama import sizes

CHUNK = 37
LENGTH = 180
TEXT = [(17 * i * i + 5 * i + 3) % 96 for i in range(LENGTH)]


def logits(backend: str, monkeypatch: pytest.MonkeyPatch) -> tuple[torch.Tensor, Any]:
    """Of a Llama whose first layer has chunks: of a prompt in two parts, and of a tree that grows over a boundary."""
    torch.manual_seed(2)
    config = LlamaConfig(**sizes(48, 2, 4, 2, vocab=96, inner=72, spread=0.3, context=256))
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME).eval()
    monkeypatch.setattr(hook, "chunk_of", lambda module, layer: CHUNK if layer == 0 else None)
    lm = adapt(model, canary=False, attention_backend=backend)  # Transformers' own masks have no chunks
    begin, depth = 4 * CHUNK - 5, 12
    pool = KVPool(lm.shapes, LENGTH, lm.dtype, lm.device)
    pool.fill(float("nan"))
    found = [
        lm.forward([RowGroup(pool.slots, first, TEXT[first:end], range(end - first))], pool).logits
        for first, end in ((0, 100), (100, begin))
    ]
    tokens = [(TEXT[begin + level] + wrong) % 96 for level in range(depth) for wrong in (1, 0)]
    right = [2 * level + 1 for level in range(depth)]
    seen = [[*right[: node // 2], node] for node in range(len(tokens))]
    positions = [begin + node // 2 for node in range(len(tokens))]
    tree = RowGroup(pool.slots, begin, tokens, range(len(tokens)), positions, (), seen)
    return torch.cat([*found, lm.forward([tree], pool).logits[right]]), lm


@needs_kernels
def test_the_kernels_see_the_chunk_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, lm = logits("native", monkeypatch)
    assert isinstance(lm.executor, CpuKernels)
    expected, _ = logits("packed", monkeypatch)
    assert (ours - expected).abs().max() < 1e-4 * expected.std()


def llama4(folder: Path, seed: int = 4) -> Any:
    torch.manual_seed(seed)
    shape = sizes(
        32, 3, 4, 2, vocab=96, inner=48, head_dim=8, spread=0.3, context=128, bos=1, eos=None, pad=0
    )
    scaled = {"floor_scale": 7, "no_rope_layers": [1, 0, 1], "attention_chunk_size": 8}
    config = Llama4TextConfig(
        **shape, **scaled, intermediate_size_mlp=40, num_local_experts=4, moe_layers=[1]
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(folder)
    words = models.WordLevel({str(number): number for number in range(96)}, unk_token="0")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words)).save_pretrained(folder)
    return model


@pytest.mark.parametrize(
    "speculation",
    [
        None,
        {"method": "ngram", "num_speculative_tokens": 5},
        {"method": "draft_model", "num_speculative_tokens": 3},
    ],
    ids=["off", "ngram", "draft"],
)
def test_an_engines_texts_are_llama_4s_own(speculation: dict[str, Any] | None, tmp_path: Path) -> None:
    """Prompts in parts that end within chunks, and a second turn that goes on from what is kept of the first."""
    model = llama4(tmp_path / "target")
    llama4(tmp_path / "draft", seed=4 if speculation is None else 5)
    if speculation is not None and speculation["method"] == "draft_model":
        speculation = {**speculation, "model": str(tmp_path / "draft")}

    def own(prompt: list[int], length: int) -> list[int]:
        text = list(prompt)
        for _ in range(length):
            with torch.inference_mode():
                text.append(
                    int(model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1].argmax())
                )
        return text[len(prompt) :]

    prompts = [TEXT[:21], [5, 9, 2, 7] * 5 + [5]]
    options = {"max_num_batched_tokens": 16, "kv_cache_bytes": 1 << 22}
    llm = LLM(str(tmp_path / "target"), speculative_config=speculation, **options)
    params = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True, detokenize=False)
    for turn in range(2):
        found = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        answers = [list(each.outputs[0].token_ids) for each in found]
        assert answers == [own(prompt, 14) for prompt in prompts], turn
        prompts = [prompt + answer + [3, 11] for prompt, answer in zip(prompts, answers, strict=True)]
