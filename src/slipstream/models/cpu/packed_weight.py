"""Weights in the layout of the CPU kernels: stacked, converted and packed some megabytes at a time."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from ctypes import c_int, c_void_p

import torch
from torch import Tensor

from slipstream.models.cpu import pages, threads
from slipstream.models.cpu.exact_rows import are_exact
from slipstream.models.cpu.kernel import Kernel
from slipstream.models.cpu.low_rank import PackedChange, packed_change_bytes
from slipstream.models.cpu.native import empty_rows, library
from slipstream.models.cpu.packed_copy import current_copy
from slipstream.models.cpu.pages import huge_buffer, release
from slipstream.models.cpu.structs import LinearStruct
from slipstream.models.linear.code_tables import CodeTable
from slipstream.models.linear.grouped import BlockedWeight, GroupedLinear, GroupedWeight, combined


class PackedWeight:
    """One or more weights [out, in], stacked, in the kernels' layout. `struct` is passed to the kernels.

    `interleaved` alternates the panels of two weights of one shape (gate and up), so that one thread computes the
    matching outputs of both.
    """

    def __init__(
        self,
        weights: Sequence[Tensor | GroupedLinear],
        biases: list[Tensor | None],
        kernel: Kernel,
        interleaved: bool = False,
        give_back: bool = False,
        room: Tensor | None = None,
    ) -> None:
        """They are read some megabytes at a time. With `give_back` their pages are returned to the system as they are
        packed. `room` is memory for the panels, uint8 of as many bytes as `packed_bytes` says; None: new memory.

        Layers that were saved in groups are of the kernel's groups, see `common_kernel`.
        """
        self.kernel = kernel
        self._num_biases = sum(bias.numel() for bias in biases if bias is not None)
        tensors = [weight.detach() for weight in weights if isinstance(weight, Tensor)]
        grouped = [weight for weight in weights if isinstance(weight, GroupedLinear)]
        stack = _GroupedStack(grouped, kernel, interleaved) if grouped else _Stack(tensors, interleaved)
        outputs = [len(tensor) for tensor in tensors] or [layer.out_features for layer in grouped]
        bias = _stacked_bias(outputs, biases, interleaved)
        self._num_outputs = sum(outputs)
        self.out_features, self.in_features = stack.shape
        self.num_weights = self._num_outputs * self.in_features
        lib = library()
        shape = (self.in_features, self.out_features)
        padded = lib.slipstream_padded_out(self.out_features)
        num_bytes = lib.slipstream_packed_bytes(kernel.kind, *shape, kernel.group)
        self.panels = huge_buffer(num_bytes) if room is None else room
        if len(self.panels) != num_bytes:
            raise ValueError(f"the weights take {num_bytes} bytes, and there are {len(self.panels)}")
        self.scales = empty_rows(padded if kernel.has_scales else 0)
        self.bias = (
            None if bias is None else torch.nn.functional.pad(bias.float(), (0, padded - self.out_features))
        )
        self.order = stack.order
        self._change = _packed_change(grouped, interleaved, padded)
        self.num_threads = threads.available()
        copy = current_copy() if kernel.bytes_per_weight < 2 else None
        if copy is None or not copy.fill([self.panels, self.scales]):
            length = _slice_length(self.in_features)
            for begin in range(0, self.out_features, length):
                self.pack(stack[begin : begin + length], begin)
                for part in stack.parts(begin, begin + length) if give_back else ():
                    release(part)
        self.struct = LinearStruct(
            kernel.kind,
            *shape,
            kernel.group,
            self.panels.data_ptr(),
            self.scales.data_ptr(),
            None if self.bias is None else self.bias.data_ptr(),
            None if self.order is None else self.order.data_ptr(),
            None if self._change is None else ctypes.addressof(self._change.struct),
            None if kernel.table is None else _table(kernel.table).data_ptr(),
            are_exact(),
        )

    def pack(self, part: Tensor | GroupedWeight | BlockedWeight, first: int) -> None:
        """Pack the outputs from `first` on, a multiple of what threads share out."""
        lib, kernel = library(), self.kernel
        panels = self.panels[
            lib.slipstream_packed_bytes(kernel.kind, self.in_features, first, kernel.group) :
        ]
        if isinstance(part, Tensor):
            part = part.to(kernel.dtype).contiguous()
            if kernel.group:
                part = fitted(part, kernel, self.num_threads)
        if not isinstance(part, Tensor):
            _pack_held(part, kernel, panels, self.scales[first:], self.num_threads)
            return
        written = [panels]
        if kernel.has_scales:
            written.append(self.scales[first:])
        getattr(lib, kernel.pack)(
            c_void_p(part.data_ptr()),
            c_int(self.in_features),
            c_int(len(part)),
            *(c_void_p(tensor.data_ptr()) for tensor in written),
            c_int(self.num_threads),
        )

    @property
    def least_bytes(self) -> int:
        """Bytes that a product must read: `nbytes` without the padding."""
        weights = self.num_weights * self.kernel.bytes_per_weight
        scales = self._num_outputs * self.kernel.bytes_per_output
        change = 0 if self._change is None else self._change.nbytes
        return round(weights + scales) + self._num_biases * torch.float32.itemsize + change

    @property
    def nbytes(self) -> int:
        """Bytes held, padding included."""
        tensors = (self.panels, self.scales, self.bias, self.order, self._change)
        return sum(int(tensor.nbytes) for tensor in tensors if tensor is not None)

    def multiply(self, rows: Tensor) -> Tensor:
        """float32 [n, in] -> [n, out]; a row's bits do not depend on the others."""
        if rows.dtype != torch.float32 or rows.device.type != "cpu":
            raise TypeError(f"the CPU kernels multiply float32 rows, not {rows.dtype} on {rows.device}")
        rows = rows.contiguous()
        num_rows = rows.shape[0]
        output = empty_rows(num_rows, self.out_features)
        library().slipstream_multiply(
            ctypes.byref(self.struct), rows.data_ptr(), num_rows, output.data_ptr(), self.num_threads
        )
        return output

    def unpack(self, indices: Tensor) -> Tensor:
        """int64 [n] -> float32 [n, in]: these outputs' weights, as `multiply` uses them, no change added."""
        indices = indices.contiguous()
        if indices.numel() and not 0 <= int(indices.min()) <= int(indices.max()) < self.out_features:
            raise IndexError(f"rows are numbered 0 to {self.out_features - 1}")
        output = empty_rows(len(indices), self.in_features)
        library().slipstream_unpack(
            ctypes.byref(self.struct), indices.data_ptr(), len(indices), output.data_ptr()
        )
        return output


