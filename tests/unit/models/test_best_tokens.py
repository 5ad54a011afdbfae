"""Where the best token alone is wanted it is that of the first highest logit, whatever holds the output layer."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GraniteConfig, GraniteForCausalLM, LlamaConfig, LlamaForCausalLM

from slipstream.models import CausalLM, RowGroup, adapt
from slipstream.models.attention.base import ATTENTION_NAME
from slipstream.models.cpu import rounded_head
from slipstream.models.cpu.exact_rows import multiplying_exactly
from slipstream.models.executor import cpu_kernels
from tests.kit.marks import needs_kernels
from tests.kit.small_llama import logits, sizes

pytestmark = needs_kernels

HIDDEN, VOCAB = 72, 700
"""Neither whole groups of inputs nor whole units of outputs."""
TEXT = [(7 * i * i + 3) % VOCAB for i in range(30)]
HEADS = ["random", "nearly equal", "many nearly equal", "equal", "many equal", "zero"]


def weights(kind: str) -> Tensor:
    """[vocab, hidden] of an output layer."""
    torch.manual_seed(3)
    weight = torch.randn(VOCAB, HIDDEN) * 0.1
    some = torch.randperm(VOCAB)[: 300 if "many" in kind else 40]
    if "equal" in kind:  # the best or the worst of all, by the row
        weight[some] = torch.randn(HIDDEN)
    if "nearly" in kind:
        weight[some] *= 1 + torch.randn(len(some), HIDDEN) * 2e-3
    return weight * 0 if kind == "zero" else weight


def small(hidden: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = sizes(hidden, 2, 4, 2, inner=48, vocab=VOCAB, spread=0.3, tied=False)
    return LlamaForCausalLM(LlamaConfig(**shape, attn_implementation=ATTENTION_NAME)).eval()


def model(head: Tensor, **options: Any) -> CausalLM:
    made = small(HIDDEN)
    with torch.no_grad():
        made.lm_head.weight.copy_(head)
    return adapt(made, **{"canary": False, "rounds_head": True, **options})


def best(lm: CausalLM, token_ids: list[int]) -> list[int]:
    pool, slots = lm.trial_cache(len(token_ids))
    found = lm.forward([RowGroup(slots, 0, token_ids, range(len(token_ids)))], pool, best=True)
    assert found.logits.shape == (len(token_ids), 0)
    assert found.best is not None
    return list(found.best)


@pytest.fixture
def unknown(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows of each pass needed their logits, with output layers of any size rounded."""
    monkeypatch.setattr(rounded_head, "LEAST_WEIGHTS", 1)
    counts: list[int] = []
    known = cpu_kernels.known

    def counting(tokens: Any, logits: Tensor) -> list[int]:
        counts.append(int((tokens < 0).sum()))
        return known(tokens, logits)

    monkeypatch.setattr(cpu_kernels, "known", counting)
    return counts


@pytest.mark.parametrize("quantization", [None, "bfloat16", "float16", "int8", "int4"])
@pytest.mark.parametrize("kind", HEADS)
def test_the_best_tokens_are_those_of_the_logits(
    kind: str, quantization: str | None, unknown: list[int]
) -> None:
    lm = model(weights(kind), quantization=quantization)
    rounds = quantization not in ("int8", "int4")
    assert (lm.executor.struct.rounded_head.linear.panels is not None) == rounds
    expected = logits(lm, token_ids=TEXT).argmax(-1).tolist()
    assert len(set(expected)) > 1 or kind == "zero"
    for count in (1, 2, 7, len(TEXT)):
        assert best(lm, TEXT[:count]) == expected[:count]
    most = len(TEXT) + 10
    few = sum(unknown) == 0
    assert few if not rounds or ("many" not in kind and kind != "zero") else 0 < sum(unknown) <= most


def near_misses(rounds_weights: bool) -> tuple[Tensor, Tensor]:
    """A row [64], and weights [vocab, 64] whose rounding, or else the row's, makes output 8 the best in place of 9.

    Codes and integers are from -127 to 127, so that scales are 1 / 64 and 1.
    """
    torch.manual_seed(4)
    inputs, large = torch.arange(64), torch.arange(64) % 4 == 0  # so many that none stands apart
    sign = torch.randint(0, 2, [64]) * 2.0 - 1
    weight = torch.randint(-3, 4, [VOCAB, 64]).float()
    weight[:, 0::32] = 127.0
    if rounds_weights:
        row = torch.where(large, 127.0, 100.0) * sign
        weight[8] = weight[9] = torch.where(large, 127.0, 20.0) * sign
        small = ~large
        weight[9, small] += 0.45 * sign[small]  # is rounded off
        weight[8, small] -= 0.45 * sign[small]
        weight[8, 1] += 20 * sign[1]
    else:
        low = inputs % 4 == 1
        row = torch.where(large, 127.0, torch.where(low, -0.55, 0.45) * sign)  # becomes -1 and 0
        weight[8] = weight[9] = torch.where(large, 127.0, 0.0)
        weight[9, ~large] += 30 * sign[~large]
        weight[8, ~large] -= 30 * sign[~large]
    return row, weight / 64


