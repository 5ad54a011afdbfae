"""The fused decoder takes over a family of somebody else's, by a description of its names alone."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPTNeoXConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Starcoder2Config,
)
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRMSNorm

from slipstream.core.proposal import Proposal
from slipstream.errors import ConfigError, UnsupportedModelError
from slipstream.kv.pool import KVPool
from slipstream.models import CausalLM, RowGroup, adapt
from slipstream.models.attention.base import Variant
from slipstream.models.executor.cpu_kernels import CpuKernels
from slipstream.models.families.activations import ACTIVATIONS, number_of
from slipstream.models.families.experts import ExpertParts
from slipstream.models.families.family import Family
from slipstream.models.families.known import GptOss, Llama, Mixtral
from slipstream.models.families.registry import FAMILIES, find_family
from slipstream.models.rows import tree_rows
from tests.kit.small_llama import sizes

SHAPE = sizes(48, 3, 4, 2, vocab=97, inner=70, spread=0.2)
VARIANTS = [Variant(0.25)] * 3
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
    assert torch.equal(below, logits(lm, 0, 20)[17:]), "a row's bits do not depend on its batch"


def test_without_registration_it_runs_layer_by_layer(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert adapt(toy_model()).kernels == "native"
    assert f"the fused decoder knows {', '.join(sorted(FAMILIES.names()))}" in caplog.text


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
def test_a_wrong_description_is_refused_by_its_layers(family: None) -> None:
    with pytest.raises(UnsupportedModelError, match="its layer 0 is not what the fused decoder computes"):
        adapt(toy_model())


def test_a_built_in_family_cannot_be_taken_over() -> None:
    with pytest.raises(ConfigError, match="family 'llama' exists already"):
        FAMILIES.register("llama", Toy)
    assert isinstance(find_family(LlamaForCausalLM(LlamaConfig(**SHAPE))), Llama)


@pytest.mark.parametrize("shape", [{"hidden_act": "relu"}, {"rope_type": "dynamic"}])
def test_a_llama_that_the_kernels_do_not_compute_is_left_to_transformers(shape: dict[str, Any]) -> None:
    if "rope_type" in shape:
        shape = {"rope_parameters": {**shape, "factor": 2.0, "rope_theta": 10_000.0}}
    config = LlamaConfig(**{**SHAPE, **shape})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="slipstream").eval()
    assert not isinstance(adapt(model).executor, CpuKernels)


@pytest.mark.parametrize("shape", [{"hidden_act": "gelu"}, {"hidden_act": "gelu_new"}, {"mlp_bias": True}])
def test_activations_and_biases_of_the_mlp_are_fused(shape: dict[str, Any]) -> None:
    """`adapt` compares the logits."""
    torch.manual_seed(0)
    config = LlamaConfig(**{**SHAPE, **shape})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="slipstream").eval()
    for name, parameter in model.named_parameters():
        if "bias" in name:
            nn.init.normal_(parameter)
    assert adapt(model).kernels == "decoder"


def test_layers_of_different_widths_are_fused() -> None:
    """`adapt` compares them one by one."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE), attn_implementation="slipstream").eval()
    mlp = model.model.layers[1].mlp
    for name, shape in (("gate_proj", (48, 60)), ("up_proj", (48, 60)), ("down_proj", (60, 48))):
        setattr(mlp, name, nn.Linear(*shape, bias=False))
    with torch.inference_mode():
        theirs = copy.deepcopy(model)
        theirs.set_attn_implementation("eager")
        expected = theirs(input_ids=torch.tensor([TEXT]), use_cache=False).logits[0]
    lm = adapt(model)
    assert isinstance(lm.executor, CpuKernels)
    assert torch.allclose(logits(lm, 0, 20), expected, atol=1e-4)


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (LlamaConfig(**SHAPE), "mlp.act_fn"),
        (Gemma2Config(**SHAPE, head_dim=12), "mlp.act_fn"),
        (Phi3Config(**SHAPE, pad_token_id=0), "mlp.activation_fn"),
        (Starcoder2Config(**SHAPE), "mlp.act"),
        (GPTNeoXConfig(**{**SHAPE, "num_key_value_heads": 4}), "mlp.act"),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_the_activation_that_a_layer_calls_counts(config: Any, name: str) -> None:
    """And not what the configuration says."""
    model = AutoModelForCausalLM.from_config(config, attn_implementation="slipstream").eval()
    family = find_family(model)
    assert family is not None
    parts = family.part(model, family.layers)
    part, _, last = name.partition(".")
    assert list(family.misfits(model, VARIANTS)) == []
    setattr(getattr(parts[1], part), last, nn.Mish())
    assert "its activation is Mish" in next(family.misfits(model, VARIANTS))


