"""What the tests on a GPU share: models whose passes are captured, on `cuda`, and on `cpu` through the stand-in for
CUDA's graphs, by which `tests/cuda` tries these helpers where there is no GPU."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from slipstream import LLM, SamplingParams
from slipstream.core.proposal import Proposal
from slipstream.models import CausalLM, RowGroup, load_model
from slipstream.models.rows import tree_rows
from tests.kit.tokenizer_families import byte_level
from tests.parity.tiny_models import FAMILIES, save_tiny

VOCAB = 320
"""A byte-level tokenizer needs so many."""
TEXT = [(17 * i * i + 5 * i + 3) % VOCAB for i in range(26)]
PROMPTS = [TEXT[start : start + 6] for start in range(0, 20, 3)]
NUM_PAST = 12
NODES = [9, 40, 41, 77, 12, 64, 90]
PARENTS = [-1, -1, 0, 0, 1, 3, 5]
NOT_CAPTURED = ("falcon-old", "falcon-new")
"""Families that attend in their own code, over a cache of Transformers'."""


def options(device: str, decodes: bool = False) -> dict[str, Any]:
    """Of an engine or a model whose passes are captured: those of Transformers' code, or of our decoder."""
    if device == "cuda":
        executor = "cuda_kernels" if decodes else "cuda_graph"
        return {"device": device, "attention_backend": "triton", "executor": executor}
    room = "slipstream.testing.recorded_graph"
    executor = "RecordedKernels" if decodes else "RecordedExecutor"
    names = {"attention_backend": f"{room}:TritonOnCpu", "executor": f"{room}:{executor}"}
    return {"device": device, "cpu_kernels": "torch", **names}


def tiny_folder(family: str, folder: Path, seed: int = 0) -> str:
    """A tiny checkpoint of a family, with a tokenizer."""
    config = FAMILIES[family]()
    config.vocab_size = VOCAB
    save_tiny(config, folder, seed)
    byte_level(VOCAB).save_pretrained(folder)
    return str(folder)


def tree_error(
    folder: str, device: str, dtype: str = "float32", captured: bool = True, decodes: bool = False
) -> tuple[float, CausalLM]:
    """How far a pass over a tree is from Transformers' own passes over its paths, on the same device, as a share of the
    largest logit."""
    own = options(device, decodes) if captured else {"device": device}
    lm = load_model(folder, dtype=dtype, **own)
    stock = "eager" if captured else "sdpa"
    kind = getattr(torch, dtype)
    theirs: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=stock, dtype=kind)
    return pass_error(lm, theirs.to(device).eval()), lm


@torch.inference_mode()
def pass_error(lm: CausalLM, theirs: Any) -> float:
    """Of `tree_error`, for models that are loaded; twice, so that a graph is replayed."""
    pool = lm.new_cache(64).pool
    pool.fill(float("nan"))
    tree = Proposal(tuple(NODES), tuple(PARENTS))
    slots = pool.slots
    lm.forward([RowGroup(slots, 0, TEXT[:NUM_PAST], [NUM_PAST - 1])], pool)
    for _ in range(2):
        ours = lm.forward([tree_rows(slots, NUM_PAST, [TEXT[NUM_PAST]], tree, 0)], pool).logits
    expected = torch.stack([_last_logits(theirs, path) for path in checked_paths()])
    return float((ours - expected).float().abs().nan_to_num(torch.inf).max() / expected.float().abs().max())


def checked_paths() -> list[list[int]]:
    """The texts that the rows of the pass stand behind."""
    nodes: list[list[int]] = []
    for token, parent in zip(NODES, PARENTS, strict=True):
        nodes.append([*(nodes[parent] if parent >= 0 else []), token])
    root = TEXT[: NUM_PAST + 1]
    return [root, *(root + path for path in nodes)]


def _last_logits(theirs: Any, token_ids: list[int]) -> Tensor:
    ids = torch.tensor([token_ids], device=theirs.device)
    logits: Tensor = theirs(input_ids=ids, use_cache=False).logits[0, -1]
    return logits


