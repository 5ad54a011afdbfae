"""The fused decoder of a GPU: its operators, and every dense family against Transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import layer_cases
import pytest
import torch
import transformers as tf
from torch import Tensor
from triton_process import interpreted

from slipstream.core.proposal import Proposal
from slipstream.kv.cache import KVCache
from slipstream.models import CausalLM, RowGroup, load_model
from slipstream.models.batch import tree_rows
from slipstream.models.executor.choices import OwnTokens, TokenChoices
from slipstream.models.families.registry import FAMILIES as KNOWN
from slipstream.models.loading import adapt
from slipstream.sampling.params import SamplingParams
from slipstream.testing.recorded_graph import ComputedKernels, RecordedKernels
from tests.parity.tiny_models import FAMILIES, LIKE_OTHERS, randomise, save_tiny

ON_CPU = "slipstream.testing.recorded_graph"
CONFIGS = {**FAMILIES, **LIKE_OTHERS}
TEXT = [(7 * i + 3) % 128 for i in range(15)]
TREE = Proposal((1, 2, 3, 4), (-1, -1, 0, 2))


def is_dense(name: str) -> bool:
    model_type = CONFIGS[name]().model_type
    return model_type in KNOWN.names() and KNOWN.load(model_type).experts is None


DENSE = [name for name in CONFIGS if is_dense(name)]
LIKE_LLAMA = ("cwm", "internlm3", "iquestcoder", "ministral", "seed-oss")
"""Whose bits are those of a family that is tested."""


# --- the operators ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_operators_in_pytorch(dtype: torch.dtype) -> None:
    for width, kind in ((44, False), (300, True)):
        layer_cases.check_norm(dtype, width, kind)
    for behind, before in ((False, True), (True, False)):
        norms = [layer_cases.random_norm(44, kind, kind, 1) for kind in (behind, before)]
        layer_cases.check_sums(dtype, 44, *norms)
    layer_cases.check_sums(dtype, 44, None, None)
    layer_cases.check_rotation(dtype, 16, 8, norms=False)
    layer_cases.check_rotation(dtype, 22, 6, norms=True)
    for kind in range(3):
        layer_cases.check_activation(dtype, kind, is_gated=kind != 1)
    layer_cases.check_bits(dtype)


def test_the_kernels_interpreted() -> None:
    done = interpreted("interpreted_decoder.py")
    assert done.returncode == 0, done.stdout


# --- against Transformers ---------------------------------------------------------------------------------------


def tiny(name: str, dtype: torch.dtype) -> Any:
    """A model of Transformers; its weights are the same numbers in any type."""
    config = CONFIGS[name]()
    config._attn_implementation = "slipstream"
    model = tf.AutoModelForCausalLM.from_config(config)
    randomise(model)
    return model.to(torch.bfloat16).to(dtype).eval()


def all_states(lm: CausalLM) -> list[Tensor]:
    """Hidden states by layer and logits over a text."""
    pool, slots = lm.trial_cache(len(TEXT))
    layers = range(lm.num_layers + 1)
    output = lm.forward([RowGroup(slots, 0, TEXT, range(len(TEXT)))], pool, layers)
    return [*(output.hidden[layer] for layer in layers), output.logits]


def all_expected(model: Any) -> list[Tensor]:
    """The same by Transformers alone."""
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        output = model(input_ids=torch.tensor([TEXT]), use_cache=False, output_hidden_states=True)
    return [*(states[0] for states in output.hidden_states), output.logits[0]]


def error(ours: Tensor, expected: Tensor) -> float:
    """Relative to what is expected, in the mean over rows."""
    return float((ours.double() - expected.double()).norm() / expected.double().norm())


def in_decoder(model: Any, **options: Any) -> CausalLM:
    lm = adapt(
        model,
        native=False,
        attention_backend=f"{ON_CPU}:TritonOnCpu",
        executor=f"{ON_CPU}:ComputedKernels",
        **options,
    )
    assert isinstance(lm.executor, ComputedKernels)
    return lm


@pytest.mark.parametrize("name", DENSE)
def test_a_family_is_transformers_own(name: str) -> None:
    expected = all_expected(tiny(name, torch.float32))
    ours = all_states(in_decoder(tiny(name, torch.float32), canary=False))
    assert max(map(error, ours, expected)) < 1e-5
    exact = all_expected(tiny(name, torch.float64))
    theirs = all_expected(tiny(name, torch.bfloat16))
    ours = all_states(in_decoder(tiny(name, torch.bfloat16), canary=False))
    for layer, (our, their, true) in enumerate(zip(ours, theirs, exact, strict=True)):
        assert our.dtype == torch.bfloat16
        assert error(our, true) <= 1.5 * error(their, true), layer