def test_activations_are_known_by_class_and_by_function() -> None:
    assert {name: number_of(ACT2FN[name]) for name in ACTIVATIONS} == ACTIVATIONS
    known = (
        nn.SiLU(),
        nn.functional.silu,
        nn.GELU(),
        nn.GELU(approximate="tanh"),
        nn.ReLU(),
        nn.functional.relu,
    )
    assert [number_of(each) for each in known] == [0, 0, 1, 2, None, None]


def widened(*norms: str, layers: Sequence[int] = (0, 1, 2), width: int = 0) -> Callable[[Any], None]:
    """Give layers of a Llama norms of queries or keys; a width of 0 is all heads' own."""

    def change(model: Any) -> None:
        for number in layers:
            attention = model.model.layers[number].self_attn
            for name in norms:
                own = attention.q_proj.out_features if name == "q_norm" else attention.k_proj.out_features
                setattr(attention, name, nn.RMSNorm(width or own))

    return change


def both(first: Callable[[Any], None], then: Callable[[Any], None]) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        first(model)
        then(model)

    return change


def replaced(name: str, made: Callable[[], nn.Module]) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        part, _, last = name.rpartition(".")
        setattr(model.get_submodule(part), last, made())

    return change


class QueryNorm(Llama):
    query_norm = "self_attn.q_norm"


class KeyNorm(Llama):
    key_norm = "self_attn.k_norm"


class BothNorms(QueryNorm, KeyNorm):
    pass


NORMS = "its norms of queries and keys are neither"
WIDTHS = "its linear layers or its embedding have other widths"


@pytest.mark.parametrize(
    ("family", "change", "reason"),
    [
        (QueryNorm, widened("q_norm"), NORMS),
        (KeyNorm, widened("k_norm"), NORMS),
        (BothNorms, widened("q_norm", "k_norm", width=6), NORMS),
        (BothNorms, widened("q_norm", "k_norm", width=48), NORMS),
        (BothNorms, both(widened("q_norm", "k_norm"), widened("k_norm", layers=[1], width=12)), NORMS),
        (
            BothNorms,
            both(widened("q_norm", "k_norm", width=12), widened("q_norm", "k_norm", layers=[2])),
            NORMS,
        ),
        (Llama, replaced("model.norm", lambda: nn.RMSNorm(40)), "its norms have other widths"),
        (
            Llama,
            replaced("model.layers.1.input_layernorm", lambda: nn.RMSNorm(40)),
            "its norms have other widths",
        ),
        (Llama, replaced("lm_head", lambda: nn.Linear(40, 97, bias=False)), WIDTHS),
        (Llama, replaced("model.embed_tokens", lambda: nn.Embedding(97, 40)), WIDTHS),
        (
            Llama,
            replaced("model.layers.2.self_attn.o_proj", lambda: nn.Linear(36, 48)),
            "its attention's output",
        ),
        (
            Llama,
            replaced("model.layers.0.mlp.down_proj", lambda: nn.Linear(60, 48)),
            "its MLP's linear layers",
        ),
        (QueryNorm, widened("q_norm", width=12), ""),
        (BothNorms, widened("q_norm", "k_norm", width=12), ""),
        (BothNorms, widened("q_norm", "k_norm"), ""),
    ],
)
def test_widths_that_the_kernels_would_read_past_are_left_to_transformers(
    family: type[Family], change: Callable[[Any], None], reason: str
) -> None:
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, attention_bias=False))
    change(model)
    found = list(family().misfits(model, VARIANTS))
    assert found[0].startswith(reason) if reason else not found


EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
MODULE = "model.layers.1.mlp"


def stacked(name: str, *shape: int) -> Callable[[Any], None]:
    """Give a layer other weights of experts, or of their router."""

    def change(model: Any) -> None:
        module, _, last = name.rpartition(".")
        setattr(model.get_submodule(module), last, nn.Parameter(torch.zeros(shape)))

    return change


