"""Mixtures of experts as the kernels read them.

Each expert is packed by itself, in memory that all of a layer have together, so that the kernels read one after the
other.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from slipstream.models.cpu.kernel import Kernel
from slipstream.models.cpu.native import library
from slipstream.models.cpu.packed_weight import PackedWeight, packed_bytes
from slipstream.models.cpu.pages import huge_buffer, release
from slipstream.models.cpu.structs import TABLE_KINDS, LinearStruct, MixtureStruct
from slipstream.models.families.experts import ExpertParts

_LINE_BYTES = 64

_ROUTER_KERNEL = Kernel(TABLE_KINDS[torch.float32], "slipstream_pack_float32", torch.float32.itemsize)


class PackedExperts:
    """The experts of one layer in the kernels' layout. `struct` is passed to the kernels."""

    def __init__(self, parts: ExpertParts, kernel: Kernel, give_back: bool, keeps: bool = True) -> None:
        """With `give_back` the pages of the model's own weights are returned to the system as they are packed. `keeps`
        says whether those that a file holds in groups stay so; else they are of the `kernel` too.

        The router keeps its own numbers, in 32 bits, whatever the kernel: it is small, and chooses.
        """
        self.num_experts, self.num_chosen = parts.num_experts, parts.num_chosen
        bias = None if parts.router_bias is None else parts.router_bias.detach()
        self.router = PackedWeight([parts.router], [bias], _ROUTER_KERNEL)
        hidden, inner, experts = parts.router.shape[1], parts.intermediate, range(parts.num_experts)
        panel = library().slipstream_panel()
        kept_in = parts.kept_in if keeps else None
        wide, narrow = kept_in or (kernel, kernel)
        kept = None if kept_in is None else [parts.kept_layers(expert) for expert in experts]
        room = _Room(wide, hidden, 2 * -(-inner // panel) * panel, len(experts))
        self.gate_up = []
        for expert in experts:
            pair = parts.gate_and_up(expert) if kept is None else kept[expert][0]
            own = give_back and isinstance(parts.gate_up, nn.Parameter)
            biases = parts.gate_and_up_biases(expert)
            self.gate_up.append(PackedWeight(pair, biases, wide, True, own, room.of(expert)))
        room = _Room(narrow, inner, hidden, len(experts))
        self.down = []
        for expert in experts:
            last = [parts.last(expert)] if kept is None else kept[expert][1]
            own = give_back and isinstance(parts.down, nn.Parameter)
            self.down.append(
                PackedWeight(last, [parts.last_bias(expert)], narrow, False, own, room.of(expert))
            )
        for stack in parts.stacks if give_back else ():
            release(stack)
        self._gate_up, self._down = _structs(self.gate_up), _structs(self.down)
        self.struct = MixtureStruct(router=self.router.struct, gate_up=self._gate_up, down=self._down)

    @property
    def linears(self) -> list[PackedWeight]:
        """The weights of all experts, and the router's."""
        return [self.router, *self.gate_up, *self.down]

    @property
    def nbytes(self) -> int:
        """Bytes held, padding included."""
        return sum(linear.nbytes for linear in self.linears)

    @property
    def least_bytes(self) -> int:
        """Bytes that a row must read: the router, and the experts that it is sent to."""
        return self._visited(self.router.least_bytes, [linear.least_bytes for linear in self.linears[1:]])

    @property
    def num_weights(self) -> int:
        """How many weights a row is multiplied with."""
        return self._visited(self.router.num_weights, [linear.num_weights for linear in self.linears[1:]])

    def _visited(self, of_router: int, of_experts: Sequence[int]) -> int:
        return of_router + sum(of_experts) * self.num_chosen // self.num_experts


def packed_expert_bytes(parts: ExpertParts, kernel: Kernel) -> tuple[int, int, int]:
    """What `PackedExperts` holds, padding included: (panels, scales, sums and inputs' orders, biases)."""
    number, hidden = parts.num_experts, parts.router.shape[1]
    wide, narrow = parts.kept_in or (kernel, kernel)
    of_all = (
        (1, packed_bytes(_ROUTER_KERNEL, hidden, number), parts.router_bias),
        (number, packed_bytes(wide, hidden, 2 * parts.intermediate), parts.gate_up_bias),
        (number, packed_bytes(narrow, parts.intermediate, hidden), parts.down_bias),
    )
    kept = () if parts.kept_in is None else parts.kept_layers(0)
    orders = number * sum(int(own[0].order.nbytes) for own in kept if own[0].order is not None)
    return (
        sum(count * panels for count, (panels, _, _), _ in of_all),
        sum(count * scales for count, (_, scales, _), _ in of_all) + orders,
        sum(count * biases for count, (_, _, biases), bias in of_all if bias is not None),
    )


class _Room:
    """Memory for the panels of weights of one shape, side by side."""

    def __init__(self, kernel: Kernel, in_features: int, out_features: int, number: int) -> None:
        self._each = packed_bytes(kernel, in_features, out_features)[0]
        self._stride = -(-self._each // _LINE_BYTES) * _LINE_BYTES
        self._memory = huge_buffer(self._stride * number)

    def of(self, place: int) -> Tensor:
        """uint8: the one at this place."""
        return self._memory[place * self._stride :][: self._each]


def _structs(weights: Sequence[PackedWeight]) -> ctypes.Array[LinearStruct]:
    return (LinearStruct * len(weights))(*(weight.struct for weight in weights))
