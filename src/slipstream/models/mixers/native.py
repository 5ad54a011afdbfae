"""Going a walk over states in the CPU kernels (`cpu/kernels/recurrent.h`): all steps of a pass in one call."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from slipstream.kv.state import StatePass
from slipstream.models.cpu.native import empty_rows, library
from slipstream.models.cpu.structs import ConvolutionStruct, OuterProductsStruct, WalkStruct
from slipstream.models.mixers.outer_products import OuterProducts


class NativeWalk:
    """The walk of one pass, as the kernels read it."""

    def __init__(self, states: StatePass, num_threads: int) -> None:
        walk = states.walk
        self._states, self._num_threads = states, num_threads
        copies = np.full(states.num_steps, -1, np.int64)
        copies[list(walk.copies)] = list(walk.copies.values())
        self._arrays = [
            *map(_numbers, (walk.first_steps, walk.slots, walk.sources, walk.targets)),
            copies,
        ]
        self._struct = WalkStruct(
            states.num_steps, len(walk.slots), walk.num_buffers, 0, *map(_address, self._arrays)
        )
        kept = list(states.kept_windows())
        self._num_kept = len(kept)
        self._kept = np.array(kept, np.int64).reshape(-1, 2).T.copy()

    def outer_products(self, products: OuterProducts, states: Tensor) -> Tensor:
        """As `OuterProducts.run`, to float32 rounding."""
        p = products
        given = [
            None if each is None else each.contiguous()
            for each in (p.query, p.key, p.value, p.decay, p.beta, p.rates)
        ]
        output = empty_rows(*p.value.shape)
        struct = OuterProductsStruct(
            p.value.shape[1],
            *p.key.shape[1:],
            p.value.shape[2],
            *(None if each is None else each.data_ptr() for each in given),
            output.data_ptr(),
            states.data_ptr(),
            states.stride(0),
            *p.decay.shape[2:],
        )
        library().slipstream_outer_products(byref(self._struct), byref(struct), self._num_threads)
        return output

    def convolve(self, window: Tensor, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """As `StatePass.convolve`, to float32 rounding."""
        inputs, weight = inputs.contiguous(), weight.detach().float().contiguous()
        bias = None if bias is None else bias.detach().float().contiguous()
        output = empty_rows(*inputs.shape)
        struct = ConvolutionStruct(
            *weight.shape,
            inputs.data_ptr(),
            weight.data_ptr(),
            None if bias is None else bias.data_ptr(),
            output.data_ptr(),
            window.data_ptr(),
            window.stride(0),
            _address(self._states.taps(weight.shape[1])),
            *map(_address, self._kept),
            self._num_kept,
        )
        library().slipstream_convolve(byref(self._struct), byref(struct), self._num_threads)
        return output


def _numbers(values: Sequence[int]) -> NDArray[np.int64]:
    return np.array(values, np.int64)


def _address(array: NDArray[np.int64]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
