"""Tensors that a model does not read are left in its files, and reach the drafter that asks for them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from slipstream.config import SpeculativeConfig
from slipstream.core.proposal import EMPTY_PROPOSAL
from slipstream.draft.base import DraftContext, Drafter
from slipstream.draft.methods import MethodSpec
from slipstream.draft.registry import DRAFTERS, create_drafter
from slipstream.errors import ModelError
from slipstream.models import load_model
from slipstream.models.files import unused
from slipstream.models.files.unused import unused_by
from slipstream.testing.stub_drafters import draft_context

LAYERS = 2
PREDICTION = {
    "mtp.fc.weight": torch.arange(512.0).reshape(16, 32),
    f"model.layers.{LAYERS}.mlp.up_proj.weight": torch.ones(32, 16),
}


def saved(folder: Path, *, is_sharded: bool = False, **config: Any) -> str:
    """A tiny Llama with prediction layers in its file, or in a shard of their own."""
    torch.manual_seed(0)
    shape = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": LAYERS}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    LlamaForCausalLM(LlamaConfig(**shape, **heads, **config)).save_pretrained(folder)
    file = folder / "model.safetensors"
    state = load_file(file)
    if not is_sharded:
        save_file(state | PREDICTION, file, metadata={"format": "pt"})
        return str(folder)
    file.unlink()
    shards = {"model-1.safetensors": state, "model-2.safetensors": PREDICTION}
    for name, tensors in shards.items():
        save_file(tensors, folder / name, metadata={"format": "pt"})
    weight_map = {tensor: name for name, tensors in shards.items() for tensor in tensors}
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return str(folder)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that were opened to look for unused tensors."""
    names: list[str] = []
    real: Callable[..., Any] = unused.safe_open

    def counted(file: Path, framework: str) -> Any:
        names.append(file.name)
        return real(file, framework)

    monkeypatch.setattr(unused, "safe_open", counted)
    return names


@pytest.mark.parametrize("is_sharded", [False, True])
def test_they_are_offered_and_read_when_they_are_asked_for(
    tmp_path: Path, opened: list[str], is_sharded: bool
) -> None:
    lm = load_model(saved(tmp_path, is_sharded=is_sharded, num_nextn_predict_layers=1))
    assert opened == [], "nobody has asked"
    assert set(lm.unused_tensors) == set(PREDICTION)
    assert "model.norm.weight" not in lm.unused_tensors, "the model reads it"
    headers = len(opened)
    assert headers == 1 + is_sharded
    for name, tensor in PREDICTION.items():
        assert torch.equal(lm.unused_tensors[name], tensor)
    assert opened[headers:] == ["model-2.safetensors" if is_sharded else "model.safetensors"] * 2


def test_tensors_that_nothing_speaks_of_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has unknown weights: model\.layers\.2\S+ and 1 more"):
        load_model(saved(tmp_path / "undeclared"))
    folder = saved(tmp_path / "declared", num_nextn_predict_layers=1)
    file = Path(folder) / "model.safetensors"
    save_file(load_file(file) | {"model.extra.weight": torch.ones(2)}, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"has unknown weights: model\.extra\.weight"):
        load_model(folder)


@pytest.mark.parametrize(
    "family",
    ["deepseek_v3", "qwen3_next"],
)
def test_families_whose_class_in_transformers_names_them_need_no_count(family: str) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = CONFIG_MAPPING[family]()
    is_unused = unused_by(config)
    name = (
        f"model.layers.{config.num_hidden_layers}.eh_proj.weight"
        if family == "deepseek_v3"
        else "mtp.fc.weight"
    )
    assert is_unused(name)
    assert not is_unused(f"model.layers.{config.num_hidden_layers - 1}.mlp.up_proj.weight")


@dataclass(frozen=True)
class NoOptions:
    """No keys."""


class PredictionDrafter(Drafter):
    """Reads the prediction layers."""

    Options = NoOptions
    spec: ClassVar[MethodSpec | None] = MethodSpec(
        name="prediction",
        drafter="prediction:PredictionDrafter",
        help="drafts with the target's prediction layers",
        reads_unused_tensors=True,
    )

    def __init__(self, options: NoOptions, context: DraftContext) -> None:
        super().__init__(options, context)
        self.read: dict[str, Tensor] = dict(context.unused_tensors)

    def propose(self, sequences: Any, budgets: Any) -> Any:
        return [EMPTY_PROPOSAL] * len(sequences)


class PlainDrafter(PredictionDrafter):
    """Does not say that it reads them."""

    spec = None


@pytest.fixture
def registered() -> Iterator[None]:
    for name, cls in (("prediction", PredictionDrafter), ("plain", PlainDrafter)):
        DRAFTERS.register(name, cls)
    yield
    for name in ("prediction", "plain"):
        DRAFTERS.unregister(name)


def test_they_reach_the_drafter_whose_method_reads_them_and_no_other(
    tmp_path: Path, registered: None, opened: list[str]
) -> None:
    folder = saved(tmp_path, num_nextn_predict_layers=1)
    context = dataclasses.replace(draft_context(64, 48), target=load_model(folder))
    plain = create_drafter(SpeculativeConfig("plain"), context)
    assert isinstance(plain, PlainDrafter)
    assert plain.read == {}
    assert opened == []
    drafter = create_drafter(SpeculativeConfig("prediction"), context)
    assert isinstance(drafter, PredictionDrafter)
    assert drafter.read.keys() == PREDICTION.keys()
    assert torch.equal(drafter.read["mtp.fc.weight"], PREDICTION["mtp.fc.weight"])
