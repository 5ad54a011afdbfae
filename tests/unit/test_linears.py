"""Packed linear layers compute what the plain ones do, and hold their weights once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from slipstream.assets import EMBEDDED_TARGET
from slipstream.models import load_model
from slipstream.models.linears import PackedLinear, pack_linears


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [*range(18), 33, 63, 64, 65, 130])
def test_same_numbers_for_any_number_of_rows(rows: int, bias: bool) -> None:
    torch.manual_seed(rows)
    plain = nn.Linear(48, 40, bias=bias)
    packed = PackedLinear(plain)
    x = torch.randn(1, rows, 48)
    with torch.inference_mode():
        assert packed(x).shape == (1, rows, 40)
        assert torch.allclose(packed(x), plain(x), atol=1e-5)


def test_a_row_is_not_changed_by_padding_or_tiling() -> None:
    """Rows beyond the first tile and padded rows give what the tiles alone give, to the last bit."""
    torch.manual_seed(0)
    packed = PackedLinear(nn.Linear(48, 40))
    x = torch.randn(64 + 11, 48)
    with torch.inference_mode():
        both = packed(x)
        assert torch.equal(both[:64], packed(x[:64]))
        assert torch.equal(both[64:], packed(x[64:]))
        assert torch.equal(packed(x[:11]), packed(torch.cat([x[:11], torch.zeros(1, 48)]))[:11])


def test_every_plain_linear_of_a_model_is_replaced_and_freed() -> None:
    lm = load_model(EMBEDDED_TARGET)
    modules = list(lm.model.modules())
    assert sum(isinstance(module, PackedLinear) for module in modules) == 6 * 7 + 1
    assert not any(type(module) is nn.Linear for module in modules)
    embedding = lm.model.get_input_embeddings().weight.numel()
    assert lm.weight_bytes == 4 * (lm.num_parameters + embedding), (
        "the tied embedding is held twice, nothing else"
    )
    left = sum(parameter.numel() for parameter in lm.model.parameters())
    assert left < embedding + 10_000, "what is left unpacked are the embedding and the norms"


def test_only_plain_float32_layers_on_a_cpu_are_packed() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.odd, self.narrow, self.plain = Scaled(8, 8), nn.Linear(8, 8).bfloat16(), nn.Linear(8, 8)
            self.device = torch.device("cpu")

    model = Model()
    assert pack_linears(model) == 1
    assert type(model.odd) is Scaled
    assert type(model.narrow) is nn.Linear
    assert type(model.plain) is PackedLinear
