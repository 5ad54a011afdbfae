"""The frequencies of rotary embeddings: Transformers' own, with powers that are rounded once."""

from __future__ import annotations

import logging
from decimal import Decimal, localcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from slipstream.models.families.frequencies import Rotation

KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 2.5},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 4096},
}


def rotary(kind: str, head_dim: int, theta: float) -> LlamaRotaryEmbedding:
    parameters = {"rope_type": kind, "rope_theta": theta, **KINDS[kind]}
    config = LlamaConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        max_position_embeddings=16384,
        rope_parameters=parameters,
    )
    return LlamaRotaryEmbedding(config)


@pytest.mark.parametrize("head_dim", [2, 64, 80, 96, 128])
@pytest.mark.parametrize("theta", [1e4, 5e5, 1e6, 1e7])
def test_powers_are_rounded_once(head_dim: int, theta: float) -> None:
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    with localcontext() as context:
        context.prec = 40
        powers = [np.float32(float(Decimal(theta) ** Decimal(float(exponent)))) for exponent in exponents]
    expected = [float(np.float32(1.0) / power) for power in powers]
    assert Rotation(rotary("default", head_dim, theta)).inverse_frequencies.tolist() == expected


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_that_of_transformers_to_a_rounding(kind: str) -> None:
    for head_dim in (64, 96, 128):
        given = rotary(kind, head_dim, 5e5)
        torch.testing.assert_close(Rotation(given).inverse_frequencies, given.inv_freq, rtol=3e-7, atol=0.0)


def test_frequencies_that_no_configuration_gives_are_kept(caplog: pytest.LogCaptureFixture) -> None:
    changed = rotary("default", 64, 1e4)
    changed.inv_freq = nn.Buffer(changed.inv_freq * 1.5)

    class Own(nn.Module):
        inv_freq = torch.ones(3)

    class Refusing(LlamaRotaryEmbedding):
        def __init__(self, config: LlamaConfig, only_once: list[int]) -> None:
            super().__init__(config)

    class Broken(LlamaRotaryEmbedding):
        def __init__(self, config: LlamaConfig) -> None:
            raise KeyError("factor")

    broken = Broken.__new__(Broken)
    nn.Module.__init__(broken)
    broken.config, broken.inv_freq = changed.config, changed.inv_freq
    given = {
        "gives others": changed,
        "'Own' object has no attribute 'config'": Own(),
        "missing 1 required positional argument: 'only_once'": Refusing(changed.config, []),
        "'factor'": broken,
    }
    for reason, each in given.items():
        caplog.clear()
        with caplog.at_level(logging.INFO, "slipstream"):
            assert torch.equal(Rotation(each).inverse_frequencies, each.inv_freq)
        assert f"rotary frequencies of {type(each).__name__} are taken as they are" in caplog.text
        assert reason in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO, "slipstream"):
        assert len(Rotation(rotary("default", 64, 1e4)).inverse_frequencies) == 32
    assert not caplog.text