@functools.cache
def _table(numbers: CodeTable) -> Tensor:
    """int8 [16], which stays where it is."""
    return torch.tensor(numbers, dtype=torch.int8)


def _slice_length(in_features: int) -> int:
    """How many outputs of a weight are packed at a time: whole units, some megabytes."""
    unit: int = library().slipstream_padded_out(1)
    return max(pages.SLICE_WEIGHTS // (in_features * unit), 1) * unit


def packed_bytes(kernel: Kernel, in_features: int, out_features: int) -> tuple[int, int, int]:
    """What `PackedWeight` holds of a weight, padding included: (panels, scales, a bias if it has one)."""
    lib = library()
    padded = lib.slipstream_padded_out(out_features)
    panels = lib.slipstream_packed_bytes(kernel.kind, in_features, out_features, kernel.group)
    return int(panels), int(padded * kernel.bytes_per_output), int(padded * torch.float32.itemsize)


def interleave(weights: list[Tensor]) -> Tensor:
    """Two weights [out, in] as alternating panels of rows; the last panel of each is padded with zeros."""
    panel = library().slipstream_panel()
    out, in_features = weights[0].shape
    padded = weights
    if out % panel:  # without need it would be a copy
        padded = [torch.nn.functional.pad(weight, (0, 0, 0, -out % panel)) for weight in weights]
    return torch.stack([weight.view(-1, panel, in_features) for weight in padded], dim=1).view(
        -1, in_features
    )


class _Stack:
    """Weights [out, in], one behind the other, or two of one shape with alternating panels; sliced as one weight is."""

    def __init__(self, weights: list[Tensor], interleaved: bool) -> None:
        self._weights, self._interleaved = weights, interleaved
        outputs = [len(weight) for weight in weights]
        if interleaved:
            panel = library().slipstream_panel()
            outputs = [-(-number // panel) * panel for number in outputs]
        self.shape = (sum(outputs), weights[0].shape[1])
        self.order: Tensor | None = None

    def __getitem__(self, outputs: slice) -> Tensor:
        parts = self.parts(outputs.start, outputs.stop)
        if len(parts) == 1:
            return parts[0]
        return interleave(parts) if self._interleaved else torch.cat(parts)

    def parts(self, begin: int, end: int) -> list[Tensor]:
        """What the outputs from `begin` to `end` are made of, in the weights' own memory."""
        if self._interleaved:  # whole panels of each
            return [weight[begin // 2 : end // 2] for weight in self._weights]
        parts, first = [], 0
        for weight in self._weights:
            parts.append(weight[max(begin - first, 0) : max(end - first, 0)])
            first += len(weight)
        return [part for part in parts if len(part)]


def _stacked_bias(outputs: list[int], biases: list[Tensor | None], interleaved: bool) -> Tensor | None:
    if all(bias is None for bias in biases):
        return None
    parts = [
        torch.zeros(number, dtype=torch.float32, device="cpu") if bias is None else bias.detach().float()
        for number, bias in zip(outputs, biases, strict=True)
    ]
    return interleave([part[:, None] for part in parts])[:, 0] if interleaved else torch.cat(parts)


def _packed_change(layers: Sequence[GroupedLinear], interleaved: bool, padded: int) -> PackedChange | None:
    """What adapters add to layers that are stacked; None where nothing is added."""
    changes = [layer.change for layer in layers]
    if all(change is None for change in changes):
        return None
    return PackedChange(changes, _places(layers, interleaved), padded, library().slipstream_panel())


def packed_adapter_bytes(layers: Sequence[GroupedLinear], interleaved: bool = False) -> int:
    """What an adapter's changes take besides layers that are packed as one; they may be without numbers."""
    changes = [layer.change for layer in layers]
    if all(change is None for change in changes):
        return 0
    places, panel = _places(layers, interleaved), library().slipstream_panel()
    outputs = [layer.out_features for layer in layers]
    if interleaved:
        outputs = [-(-number // panel) * panel for number in outputs]
    padded = int(library().slipstream_padded_out(sum(outputs)))
    return packed_change_bytes(changes, places, padded, panel)


def _places(layers: Sequence[GroupedLinear], interleaved: bool) -> list[Tensor]:
    """int64 [out] for each layer: where its outputs are in the stack."""
    panel = library().slipstream_panel()
    places, first = [], 0
    for number, layer in enumerate(layers):
        outputs = torch.arange(layer.out_features)
        places.append(
            (outputs // panel * len(layers) + number) * panel + outputs % panel
            if interleaved
            else first + outputs
        )
        first += layer.out_features
    return places


class _GroupedStack:
    """Layers that were saved in groups, one behind the other, or with alternating panels; sliced as a weight is."""

    def __init__(self, layers: Sequence[GroupedLinear], kernel: Kernel, interleaved: bool) -> None:
        self._layers, self._kernel, self._interleaved = layers, kernel, interleaved
        self._panel = library().slipstream_panel()
        self.order = layers[0].order
        outputs = [layer.out_features for layer in layers]
        if interleaved:
            outputs = [-(-number // self._panel) * self._panel for number in outputs]
        self.shape = (sum(outputs), layers[0].in_features)

    def parts(self, _begin: int, _end: int) -> list[Tensor]:
        """What can be given back while it is packed: nothing."""
        return []

    def __getitem__(self, outputs: slice) -> GroupedWeight | BlockedWeight:
        begin, end = outputs.start, min(outputs.stop, self.shape[0])
        if self._interleaved:  # whole pairs of panels
            bounds = [(begin // 2, min(end // 2, layer.out_features)) for layer in self._layers]
            return self._combined(list(zip(self._layers, bounds, strict=True)), self._alternating)
        parts: list[tuple[GroupedLinear, tuple[int, int]]] = []
        first = 0
        for layer in self._layers:
            low, high = max(begin - first, 0), min(end - first, layer.out_features)
            if low < high:
                parts.append((layer, (low, high)))
            first += layer.out_features
        return self._combined(parts, torch.cat)

    def _combined(
        self, parts: list[tuple[GroupedLinear, tuple[int, int]]], combine: Callable[[list[Tensor]], Tensor]
    ) -> GroupedWeight | BlockedWeight:
        kernel = self._kernel
        blocks = [layer.blocks(*bounds) for layer, bounds in parts] if not kernel.group else []
        if blocks:
            return combined([block for block in blocks if block is not None], combine)
        groups = [layer.part(*bounds) for layer, bounds in parts]
        wanted = (kernel.bits, kernel.group, kernel.has_zeros, kernel.table)
        return combined([part.converted(*wanted) for part in groups], combine)

    def _alternating(self, parts: list[Tensor]) -> Tensor:
        """The panels of two tensors [out, any] in turns, the last ones padded."""
        whole = [torch.nn.functional.pad(part, (0, 0, 0, -len(part) % self._panel)) for part in parts]
        width = parts[0].shape[1]
        return torch.stack([part.view(-1, self._panel, width) for part in whole], 1).view(-1, width)


def fitted(weight: Tensor, kernel: Kernel, num_threads: int) -> GroupedWeight:
    """Codes for a weight, float32 [out, in]: of 8 bits the nearest ones, of 4 bits with the scales and zeros that leave
    the least error."""
    num_out, num_in = weight.shape
    codes = torch.empty(num_out, num_in, dtype=torch.uint8, device="cpu")
    scales = empty_rows(num_out, -(-num_in // kernel.group))
    if kernel.bits == 8:
        if kernel.has_zeros:
            raise ValueError("weights are rounded to 8 bits without zeros")
        library().slipstream_round_groups(
            weight.data_ptr(), num_in, num_out, kernel.group, codes.data_ptr(), scales.data_ptr(), num_threads
        )
        return GroupedWeight(codes, scales, None, kernel.group, 8)
    zeros = torch.empty_like(scales)
    library().slipstream_fit_groups(
        weight.data_ptr(),
        num_in,
        num_out,
        kernel.group,
        kernel.has_zeros,
        codes.data_ptr(),
        scales.data_ptr(),
        zeros.data_ptr(),
        num_threads,
    )
    return GroupedWeight(codes, scales, zeros if kernel.has_zeros else None, kernel.group)


def _pack_held(
    weight: GroupedWeight | BlockedWeight, kernel: Kernel, panels: Tensor, factors: Tensor, num_threads: int
) -> None:
    """Pack outputs whose codes are known."""
    lib, (num_out, num_in) = library(), weight.codes.shape
    written = (num_in, num_out, panels.data_ptr(), factors.data_ptr(), num_threads)
    codes = weight.codes.contiguous()
    if isinstance(weight, BlockedWeight):
        of_groups = [part.contiguous() for part in (weight.group_scales, weight.group_minimums)]
        of_blocks = [part.float().contiguous() for part in (weight.scales, weight.minimums)]
        lib.slipstream_pack_blocks(
            codes.data_ptr(), *(part.data_ptr() for part in (*of_groups, *of_blocks)), *written
        )
        return
    scales = weight.scales.float().contiguous()
    zeros = None if weight.zeros is None else weight.zeros.float().contiguous()
    lib.slipstream_pack_groups(
        kernel.kind,
        kernel.group,
        codes.data_ptr(),
        scales.data_ptr(),
        None if zeros is None else zeros.data_ptr(),
        *written,
    )
