"""With `exact_rows` nothing is rounded to 8 bits: the arithmetic is float32 on the weights' own numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from slipstream import LLM
from slipstream.assets import EMBEDDED_DRAFT, EMBEDDED_TARGET
from slipstream.errors import ConfigError
from slipstream.kv.pool import KVPool
from slipstream.models import CausalLM, RowGroup, load_model
from slipstream.models.cpu.exact_rows import multiplying_exactly
from slipstream.models.linear.formats import weight_format
from tests.kit.engines import MakeLLM, check_same_in_any_company
from tests.kit.marks import needs_kernels
from tests.kit.quantised_folders import gptq_folder

pytestmark = needs_kernels

FORMATS = ["int8", "int4", "int4_g64", "int4_g128"]
TEXT = [(7 * i * i + 3 * i + 5) % 4000 for i in range(40)]


def logits(lm: CausalLM) -> torch.Tensor:
    pool = KVPool(lm.shapes, len(TEXT), lm.dtype, lm.device, cache_dtype=torch.float32)
    return lm.forward([RowGroup(range(len(TEXT)), 0, TEXT, range(len(TEXT)))], pool).logits


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_the_text_is_the_same_with_drafts_in_any_batch_after_reuse_and_preemption(
    make_llm: MakeLLM, prompts: list[list[int]], quantization: str
) -> None:
    check_same_in_any_company(make_llm, prompts, exact_rows=True, quantization=quantization)


@pytest.mark.parametrize("shape", [(48, 40), (33, 70), (320, 200), (2, 1)])
@pytest.mark.parametrize("name", FORMATS)
def test_products_are_those_of_the_unpacked_weights_in_float32(name: str, shape: tuple[int, int]) -> None:
    torch.manual_seed(1)
    plain = nn.Linear(*shape)
    with multiplying_exactly(True):
        packed = weight_format(name).pack(plain, native=True)
    weight = packed.unpack(torch.arange(shape[1])).double()
    rows = torch.randn(30, shape[0])
    rows[:, shape[0] // 2] *= 300
    with torch.inference_mode():
        expected = rows.double() @ weight.T + plain.bias.double()
        ours = packed(rows)
        assert torch.allclose(ours.double(), expected, rtol=1e-5, atol=1e-5 * float(rows.abs().max()))
        for count in (1, 2, 3, 7, 12, 13, 29):
            assert torch.equal(packed(rows[:count]), ours[:count])
        rounded = weight_format(name).pack(plain, native=True)
        assert not torch.equal(rounded(rows), ours)


def test_a_file_in_groups_has_it_too(tmp_path: Path) -> None:
    folder = str(gptq_folder(tmp_path / "saved", EMBEDDED_TARGET, 32))
    exact, widened = load_model(folder, exact_rows=True), load_model(folder, dtype="float32")
    assert not exact.rounds_rows
    assert torch.allclose(logits(exact), logits(widened), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(logits(load_model(folder)), logits(widened), rtol=1e-4, atol=1e-4)


def test_draft_models_round_theirs_all_the_same(make_llm: MakeLLM) -> None:
    llm = make_llm({"method": "draft_model", "model": EMBEDDED_DRAFT}, exact_rows=True, quantization="int8")
    assert llm.engine.model.exact_rows
    assert llm.engine.draft_model is not None
    assert not llm.engine.draft_model.exact_rows


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantization": "int8", "cpu_kernels": "torch"}, "exact_rows needs the native CPU kernels"),
        ({"exact_rows": 1}, "engine exact_rows must be bool, got 1"),
    ],
)
def test_what_cannot_have_it_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(**{"exact_rows": True, **options})
