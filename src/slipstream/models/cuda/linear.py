"""Weights of linear layers on a CUDA device, and their product as one operator.

`slipstream::linear` runs in Triton on a CUDA device. On a CPU it is computed in PyTorch, or in Triton's interpreter
where TRITON_INTERPRET is 1: for tests. A row's bits are the same among any other rows, in any place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from slipstream.errors import ModelError
from slipstream.models.cuda import linear_codes
from slipstream.models.cuda.linear_codes import TILE_OUTPUTS, Codes, HeldAs
from slipstream.models.cuda.triton_use import runs_triton
from slipstream.models.linear.formats import OF_DTYPE, WeightFormat
from slipstream.models.linear.fp8 import Fp8Linear
from slipstream.models.linear.grouped import GroupedLinear
from slipstream.models.linear.low_rank import LowRankChange
from slipstream.models.linear.rounded import RoundedFormat

TILE_ROWS = 16
"""Rows of a tile, as the kernel cuts them."""
MOST_ROWS = 1024
"""Rows of one launch; more are several launches."""
WANTED_PROGRAMS = 192
"""More than a large GPU has multiprocessors. A constant: what depends on the device would change the bits with it."""
MOST_SPLITS = 8
LEAST_SPLIT = 192
"""Inputs of a split, at least."""
LEAST_GROUP = 16
"""Inputs that a matrix instruction takes at once."""

Linear = nn.Linear | GroupedLinear


class ProductCut(NamedTuple):
    """How a product is cut: by its weight alone, since another cut may add in another order."""

    block: int
    """Inputs that are read at once."""
    splits: int
    """Into so many parts the blocks are cut, a power of two."""
    num_stages: int
    """Blocks that are on their way at once."""
    most_tiles: int
    """Tiles of rows that one read of the weights is multiplied with, at most: as many as spill no register."""

    @classmethod
    def of(cls, kind: HeldAs, group: int, dtype: torch.dtype, num_in: int, num_out: int) -> ProductCut:
        """For rows of `dtype`."""
        if dtype == torch.float32:
            block, num_stages = 32, 2
        elif kind == HeldAs.NUMBERS:
            block, num_stages = 64, 5
        else:
            block, num_stages = 64 if group == LEAST_GROUP else 128, 4
        tiles, splits = -(-num_out // TILE_OUTPUTS), 1
        while (
            splits < MOST_SPLITS and tiles * splits < WANTED_PROGRAMS and 2 * splits * LEAST_SPLIT <= num_in
        ):
            splits *= 2
        return cls(block, splits, num_stages, 2 if group else 4)

    def tiles(self, num_rows: int) -> int:
        """Tiles of rows for a program of a pass: a power of two."""
        needed = -(-num_rows // TILE_ROWS)
        return min(1 << (needed - 1).bit_length(), self.most_tiles)


def launch(
    rows: Tensor, codes: Tensor, scales: Tensor | None, group_scales: Tensor | None, zeros: Tensor | None,
    bias: Tensor | None, tickets: Tensor, kind: int, group: int, output: Tensor,
) -> None:  # fmt: skip
    """The kernel, for at most `MOST_ROWS` rows; see `linear`."""
    from slipstream.models.cuda.linear_kernels import multiply

    (num_rows, num_in), num_out = rows.shape, output.shape[1]
    cut = ProductCut.of(HeldAs(kind), group, rows.dtype, num_in, num_out)
    tiles = cut.tiles(num_rows)
    partials = None
    if cut.splits > 1:
        partials = torch.empty(cut.splits, num_rows, num_out, dtype=torch.float32, device=rows.device)
    grid = (-(-num_rows // (tiles * TILE_ROWS)), -(-num_out // TILE_OUTPUTS) * cut.splits)
    multiply[grid](
        rows, codes, scales, group_scales, zeros, bias, partials, tickets, output,
        num_rows, num_in, num_out, -(-num_in // group) if group else 0, -(-num_in // cut.block),
        kind, group, cut.block, tiles, cut.splits, scales is not None, zeros is not None, bias is not None,
        num_warps=4, num_stages=cut.num_stages, enable_fp_fusion=False,
    )  # fmt: skip


@torch.library.custom_op("slipstream::linear", mutates_args=("tickets",))
def linear(
    rows: Tensor, codes: Tensor, scales: Tensor | None, group_scales: Tensor | None, zeros: Tensor | None,
    bias: Tensor | None, tickets: Tensor, kind: int, group: int, num_out: int, in_float32: bool,
) -> Tensor:  # fmt: skip
    """rows [n, in] -> [n, out] in the rows' type, or in float32, the sums rounded once.

    The weight is one of `Codes`, bias [out]. `tickets` count the programs that have ended; they are zeros between
    products, so that products with one weight must not run side by side.
    """
    rows = rows.contiguous()
    output = rows.new_empty(len(rows), num_out, dtype=torch.float32 if in_float32 else rows.dtype)
    if runs_triton(rows):
        for begin in range(0, len(rows), MOST_ROWS):
            part, own = (each[begin : begin + MOST_ROWS] for each in (rows, output))
            launch(part, codes, scales, group_scales, zeros, bias, tickets, kind, group, own)
        return output
    held = Codes(HeldAs(kind), codes, (num_out, rows.shape[1]), scales, group, group_scales, zeros)
    weight = codes.float() if kind == HeldAs.NUMBERS else held.numbers(torch.arange(num_out))
    for row, own in zip(
        rows.float(), output, strict=True
    ):  # one by one: another number of rows, the same bits
        product = weight @ row
        own.copy_(product if bias is None else product + bias.float())
    return output


@linear.register_fake
def _(
    rows: Tensor, codes: Tensor, scales: Tensor | None, group_scales: Tensor | None, zeros: Tensor | None,
    bias: Tensor | None, tickets: Tensor, kind: int, group: int, num_out: int, in_float32: bool,
) -> Tensor:  # fmt: skip
    return rows.new_empty(len(rows), num_out, dtype=torch.float32 if in_float32 else rows.dtype)


class DeviceWeight:
    """The weights of linear layers that are computed as one, their outputs one behind the other.

    Not for products side by side in several streams, see `linear`.
    """

    def __init__(
        self, codes: Codes, dtype: torch.dtype, bias: Tensor | None = None, order: Tensor | None = None
    ) -> None:
        """For rows of `dtype`; with an `order` column j of the codes multiplies input `order[j]`."""
        self.codes, self.dtype, self._bias = codes, dtype, bias
        self.out_features, self.in_features = codes.shape
        self.num_weights = self.out_features * self.in_features
        device = codes.codes.device
        self._order = None if order is None else order.to(device, torch.int64)
        self._places = None if self._order is None else torch.argsort(self._order)
        cut = ProductCut.of(codes.kind, codes.group, dtype, self.in_features, self.out_features)
        groups = MOST_ROWS // (cut.most_tiles * TILE_ROWS)
        tiles = -(-self.out_features // TILE_OUTPUTS) if cut.splits > 1 else 0
        self.tickets = torch.zeros(groups * tiles, dtype=torch.int32, device=device)
        self._change: tuple[DeviceWeight, DeviceWeight] | None = None
        self.calls_library = False
        """Whether PyTorch's own product is called, whose bits may change with the number of rows; of plain weights."""

    @classmethod
    def holds(cls, fmt: WeightFormat | None, layers: Sequence[nn.Module]) -> str | None:
        """Why layers cannot be held as one, in one line; None where they can. What a file holds quantised is kept as it
        is, whatever the format."""
        kinds = {type(layer) for layer in layers}
        if kinds == {Fp8Linear}:
            return None
        if Fp8Linear not in kinds and all(isinstance(layer, GroupedLinear) for layer in layers):
            return _misfit_of_groups([layer for layer in layers if isinstance(layer, GroupedLinear)])
        if kinds != {nn.Linear}:
            return f"layers of different kinds: {', '.join(sorted(kind.__name__ for kind in kinds))}"
        if fmt is None or fmt.name in OF_DTYPE.values() or isinstance(fmt, RoundedFormat):
            return None
        return f"the weight format {fmt.name!r} has no kernel for a GPU"

    @classmethod
    def of(
        cls,
        layers: Sequence[Linear],
        dtype: torch.dtype,
        fmt: WeightFormat | None = None,
        device: torch.device | None = None,
    ) -> DeviceWeight:
        """Layers as one, for rows of `dtype`, on the device that their weights are on: those of a file, which stay in
        it, go to `device`. Raises `ModelError` for what it does not hold."""
        reason = cls.holds(fmt, layers)
        if reason is not None:
            raise ModelError(f"weights that a GPU's kernels cannot hold: {reason}")
        grouped = [layer for layer in layers if isinstance(layer, GroupedLinear)]
        narrow = [layer for layer in layers if isinstance(layer, Fp8Linear)]
        plain = [layer for layer in layers if isinstance(layer, nn.Linear)]
        if narrow:
            codes = linear_codes.kept_in_fp8(narrow, dtype)
        elif grouped:
            codes = linear_codes.kept_in_groups(grouped, dtype, device or torch.device("cpu"))
        elif isinstance(fmt, RoundedFormat):
            codes = linear_codes.rounded_in_groups(plain, fmt, dtype)
        else:
            codes = linear_codes.plain(plain, dtype)
        made = cls(
            codes, dtype, _stacked_bias(layers, codes.codes.device), grouped[0].order if grouped else None
        )
        made._change = _stacked_change([layer.change for layer in grouped], layers, codes.codes.device)
        return made

    @property
    def nbytes(self) -> int:
        """Bytes held, padding included."""
        own = [*self.codes.tensors, self._bias, self._order, self._places, self.tickets]
        held = sum(int(tensor.nbytes) for tensor in own if tensor is not None)
        return held + sum(part.nbytes for part in self._change or ())

    def __call__(self, rows: Tensor) -> Tensor:
        """[n, in] -> [n, out] in the rows' type, the bias added; nothing is read on the host."""
        if self._change is None:
            return self.product_of(rows, False)
        down, up = self._change
        changed = self.product_of(rows, True) + up(down(rows.float()))
        return changed.to(rows.dtype)

    def product_of(self, rows: Tensor, in_float32: bool) -> Tensor:
        """As a call, without what adapters add; with `in_float32` the sums as they are."""
        if rows.dtype != self.dtype:
            raise TypeError(f"this weight is for rows of {self.dtype}, not {rows.dtype}")
        if self._order is not None:
            rows = rows.index_select(1, self._order)
        held = self.codes
        if self.calls_library:
            bias = None if self._bias is None else self._bias.to(self.dtype)
            return nn.functional.linear(rows, held.codes, bias)
        product: Tensor = linear(
            rows, held.codes, held.scales, held.group_scales, held.zeros, self._bias, self.tickets,
            int(held.kind), held.group, self.out_features, in_float32,
        )  # fmt: skip
        return product

    def unpack(self, outputs: Tensor) -> Tensor:
        """int64 [n] -> [n, in] in the rows' type: these outputs' weights, no change added; nothing is read on the
        host."""
        if self.codes.kind == HeldAs.NUMBERS:
            return self.codes.codes[outputs]
        return self.numbers(outputs).to(self.dtype)

    def numbers(self, outputs: Tensor) -> Tensor:
        """As `unpack`, in float32: what the product multiplies with."""
        found = self.codes.numbers(outputs)
        return found if self._places is None else found.index_select(1, self._places)


