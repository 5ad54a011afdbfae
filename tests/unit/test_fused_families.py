"""The fused decoder takes over a family of somebody else's, by a description of its names alone."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRMSNorm

from slipstream.core import Proposal
from slipstream.errors import ConfigError, UnsupportedModelError
from slipstream.kv.pool import KVPool
from slipstream.models import CausalLM, RowGroup, adapt
from slipstream.models.cpu.families import FAMILIES, Family, Llama, find_family
from slipstream.models.rows import tree_rows

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 70,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}
TEXT = [(17 * i * i + 5 * i + 3) % 96 for i in range(20)]


class ToyConfig(LlamaConfig):
    model_type = "toy_llama"


class ToyLayer(nn.Module):
    """A Llama layer whose parts have other names."""

    def __init__(self, config: Any, number: int) -> None:
        super().__init__()
        self.before = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mixer = LlamaAttention(config, number)
        self.between = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.w1 = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.w3 = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.w2 = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden_states: Tensor, **keywords: Any) -> Tensor:
        hidden_states = hidden_states + self.mixer(self.before(hidden_states), **keywords)[0]
        normed = self.between(hidden_states)
        mixed: Tensor = self.w2(nn.functional.silu(self.w1(normed)) * self.w3(normed))
        return hidden_states + mixed


class ToyForCausalLM(LlamaForCausalLM):
    config_class = ToyConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.layers = nn.ModuleList(ToyLayer(config, i) for i in range(config.num_hidden_layers))
        self.post_init()


class Toy(Family):
    """What differs from Llama's names."""

    package = __name__
    attention_norm = "before"
    mlp_norm = "between"
    query, key, value = "mixer.q_proj", "mixer.k_proj", "mixer.v_proj"
    output = "mixer.o_proj"
    gate, up, down = "w1", "w3", "w2"


class Swapped(Toy):
    """Takes the one half of the MLP for the other."""

    gate, up = "w3", "w1"


class Incomplete(Toy):
    gate = "w4"


class Forgetful(Toy):
    """Leaves out a part: the first layer norm is said to be the second."""

    attention_norm = "between"


@pytest.fixture(scope="module", autouse=True)
def toy_class() -> Iterator[None]:
    AutoModelForCausalLM.register(ToyConfig, ToyForCausalLM, exist_ok=True)
    yield
    AutoModelForCausalLM._model_mapping._extra_content.pop(ToyConfig)


@pytest.fixture
def family(request: pytest.FixtureRequest) -> Iterator[None]:
    FAMILIES.register("toy_llama", request.param)
    yield
    FAMILIES.unregister("toy_llama")


def toy_model() -> Any:
    torch.manual_seed(0)
    model = ToyForCausalLM._from_config(ToyConfig(**SHAPE), attn_implementation="slipstream")
    for name, parameter in model.named_parameters():
        if "before" in name or "between" in name:
            nn.init.uniform_(parameter, 0.5, 1.5)
    return model.eval()


def logits(lm: CausalLM, begin: int, end: int, proposal: Proposal | None = None) -> Tensor:
    pool = KVPool(lm.shapes, 64, lm.dtype, lm.device)
    if begin:
        lm.forward([RowGroup(pool.slots, 0, TEXT[:begin], [])], pool)
    if proposal is None:
        return lm.forward([RowGroup(pool.slots, begin, TEXT[begin:end], range(end - begin))], pool).logits
    return lm.forward([tree_rows(pool.slots, begin, TEXT[begin:end], proposal, 0)], pool).logits


@pytest.mark.parametrize("family", [Toy, f"{__name__}:Toy"], indirect=True, ids=["class", "place"])
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_a_registered_family_is_fused_and_computes_what_it_did(
    family: None, quantization: str | None
) -> None:
    model = toy_model()
    theirs = copy.deepcopy(model)
    theirs.set_attn_implementation("eager")
    with torch.inference_mode():
        expected = theirs(input_ids=torch.tensor([TEXT]), use_cache=False).logits[0]
    lm = adapt(model, quantization=quantization)
    assert lm.kernels == "decoder"
    atol = 1e-4 if quantization is None else 0.3 * float(expected.std())
    assert torch.allclose(logits(lm, 0, 20), expected, atol=atol)
    wrong = (TEXT[17] + 1) % 96
    tree = Proposal((wrong, TEXT[17], TEXT[18], TEXT[19]), (-1, -1, 1, 2))
    below = logits(lm, 10, 17, tree)[[-3, -2, -1]]
    assert torch.allclose(below, expected[17:], atol=atol)
    assert torch.equal(below, logits(lm, 0, 20)[17:]), "a row's bits do not depend on its company"


def test_without_registration_it_runs_layer_by_layer(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert adapt(toy_model()).kernels == "native"
    assert "the fused decoder knows llama, mistral, qwen2, qwen3" in caplog.text


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        (Incomplete, "it lacks a part of its family: 'ToyLayer' object has no attribute 'w4'"),
        (Forgetful, "its layers have before.weight, which its family does not name"),
        (Llama, "its code is not that of transformers.models"),
    ],
    indirect=["family"],
)
def test_a_description_that_does_not_fit_is_not_used(
    family: None, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert adapt(toy_model()).kernels == "native"
    assert reason in caplog.text


@pytest.mark.parametrize("family", [Swapped], indirect=True)
def test_a_wrong_description_is_refused_by_its_logits(family: None) -> None:
    with pytest.raises(UnsupportedModelError, match="over a dozen rows the logits differ"):
        adapt(toy_model())


def test_a_built_in_family_cannot_be_taken_over() -> None:
    with pytest.raises(ConfigError, match="family 'llama' exists already"):
        FAMILIES.register("llama", Toy)
    assert isinstance(find_family(LlamaForCausalLM(LlamaConfig(**SHAPE))), Llama)


@pytest.mark.parametrize("shape", [{"hidden_act": "gelu"}, {"mlp_bias": True}, {"rope_type": "dynamic"}])
def test_a_llama_that_the_kernels_do_not_compute_is_left_to_transformers(shape: dict[str, Any]) -> None:
    if "rope_type" in shape:
        shape = {"rope_parameters": {**shape, "factor": 2.0, "rope_theta": 10_000.0}}
    config = LlamaConfig(**{**SHAPE, **shape})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="slipstream").eval()
    assert adapt(model).decoder is None


def test_layers_that_scale_their_attention_differently_are_left_to_transformers() -> None:
    """The kernels have one scale for all layers."""
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE), attn_implementation="slipstream").eval()
    model.model.layers[1].self_attn.scaling = 0.5
    assert adapt(model, canary=False).decoder is None
