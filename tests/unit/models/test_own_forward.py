"""Layers that compute their attention by themselves, and get a forward of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor

from slipstream.errors import UnsupportedModelError
from slipstream.models import load_model
from slipstream.models.attention import own_forward
from slipstream.models.attention.own_forward import LinearBias
from slipstream.models.support import context_length
from tests.parity.tiny_models import LIKE_OTHERS, save_tiny


def checkpoint(family: str, folder: Path, **changes: Any) -> str:
    config = LIKE_OTHERS[family]()
    for name, value in changes.items():
        setattr(config, name, value)
    return str(save_tiny(config, folder))


@pytest.mark.parametrize("heads", [4, 6, 16])
@pytest.mark.parametrize("family", ["bloom", "mpt"])
def test_a_linear_bias_is_transformers_at_any_distance(family: str, heads: int) -> None:
    length = 3000
    if family == "bloom":
        build = tf.BloomModel.build_alibi_tensor
        made = [build(None, torch.ones(1, number), heads, torch.float32) for number in (2, length)]
    else:
        made = [tf.MptModel.build_mpt_alibi_tensor(None, heads, number) for number in (2, length)]
    bias, whole = LinearBias(made[0]), made[1].double()  # [heads, 1, entries]
    distance = torch.arange(length - 1, -1, -1)
    expected = whole - whole[..., -1:]  # of the last row, so that the nearest entry gets nothing
    assert torch.allclose(bias(distance[None]).double(), expected, rtol=1e-5, atol=1e-3)
    assert float(expected.abs().max()) > 500


def test_a_bias_that_is_wrong_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heads = 6

    def flat(_: Any, distance: Tensor) -> Tensor:
        return torch.zeros(heads, *distance.shape)

    monkeypatch.setattr(LinearBias, "__call__", flat)
    with pytest.raises(UnsupportedModelError, match="its attention would be computed wrongly"):
        load_model(checkpoint("bloom", tmp_path))


def test_a_mask_that_is_not_the_hooks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkpoint("mpt", tmp_path)

    def everything(**_: Any) -> Tensor:
        return torch.zeros(1, 1, 1, 1)

    monkeypatch.setattr("transformers.models.mpt.modeling_mpt.create_causal_mask", everything)
    with pytest.raises(
        UnsupportedModelError, match="the mask of layer 0 is neither causal nor a sliding window"
    ):
        load_model(folder)


def test_sums_of_slices_are_refused(tmp_path: Path) -> None:
    folder = checkpoint("bloom", tmp_path, pretraining_tp=2, slow_but_exact=True)
    with pytest.raises(UnsupportedModelError, match="set slow_but_exact to false"):
        load_model(folder)


def test_classes_that_are_looked_up_by_name_are_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_forward, "FORWARDS", {})
    with pytest.raises(UnsupportedModelError, match="does not go through the attention interface"):
        load_model(checkpoint("gpt-neo", tmp_path))


def test_how_long_texts_are() -> None:
    assert context_length(tf.BloomConfig()) == 2048
    assert context_length(tf.BloomConfig(seq_length=512)) == 512
    assert context_length(tf.BloomConfig(), 5000) == 5000
    assert context_length(tf.MptConfig(max_seq_len=300), 5000) == 300  # Transformers has no bias beyond
