"""A head's first layer learns of features whose channels are about as large, and files have its plain weight."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedTokenizerBase

from slipstream.draft.heads.dflash_files import read_dflash
from slipstream.draft.heads.eagle_files import read_eagle
from slipstream.errors import ConfigError
from slipstream.train.batches import Cursor, TrainingDocument, make_batch, row_batches
from slipstream.train.block_options import BlockTrainOptions
from slipstream.train.channels import channel_scale, scaled, without_scales
from slipstream.train.dflash import BlockStudent
from slipstream.train.eagle import EagleStudent, first_norm, output_weight
from slipstream.train.options import EagleTrainOptions, PEagleTrainOptions, TrainOptions
from slipstream.train.peagle import PEagleStudent
from slipstream.train.target import FrozenTarget
from slipstream.train.trainer import Trainer, make_optimizers

SCALE = torch.tensor([1.0, 1500.0, 0.25])


@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_computes_what_it_did_and_learns_of_the_divided_input(bias: bool) -> None:
    torch.manual_seed(0)
    plain, inputs = nn.Linear(3, 2, bias=bias), torch.randn(5, 3) * SCALE
    layer = scaled(plain, SCALE, is_fresh=False)
    torch.testing.assert_close(layer(inputs), plain(inputs))
    layer(inputs).sum().backward()
    torch.testing.assert_close(layer.weight.grad, (inputs / SCALE).sum(dim=0).expand(2, 3))
    saved = without_scales(nn.Sequential(layer))[0]
    assert type(saved) is nn.Linear
    torch.testing.assert_close(saved.state_dict(), plain.state_dict())


def test_a_fresh_layer_weighs_all_channels_alike() -> None:
    torch.manual_seed(0)
    fresh = nn.Linear(3, 4000, bias=False)
    nn.init.normal_(fresh.weight, std=0.02)
    layer = scaled(fresh, SCALE, is_fresh=True)
    torch.testing.assert_close(layer.weight.std(dim=0), torch.full((3,), 0.02), rtol=0.05, atol=0)


def test_the_scale_is_that_of_the_features(target: FrozenTarget, documents: list[TrainingDocument]) -> None:
    scale = channel_scale(target, documents[:3], (1, 3))
    squares = []
    for document in documents[:3]:
        batch = make_batch(
            next(row_batches([document], 1, len(document.tokens), 0, 0, Cursor())), target, (1, 3)
        )
        squares.append(torch.cat([batch.hidden_states[1], batch.hidden_states[3]], dim=-1)[0].square())
    powers = (scale / torch.cat(squares).mean(dim=0).sqrt()).log2()
    assert float(powers.abs().max()) <= 0.501
    assert torch.equal(scale.log2(), scale.log2().round())


Make = Callable[..., "EagleStudent | PEagleStudent | BlockStudent"]


@pytest.fixture
def make(target: FrozenTarget, tokenizer: PreTrainedTokenizerBase, documents: list[TrainingDocument]) -> Make:
    """A student of a kind, with options of its own."""

    def made(kind: str, **options: Any) -> EagleStudent | PEagleStudent | BlockStudent:
        if kind == "eagle3":
            return EagleStudent(EagleTrainOptions(**options), target, documents, 3, 0)
        if kind == "peagle":
            return PEagleStudent(PEagleTrainOptions(**options), target, tokenizer, documents, 0)
        return BlockStudent(BlockTrainOptions(**options), target, tokenizer, documents, kind, 0)

    return made


@pytest.mark.parametrize("kind", ["eagle3", "peagle", "dflash"])
def test_what_is_saved_is_the_head_that_learned(
    kind: str, make: Make, target: FrozenTarget, tmp_path: Path
) -> None:
    made = make(kind)
    features = torch.randn(2, 5, len(made.feature_layers) * target.hidden_size)
    assert type(made.head.fc) is not nn.Linear
    made.save(tmp_path)
    read = read_dflash if kind == "dflash" else read_eagle
    torch.testing.assert_close(read(str(tmp_path), target).encode(features), made.head.encode(features))


def test_an_output_layer_that_is_kept_does_not_learn(
    target: FrozenTarget, documents: list[TrainingDocument]
) -> None:
    made = EagleStudent(EagleTrainOptions(freeze_lm_head=True), target, documents, 3, 0)
    torch.testing.assert_close(made.head.lm_head.weight, output_weight(target))
    learning = {name for name, weight in made.head.named_parameters() if weight.requires_grad}
    assert "lm_head.weight" not in learning
    assert "norm.weight" in learning


def test_the_first_logits_vary_by_one(target: FrozenTarget) -> None:
    torch.manual_seed(0)
    states = nn.functional.rms_norm(torch.randn(200, target.hidden_size), (target.hidden_size,))
    logits = states * first_norm(target) @ output_weight(target).T
    assert 0.8 < float(logits.std()) < 1.2


def test_muon_leaves_a_pruned_output_layer_to_adamw_and_nothing_else(
    target: FrozenTarget, documents: list[TrainingDocument]
) -> None:
    shape = EagleTrainOptions(draft_vocab_size=48, intermediate_size=48)
    made = EagleStudent(shape, target, documents, 3, 0)
    muon, adamw = make_optimizers(
        made.module, target.vocab_size, TrainOptions(max_tokens=1, optimizer="muon")
    )
    assert any(weight is made.head.lm_head.weight for weight in adamw.param_groups[0]["params"])
    assert all(weight.ndim == 1 or len(weight) == 48 for weight in adamw.param_groups[0]["params"])
    assert any(weight is made.head.layer.mlp.up_proj.weight for weight in muon.param_groups[0]["params"])


def test_eagle_1_has_no_output_layer_to_keep(target: FrozenTarget, documents: list[TrainingDocument]) -> None:
    with pytest.raises(ConfigError, match="--freeze-lm-head is for EAGLE-3"):
        EagleStudent(EagleTrainOptions(freeze_lm_head=True), target, documents, 1, 0)


def test_a_checkpoint_of_another_version_is_refused(
    target: FrozenTarget, documents: list[TrainingDocument], tmp_path: Path
) -> None:
    def run() -> None:
        student = EagleStudent(EagleTrainOptions(), target, documents, 3, 0)
        options = TrainOptions(max_tokens=200, batch_rows=1, row_length=48)
        Trainer(student, target, documents, 0, options, tmp_path, {}).run()

    run()
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    del state["module"]["fc.scale"]
    torch.save(state, tmp_path / "checkpoint.pt")
    with pytest.raises(ConfigError, match="is of another version of Slipstream; choose another --output"):
        run()


@pytest.mark.parametrize("kind", ["eagle3", "peagle", "dflash"])
def test_a_head_to_begin_with_is_saved_as_it_was(kind: str, make: Make, tmp_path: Path) -> None:
    make(kind).save(tmp_path / "first")
    make(kind, init=str(tmp_path / "first")).save(tmp_path / "second")
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("first", "second"))
    assert first.keys() == second.keys()
    for name, weight in first.items():
        assert torch.equal(weight, second[name]), name
