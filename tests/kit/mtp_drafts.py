"""Drafters over the targets of `mtp_targets`, and what tests ask of them."""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream import LLM, SamplingParams
from slipstream.config import SpeculativeConfig
from slipstream.core.sequence import Sequence
from slipstream.draft.base import DraftContext
from slipstream.draft.heads.mtp import MtpDrafter
from slipstream.draft.registry import create_drafter
from slipstream.kv.pool import KVPool
from slipstream.models import CausalLM, RowGroup, load_model
from slipstream.testing.stub_drafters import draft_context
from tests.kit.mtp_targets import VOCAB, MtpTarget, mtp_target

TEXT = [(37 * place + 11) % VOCAB for place in range(14)]
CLOSE = 1e-4


@functools.cache
def target(family: str) -> CausalLM:
    return load_model(mtp_target(family).folder)


def context(family: str, verifier: str = "coupled") -> DraftContext:
    return dataclasses.replace(draft_context(VOCAB, 256, verifier), target=target(family))


def make(family: str, verifier: str = "coupled", **options: Any) -> MtpDrafter:
    drafter = create_drafter(SpeculativeConfig("mtp", verifier, options), context(family, verifier))
    assert isinstance(drafter, MtpDrafter)
    return drafter


def states_of(family: str, text: list[int]) -> Tensor:
    """[tokens, hidden]: what the target's final norm puts out."""
    lm = target(family)
    pool, slots = lm.trial_cache(len(text))
    group = RowGroup(slots, 0, text, [], owner=0)
    return lm.forward([group], pool, [lm.num_layers]).hidden[lm.num_layers]


def flags(made: MtpTarget) -> dict[str, bool]:
    return {"hidden_first": made.layout == "mimo", "masks_first": made.layout in ("deepseek", "mimo")}


def fill(rows: int, drafter: MtpDrafter) -> KVPool:
    """A pool in which every number that was not written is NaN."""
    device = torch.device("cpu")
    pool = KVPool(drafter.head.shapes, rows, torch.float32, device, drafter.head.kept_width)
    pool.fill(float("nan"))
    return pool


def drafted(drafter: MtpDrafter, text: list[int], depth: int) -> list[int]:
    """The greedy chain behind a text, by a drafter over the states of its target."""
    lm = drafter.target
    drafter.allocate(256)
    cache = lm.new_cache(256, prefix_caching=False, feature_width=lm.hidden_size)
    drafter.attach(cache)
    sequence = Sequence(
        id=0,
        request_id="0",
        index=0,
        token_ids=list(text),
        num_prompt_tokens=len(text),
        params=SamplingParams(temperature=0, max_tokens=64),
        seed=0,
        num_computed=len(text) - 1,
    )
    cache.accounting.open(0, text, "")
    cache.accounting.reserve(0, len(text) + 8)
    slots = cache.accounting.slots(0)
    states = lm.forward([RowGroup(slots, 0, text[:-1], [], owner=0)], cache.pool, [lm.num_layers]).hidden[
        lm.num_layers
    ]
    cache.keep_features(slots[: len(states)], states)
    cache.accounting.commit(0, text[:-1])
    (proposal,) = drafter.propose([sequence], [depth])
    return list(proposal.token_ids)


def texts(llm: LLM) -> list[list[int]]:
    prompts = [TEXT, TEXT[:5], [*TEXT[:9], 7, 3], TEXT]
    params = [
        SamplingParams(temperature=temperature, seed=number, max_tokens=18, ignore_eos=True)
        for number, temperature in enumerate((0.0, 0.0, 0.8, 0.8))
    ]
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params)]


@functools.cache
def texts_without(family: str) -> list[list[int]]:
    return texts(LLM(mtp_target(family).folder))


def changed(tmp_path: Path, change: Any, family: str = "llama") -> str:
    """A copy of the family's target, with other tensors or another configuration."""
    folder = tmp_path / "changed"
    shutil.copytree(mtp_target(family).folder, folder)
    tensors, config = (
        load_file(folder / "model.safetensors"),
        json.loads((folder / "config.json").read_text()),
    )
    change(tensors, config)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)