def _misfit_of_groups(layers: Sequence[GroupedLinear]) -> str | None:
    """Why layers that a file holds in groups cannot be computed as one."""
    first = layers[0].order
    for order in (layer.order for layer in layers):
        if order is not first and (order is None or first is None or not torch.equal(order, first)):
            return "they were saved with their inputs in different orders"
    return None


def _stacked_bias(layers: Sequence[Linear], device: torch.device) -> Tensor | None:
    """float32 [out], zeros for layers without one."""
    if all(layer.bias is None for layer in layers):
        return None
    parts = [
        torch.zeros(layer.out_features) if layer.bias is None else layer.bias.detach().float()
        for layer in layers
    ]
    return torch.cat([part.to(device) for part in parts])


def _stacked_change(
    changes: Sequence[LowRankChange | None], layers: Sequence[Linear], device: torch.device
) -> tuple[DeviceWeight, DeviceWeight] | None:
    """(down, up) of what adapters add, each layer reading its own ranks."""
    if all(change is None for change in changes):
        return None
    down = torch.cat([change.down.float() for change in changes if change is not None])
    up = torch.zeros(sum(layer.out_features for layer in layers), len(down))
    output, rank = 0, 0
    for layer, change in zip(layers, changes, strict=True):
        if change is not None:
            end = rank + len(change.down)
            up[output : output + layer.out_features, rank:end] = change.up
            rank = end
        output += layer.out_features
    codes = [Codes(HeldAs.NUMBERS, part.to(device), (len(part), part.shape[1])) for part in (down, up)]
    first, second = (DeviceWeight(each, torch.float32) for each in codes)
    return first, second
