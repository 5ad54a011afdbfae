"""Linear layers for a CPU: several rows for little more than the price of one.

Checking five draft tokens with PyTorch's own float32 linear costs about as much as five tokens: its kernel for one
row reads the weights at memory speed, but the one for a few rows repacks them at every call. Weights that were packed
once do not have to be (docs/LOG.md has the measurements). This is what makes speculation pay on a CPU.

Our own kernels (`native.py`) read packed weights at memory speed for any few rows. Where they
cannot be compiled, oneDNN's are the next best.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.errors import ConfigError
from slipstream.models.cpu.native import PackedWeight, unavailable

TILES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 64)
"""Numbers of rows that the kernel is called with: rows are padded to the next one, and split beyond the last.

oneDNN compiles a kernel for every number of rows and shape that it meets, about 0.6 MB each, and keeps a thousand of
them: with any number of rows the process grew by half a gigabyte. A few numbers of rows also mean few ways in which
a row's last bits can depend on its neighbours."""

_TILES = frozenset(TILES)


class PackedLinear(nn.Module):
    """A float32 linear layer whose weight lives in oneDNN's own layout, and nowhere else."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.bias = linear.bias
        # Opaque to everything but the operator below, so no parameter: it can be neither moved nor saved.
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach().contiguous(), None)

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weight."""
        return self.in_features * self.out_features * torch.float32.itemsize

    def forward(self, rows: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]"""
        if rows.numel() // self.in_features in _TILES:
            return self._multiply(rows)
        flat = rows.reshape(-1, self.in_features)
        largest = TILES[-1]
        tiles = [self._padded(flat[begin : begin + largest]) for begin in range(0, len(flat), largest)]
        output = torch.cat(tiles) if tiles else rows.new_empty(0, self.out_features)
        return output.view(*rows.shape[:-1], self.out_features)

    def _padded(self, rows: Tensor) -> Tensor:
        """[n, in_features] -> [n, out_features] for n from 1 to the largest tile."""
        size = TILES[bisect_left(TILES, len(rows))]
        return self._multiply(nn.functional.pad(rows, (0, 0, 0, size - len(rows))))[: len(rows)]

    def _multiply(self, rows: Tensor) -> Tensor:
        output: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._packed, self.bias, "none", [], "")
        return output


class NativeLinear(nn.Module):
    """A linear layer in the CPU kernels, float32 or int8; a row's bits do not depend on the other rows."""

    def __init__(self, linear: nn.Linear, quantization: str | None = None) -> None:
        super().__init__()
        self._weight = PackedWeight([linear.weight], [linear.bias], quantization)
        self.in_features, self.out_features = self._weight.in_features, self._weight.out_features

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weight."""
        return self._weight.nbytes

    def forward(self, rows: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]"""
        output = self._weight.multiply(rows.reshape(-1, self.in_features))
        return output.view(*rows.shape[:-1], self.out_features)


class Int8Linear(nn.Module):
    """An int8 linear layer on PyTorch's own integer product: one scale an output and one a row.

    PyTorch's dynamic quantisation would share one activation scale among all rows, and a row's result would depend on
    its neighbours. Here each row is scaled by its own maximum, and integer sums are exact: the bits are the same for
    any number of rows.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        weight = linear.weight.detach().float()
        self._scales = _row_scales(weight)[:, 0]  # [out]
        self._integers = (weight / self._scales[:, None]).round().to(torch.int8).T.contiguous()  # [in, out]

    @property
    def nbytes(self) -> int:
        """Bytes of the integers and their scales."""
        return int(self._integers.nbytes + self._scales.nbytes)

    def forward(self, rows: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]"""
        flat = rows.reshape(-1, self.in_features)
        scales = _row_scales(flat)  # [n, 1]
        integers = (flat / scales).round().to(torch.int8)
        output = torch._int_mm(integers, self._integers) * (scales * self._scales)
        if self.bias is not None:
            output += self.bias
        return output.view(*rows.shape[:-1], self.out_features)


def _row_scales(rows: Tensor) -> Tensor:
    """[n, in] -> [n, 1]: what 1 stands for when each row's largest number becomes 127."""
    return rows.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny) / 127


@functools.cache
def integer_products_are_exact() -> bool:
    """Some processors add int8 products in 16 bits, which the largest ones overflow."""
    largest = torch.full((5, 256), 127, dtype=torch.int8)
    return bool((torch._int_mm(largest, -largest[:1].T.repeat(1, 64)) == -256 * 127 * 127).all())


def check_quantization(quantization: str | None, device: torch.device, dtype: torch.dtype) -> None:
    """Raise `ConfigError` where the weights cannot be quantised as asked."""
    if quantization is None:
        return
    if device.type != "cpu":
        raise ConfigError(f"quantization {quantization!r} is for the CPU; on {device.type} leave it out")
    if dtype != torch.float32:
        name = str(dtype).removeprefix("torch.")
        raise ConfigError(
            f"quantization {quantization!r} computes in float32; leave dtype at auto, it is {name}"
        )


def pack_linears(model: Any, quantization: str | None = None, native: bool = True) -> int:
    """Replace the float32 linear layers of a CPU model in place; returns how many.

    Only plain `nn.Linear`s are replaced: a subclass may compute something else. The unpacked weights are freed,
    except where an embedding shares them. Without `native` PyTorch's own operators are used.
    """
    if model.device.type != "cpu":
        return 0
    if not native and not torch._C._has_mkldnn and quantization is None:
        return 0
    plain = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear
        and child.weight.dtype == torch.float32
        and child.weight.device.type == "cpu"
    ]
    for parent, name, child in plain:
        setattr(parent, name, _packed(child, quantization, native))
    return len(plain)


def packed_linears(linear: nn.Linear, quantization: str | None = None) -> list[nn.Module]:
    """The same layer in every packed form that this machine has."""
    forms: list[nn.Module] = []
    if unavailable() is None:
        forms.append(NativeLinear(linear, quantization))
    if quantization is None and torch._C._has_mkldnn:
        forms.append(PackedLinear(linear))
    elif quantization is not None and integer_products_are_exact():
        forms.append(Int8Linear(linear))
    return forms


def packed_bytes(model: Any) -> int:
    """Bytes of the packed weights in a model whose linear layers were replaced."""
    kinds = (PackedLinear, NativeLinear, Int8Linear)
    return sum(module.nbytes for module in model.modules() if isinstance(module, kinds))


def _packed(linear: nn.Linear, quantization: str | None, native: bool) -> nn.Module:
    if native:
        return NativeLinear(linear, quantization)
    if quantization is None:
        return PackedLinear(linear)
    if not integer_products_are_exact():
        raise ConfigError(
            "PyTorch's int8 products are not exact on this processor; quantization needs a C++ compiler"
        )
    return Int8Linear(linear)
