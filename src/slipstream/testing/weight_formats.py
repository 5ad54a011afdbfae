"""The conformance kit of weight formats.

    def test_my_format_keeps_the_contract():
        check_weight_format(MyFormat())

No model is needed: each form of a linear layer that this machine has is compared with the plain layer.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from slipstream.models.linear.formats import WeightFormat
from slipstream.models.linear.layers import PackedLinear
from slipstream.testing.replay_engine import require

SHAPES = ((64, 128), (33, 70), (2, 1))
"""Inputs and outputs: round ones, odd ones, and very small ones."""
ROWS = (0, 1, 2, 3, 5, 8, 17, 65)


@torch.inference_mode()
def check_weight_format(
    fmt: WeightFormat, *, max_error: float = 0.1, same_bits: bool = True, seed: int = 0
) -> None:
    """Raise AssertionError, with a sentence, where `fmt` breaks the contract of a weight format.

    `max_error` bounds the error of a layer's outputs, relative to their root mean square. With `same_bits` a row must
    have the same bits for any number of rows, as it does in the native kernels; without, it must be close.
    """
    require(fmt.bytes_per_weight > 0, "bytes_per_weight is not above 0")
    generator = torch.Generator().manual_seed(seed)
    for shape in SHAPES:
        for bias in (False, True):
            weight = torch.randn(shape[1], shape[0], generator=generator)
            forms = fmt.forms(_plain(weight, bias))
            require(bool(forms), "no form of a layer can be made on this machine")
            for form in forms:
                what = f"{type(form).__name__} of {shape[0]} inputs and {shape[1]} outputs"
                _check_form(form, _plain(weight, bias), what, max_error, same_bits, generator)
                least = fmt.num_bytes(weight.numel())
                require(
                    form.nbytes >= least, f"{what} holds {form.nbytes} bytes, bytes_per_weight says {least}"
                )


def _plain(weight: Tensor, bias: bool) -> nn.Linear:
    """A layer of its own, since a format may take its weight over."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias)
    linear.weight.copy_(weight)
    if bias:
        linear.bias.fill_(0.5)
    return linear.requires_grad_(False)


def _check_form(
    form: PackedLinear,
    plain: nn.Linear,
    what: str,
    max_error: float,
    same_bits: bool,
    generator: torch.Generator,
) -> None:
    num_in, num_out = plain.in_features, plain.out_features
    rows = torch.randn(max(ROWS), num_in, generator=generator)
    expected, ours = plain(rows), form(rows)
    require(ours.dtype == torch.float32, f"{what} returns {ours.dtype}, not float32")
    error = float((ours - expected).square().mean().sqrt() / expected.square().mean().sqrt())
    require(error <= max_error, f"{what} is off by {error:.2g} of its outputs, more than {max_error}")
    alone = torch.cat([form(row[None]) for row in rows])
    for count in ROWS:
        some = form(rows[None, :count])
        require(
            some.shape == (1, count, num_out),
            f"{what} makes {tuple(some.shape)} of {count} rows in a batch of 1",
        )
        same = (
            torch.equal(some[0], alone[:count])
            if same_bits
            else torch.allclose(some[0], alone[:count], atol=1e-4)
        )
        require(same, f"a row of {what} depends on the {count - 1} other rows of the pass")
    sick = rows[:4].clone()
    sick[1] = torch.nan
    healthy = torch.tensor([0, 2, 3])
    require(
        not form(sick)[healthy].isnan().any(), f"a row that is not finite spoils its neighbours in {what}"
    )
    outputs = torch.arange(num_out - 1, -1, -1)
    read = form.unpack(outputs)
    require(read.shape == (num_out, num_in), f"{what} unpacks {tuple(read.shape)}, not {(num_out, num_in)}")
    bias = 0.0 if plain.bias is None else plain.bias[outputs]
    error = float((rows @ read.T + bias - ours[:, outputs]).abs().max() / ours.abs().max())
    require(error <= max_error, f"what {what} unpacks is not what it multiplies with, by {error:.2g}")