@pytest.mark.parametrize("rounds_weights", [True, False])
def test_what_rounding_takes_off_a_weight_and_a_row_is_counted(
    rounds_weights: bool, unknown: list[int]
) -> None:
    row, weight = near_misses(rounds_weights)
    nearest, groups = (row.round() if not rounds_weights else row), weight.view(VOCAB, 2, 32)
    scales = groups.abs().amax(2, keepdim=True) / 127
    rounded = ((groups / scales).round() * scales).view_as(weight)
    assert int((weight @ row).argmax()) == 9
    assert int((rounded @ nearest).argmax()) == 8
    made = small(64)
    with torch.no_grad():
        made.lm_head.weight.copy_(weight)
        made.model.embed_tokens.weight[:] = row
        for layer in made.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    assert best(adapt(made, canary=False, rounds_head=True), TEXT[:3]) == [9] * 3
    assert unknown == [0]


@pytest.mark.parametrize("rounds", [False, True])
def test_rows_that_are_not_finite_are_told_from_others(
    rounds: bool, unknown: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not rounds:
        monkeypatch.setattr(rounded_head, "LEAST_WEIGHTS", 2**22)
    text = [*TEXT, next(token for token in range(VOCAB) if token not in TEXT)]
    lm = model(weights("random"))
    expected = best(lm, TEXT)
    numbers = (ctypes.c_float * (VOCAB * HIDDEN)).from_address(lm.executor.struct.embedding)
    numbers[text[-1] * HIDDEN] = math.nan
    assert logits(lm, token_ids=text)[-1].isnan().all()
    assert best(lm, text) == [*expected, 0]  # as PyTorch says of numbers that are none
    assert unknown == [0, 1]


def test_a_model_whose_logits_are_too_close_goes_on_without(
    unknown: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_kernels, "LEAST_UNKNOWN", 20)
    lm = model(weights("zero"))
    held = lm.executor.footprint()
    expected = logits(lm, token_ids=TEXT).argmax(-1).tolist()
    assert [best(lm, TEXT) == expected for _ in range(3)] == [True] * 3
    assert unknown == [len(TEXT), 0, 0]
    assert lm.executor.struct.rounded_head.linear.panels is None
    assert lm.executor.footprint() < held


def test_rows_that_are_multiplied_as_they_are_have_a_rounded_output_layer_too(unknown: list[int]) -> None:
    with multiplying_exactly(True):
        lm = model(weights("random"))
    assert lm.exact_rows
    assert best(lm, TEXT) == logits(lm, token_ids=TEXT).argmax(-1).tolist()
    assert unknown == [0]


def test_a_pass_without_wanted_rows_finds_nothing(unknown: list[int]) -> None:
    lm = model(weights("random"))
    pool, slots = lm.trial_cache(4)
    found = lm.forward([RowGroup(slots, 0, TEXT[:4], [])], pool, best=True)
    assert list(found.best or ()) == []


def test_a_pass_reads_the_output_layer_or_the_rounded_one() -> None:
    rounded, plain = model(weights("random")), model(weights("random"), rounds_head=False)
    assert rounded.executor.reads == plain.executor.reads


@pytest.mark.parametrize("number", [torch.inf, torch.nan, 1e20])
def test_an_output_layer_that_is_not_bounded_is_not_rounded(number: float, unknown: list[int]) -> None:
    head = weights("random")
    head[5, 7] = number
    lm = model(head)
    assert lm.executor.struct.rounded_head.linear.panels is None
    assert best(lm, TEXT) == logits(lm, token_ids=TEXT).argmax(-1).tolist()


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_an_output_layer_whose_products_are_divided_is_not_rounded(scale: float, unknown: list[int]) -> None:
    torch.manual_seed(0)
    shape = sizes(HIDDEN, 2, 4, 2, inner=48, vocab=VOCAB, spread=0.3)
    config = GraniteConfig(**shape, logits_scaling=scale, attn_implementation=ATTENTION_NAME)
    lm = adapt(GraniteForCausalLM(config).eval(), canary=False, rounds_head=True)
    assert (lm.executor.struct.rounded_head.linear.panels is not None) == (scale == 1.0)
    assert best(lm, TEXT) == logits(lm, token_ids=TEXT).argmax(-1).tolist()
    held = lm.executor.rounded
    planned = lm.executor.rounded_head_bytes(lm.model, lm.executor.head.kernel)
    assert (0 if held is None else held.nbytes) == planned