def number(name: str, value: Any) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        module, _, last = name.rpartition(".")
        setattr(model.get_submodule(module), last, value)

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (stacked(f"{MODULE}.gate.weight", 4, 40), "its experts' router has the shape (4, 40)"),
        (stacked(f"{MODULE}.gate.weight", 5, 48), "its layers' experts differ in width"),
        (stacked(f"{MODULE}.gate.bias", 3), "its experts' router's bias has the shape (3,)"),
        (
            stacked(f"{MODULE}.experts.gate_up_proj", 4, 140, 40),
            "its experts' gate and up has the shape (4, 140, 40)",
        ),
        (stacked(f"{MODULE}.experts.gate_up_proj", 4, 130, 48), "its experts' gate and up has the shape"),
        (stacked(f"{MODULE}.experts.gate_up_proj_bias", 4, 70), "its experts' bias of gate and up has"),
        (
            stacked(f"{MODULE}.experts.down_proj", 4, 40, 70),
            "its experts' last linear layer has the shape (4, 40, 70)",
        ),
        (stacked(f"{MODULE}.experts.down_proj", 3, 48, 70), "its experts' last linear layer has the shape"),
        (stacked(f"{MODULE}.experts.down_proj", 4, 48, 60), "its layers' experts differ in width"),
        (stacked(f"{MODULE}.experts.down_proj_bias", 4, 70), "its experts' bias of the last linear layer"),
        (number(f"{MODULE}.gate.top_k", 3), "its layers' experts differ in width"),
        (number(f"{MODULE}.experts.act_fn", nn.Mish()), "its activation is Mish"),
        (replaced(f"{MODULE}.experts", nn.Identity), "it lacks a part of its family"),
        (lambda model: None, ""),
    ],
)
def test_experts_that_the_kernels_would_read_past_are_left_to_transformers(
    change: Callable[[Any], None], reason: str
) -> None:
    model = MixtralForCausalLM(MixtralConfig(**SHAPE, **EXPERTS))
    change(model)
    found = list(Mixtral().misfits(model, VARIANTS))
    assert found[0].startswith(reason) if reason else not found


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (stacked("model.layers.0.self_attn.sinks", 3), "its attention's sinks are not one a head"),
        (number(f"{MODULE}.experts.limit", 3.0), "its layers' experts differ in width"),
        (number(f"{MODULE}.experts.alpha", 1.0), "its layers' experts differ in width"),
        (lambda model: None, ""),
    ],
)
def test_parts_of_gpt_oss_that_do_not_fit_are_left_to_transformers(
    change: Callable[[Any], None], reason: str
) -> None:
    model = GptOssForCausalLM(GptOssConfig(**SHAPE, **EXPERTS, head_dim=12))
    change(model)
    variants = [Variant(0.25, sinks=torch.zeros(4))] * 3
    found = list(GptOss().misfits(model, variants))
    assert found[0].startswith(reason) if reason else not found
    assert "its attention has no sinks" in GptOss().misfits(model, VARIANTS)


def test_more_experts_than_there_are_cannot_be_chosen() -> None:
    model = MixtralForCausalLM(MixtralConfig(**SHAPE, **EXPERTS))
    for layer in model.model.layers:
        layer.mlp.gate.top_k = 5
    assert "its rows choose 5 of 4 experts" in Mixtral().misfits(model, VARIANTS)


def test_layers_that_scale_their_attention_differently_are_left_to_transformers() -> None:
    """The kernels have one scale for all layers."""
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE), attn_implementation="slipstream").eval()
    model.model.layers[1].self_attn.scaling = 0.5
    assert not isinstance(adapt(model, canary=False).executor, CpuKernels)


def test_experts_of_another_form_are_named() -> None:
    """A family of another package may hold them as modules, or one expert alone."""
    forms = SimpleNamespace(
        gate_up_proj=torch.zeros(2, 8, 4),
        down_proj=torch.zeros(2, 4, 4),
        is_transposed=False,
        is_concatenated=True,
    )
    router = nn.Linear(4, 2)
    assert ExpertParts.of(router, forms, 1, True, None).misfits(4) is None
    for name, value in (("gate_up_proj", nn.Linear(4, 8)), ("down_proj", torch.zeros(4, 4))):
        other = SimpleNamespace(**vars(forms) | {name: value})
        with pytest.raises(AttributeError, match=rf"\.{name} is no tensor of 3 dimensions"):
            ExpertParts.of(router, other, 1, True, None)
