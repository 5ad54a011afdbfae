"""What the tests of both drafters of heads share: the embedded target, random heads for it, sequences under way."""

from __future__ import annotations

import dataclasses
import functools
import random
from typing import Any

import pytest
import torch

from slipstream.assets import EMBEDDED_TARGET
from slipstream.core.sequence import Sequence
from slipstream.draft.base import DraftContext
from slipstream.draft.heads.head_executor import pack_head
from slipstream.draft.heads.heads_native import NativeHeads
from slipstream.draft.heads.hydra import HydraConfig, HydraHeads, load_hydra, save_hydra
from slipstream.draft.heads.medusa import MedusaConfig, MedusaDrafter, MedusaHeads, load_medusa, save_medusa
from slipstream.draft.proposers.parallel import HeadDrafter
from slipstream.models import CausalLM, RowGroup, load_model
from slipstream.sampling.params import SamplingParams
from slipstream.testing.stub_drafters import draft_context
from tests.kit.folders import kept_folder

VOCAB, HIDDEN = 4096, 320
CHOICES = [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]


def force(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have heads computed by the CPU kernels (`native`) or as PyTorch modules (`torch`)."""
    if kernels == "torch":
        monkeypatch.setattr(NativeHeads, "refusal", lambda *_: "PyTorch is asked for")


@functools.cache
def target() -> CausalLM:
    return load_model(EMBEDDED_TARGET)


def context(verifier: str = "coupled") -> DraftContext:
    return dataclasses.replace(draft_context(VOCAB, 512, verifier), target=target())


@functools.cache
def random_heads(method: str, num_heads: int = 4, hidden_size: int = HIDDEN, vocab_size: int = VOCAB) -> str:
    """A folder of heads that share the target's output layer and guess at random."""
    shape = {"hidden_size": hidden_size, "vocab_size": vocab_size, "num_heads": num_heads}
    folder = kept_folder()
    heads: Any
    if method == "medusa":
        heads, save = MedusaHeads(MedusaConfig(**shape, shares_lm_head=True), target().project), save_medusa
    else:
        heads, save = HydraHeads(HydraConfig(**shape, shares_lm_head=True), target().project), save_hydra  # type: ignore[assignment]
    generator = torch.Generator().manual_seed(0)
    for parameter in heads.parameters():
        parameter.data += torch.randn(parameter.shape, generator=generator) * 0.05
    save(heads, folder)
    return str(folder)


def reference(drafter: HeadDrafter) -> Any:
    """The drafter's heads, read anew, as PyTorch modules over layers of its weight format."""
    load = load_medusa if isinstance(drafter, MedusaDrafter) else load_hydra
    heads = load(drafter.options.model, target().project)
    pack_head(heads, target(), target().head_format(drafter.options.quantization))
    return heads


def text(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(6, VOCAB) for _ in range(length)]


def computed(
    drafter: Any,
    token_ids: list[int],
    temperature: float = 0.0,
    number: int = 0,
    features: tuple[int, ...] | None = None,
) -> tuple[Sequence, torch.Tensor]:
    """A sequence whose tokens but the last the target has computed; and the state behind the last of these.

    `features` are the layers that the drafter reads, None: the last.
    """
    sequence = Sequence(
        id=number,
        request_id=str(number),
        index=0,
        token_ids=list(token_ids),
        num_prompt_tokens=len(token_ids),
        params=SamplingParams(temperature=temperature, max_tokens=100),
        seed=number,
        num_computed=len(token_ids) - 1,
    )
    lm = target()
    layers = (lm.num_layers,) if features is None else features
    if drafter.target_cache is None:
        width = len(layers) * lm.hidden_size
        drafter.attach(lm.new_cache(2048, prefix_caching=False, feature_width=width))
    cache = drafter.target_cache
    cache.accounting.open(number, token_ids, "")
    cache.accounting.reserve(number, len(token_ids) + 8)
    slots = cache.accounting.slots(number)
    output = lm.forward([RowGroup(slots, 0, token_ids[:-1], [], owner=0)], cache.pool, layers)
    states = torch.cat([output.hidden[layer] for layer in layers], dim=-1)
    cache.keep_features(slots[: len(states)], states)
    cache.accounting.commit(number, token_ids[:-1])
    return sequence, states[-1]
