"""A pass over some of the layers is the pass of a model that has only those layers, or is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, VOCAB, save_tiny
from torch import nn
from transformers import AutoModelForCausalLM

from slipstream.errors import ConfigError
from slipstream.kv.pool import KVPool
from slipstream.models import RowGroup, load_model

TEXT = [(17 * i * i + 5 * i + 3) % VOCAB for i in range(20)]
REFUSED = {"gemma3", "gemma3-odd", "gemma3n", *(family for family in FAMILIES if family.startswith("gemma4"))}
"""Layer by layer, theirs are given one of two rotary embeddings by their place, or inputs of their own."""
BY_PLACE = {"gemma3n", "gemma4-shared"}
"""Transformers' layers of a shorter model are given other inputs; see test_shared_entries for what they store."""


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("cpu_kernels", ["native", "torch"])
def test_subset_is_the_model_with_those_layers(family: str, cpu_kernels: str, tmp_path: Path) -> None:
    save_tiny(FAMILIES[family](), tmp_path)
    lm = load_model(str(tmp_path), cpu_kernels=cpu_kernels)
    pool = KVPool(lm.shapes, len(TEXT), lm.dtype, lm.device)
    pool.fill(float("nan"))
    if family in REFUSED and lm.kernels != "decoder":
        with pytest.raises(ConfigError, match=r"gemma.* cannot run some of its layers"):
            lm.forward([RowGroup(pool.slots, 0, TEXT, [0])], pool, layers=[0, 2])
        return
    if family in BY_PLACE:
        return
    whole = run(lm, None)
    for layers in ([0, 2], [0], [1, 2]):
        assert torch.allclose(run(lm, layers), reference(tmp_path, layers), atol=2e-4, rtol=2e-4)
    assert torch.equal(run(lm, None), whole)
    lm.forward([RowGroup(pool.slots, 0, TEXT, [0])], pool, layers=[0, 2])
    assert bool(pool.keys[1].isnan().all())
    assert not bool(pool.keys[2].isnan().any())


def run(lm: Any, layers: list[int] | None) -> torch.Tensor:
    """The logits of the text, in two chunks."""
    pool = KVPool(lm.shapes, len(TEXT), lm.dtype, lm.device)
    chunks = [RowGroup(pool.slots, begin, TEXT[begin : begin + 10], range(10)) for begin in (0, 10)]
    return torch.cat([lm.forward([chunk], pool, layers=layers).logits for chunk in chunks])


def reference(path: Path, layers: list[int]) -> torch.Tensor:
    """Transformers' own logits with the other layers taken out of the model."""
    model: Any = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    parent, name = next(
        (parent, name)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.ModuleList) and name in ("layers", "h")
    )
    kept = [getattr(parent, name)[layer] for layer in layers]
    setattr(parent, name, nn.ModuleList(kept))
    config = model.config
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[layer] for layer in layers]
    config.num_hidden_layers = len(layers)
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=torch.tensor([TEXT]), use_cache=False).logits[0]
    return logits


@pytest.mark.parametrize("layers", [[], [1, 0], [0, 0], [3], [-1]])
def test_impossible_layers_are_refused(layers: list[int], tmp_path: Path) -> None:
    save_tiny(FAMILIES["llama"](), tmp_path)
    lm = load_model(str(tmp_path))
    with pytest.raises(ValueError, match="layers"):
        run(lm, layers)