def texts(
    llm: LLM, prompts: Sequence[Any], max_tokens: int = 16, temperature: float = 0.0
) -> list[list[int]]:
    """Answers to token ids or to conversations."""
    params = [
        SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=number, ignore_eos=True)
        for number in range(len(prompts))
    ]
    asked: Any = prompts
    is_chat = isinstance(prompts[0][0], dict)
    outputs = (llm.chat if is_chat else llm.generate)(asked, params)
    assert llm.engine.integrity() == []
    return [output.outputs[0].token_ids for output in outputs]


def num_equal(folder: str | None, device: str, spec: dict[str, Any], **others: Any) -> tuple[int, int]:
    """How many answers are those without speculation, of how many."""
    prompts = [TEXT[start : start + 6] for start in range(0, 20, 3)]
    own = options(device) | others
    off, on = (
        texts(LLM(folder, speculative_config=each, max_model_len=64, **own), prompts) for each in (None, spec)
    )
    return sum(a == b for a, b in zip(off, on, strict=True)), len(PROMPTS)


def check_drafts(folder: str | None, spec: dict[str, Any], prompts: Any, device: str) -> None:
    """The texts are those without the head, in float32 and captured; and it has drafted."""
    own = {"dtype": "float32", **options(device)}
    off = texts(LLM(folder, **own), prompts)
    llm = LLM(folder, speculative_config=spec, **own)
    num_drafted: list[int] = []
    llm.engine.on_observe = lambda seen: num_drafted.extend(len(one.proposal) for one in seen)
    on = texts(llm, prompts)
    assert sum(a == b for a, b in zip(off, on, strict=True)) >= len(off) - 1, "but for a near tie"
    assert sum(num_drafted) > 20
    assert llm.engine.stats().num_draft_failures == 0


def outside(models: Sequence[CausalLM | None]) -> tuple[int, Counter[str]]:
    """Passes that graphs have computed, and others by why."""
    replayed, eager = 0, Counter[str]()
    for model in models:
        executor: Any = model.executor if model is not None else None
        replayed += getattr(executor, "num_replayed", 0)
        eager.update(getattr(executor, "eager", {}))
    return replayed, eager


def share_outside(llm: LLM, prompts: Sequence[Any]) -> float:
    """The share of passes that no graph computes, once the prompts have been answered before."""
    models = [llm.engine.model, llm.engine.draft_model]
    texts(llm, prompts)
    llm.reset_caches()
    replayed, eager = outside(models)
    texts(llm, prompts)
    more, reasons = outside(models)
    others = (reasons - eager).total()
    return others / (others + more - replayed)


def rows_with_other_bits(lm: CausalLM, parents: Sequence[int], context: int) -> int:
    """How many rows of a tree have other logits than the same token decoded alone behind its path."""
    pool = lm.new_cache(context + 64).pool
    tokens = tuple((7 * node + 5) % lm.vocab_size for node in range(len(parents)))
    tree = Proposal(tokens, tuple(parents))
    prompt = [(11 * place + 3) % lm.vocab_size for place in range(context)]
    for begin in range(0, context, 48):
        piece = prompt[begin : begin + 48]
        lm.forward([RowGroup(pool.slots, begin, piece, [])], pool)
    together = lm.forward([tree_rows(pool.slots, context, [3], tree, 0)], pool).logits
    others: set[int] = set()
    for leaf in set(range(len(parents))) - set(parents):
        path = [leaf]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        for depth, row in enumerate([-1, *path]):
            token = 3 if row < 0 else tokens[row]
            alone = lm.forward([RowGroup(pool.slots, context + depth, [token], [0])], pool).logits[0]
            if not torch.equal(alone, together[row + 1]):
                others.add(row)
    return len(others)


def without_fp8(folder: Path, numbers: dict[str, Tensor], plain: Path) -> str:
    """A checkpoint of the numbers that an FP8 one stands for."""
    from safetensors.torch import save_file

    plain.mkdir()
    save_file(numbers, plain / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    del settings["quantization_config"]
    (plain / "config.json").write_text(json.dumps(settings))
    return str(plain)
