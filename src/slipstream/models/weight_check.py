"""Whether packed weights are the checkpoint's: compared output by output, by products that round no row.

Rows of 1 and -1 (`trial.sign_rows`) are multiplied with the checkpoint's numbers before they are packed and by the
kernels afterwards. Rounding such rows to 8 bits changes nothing, so what differs is the weights: a wrong scale, a block
in another's place, another layer's matrix, or a kernel that multiplies wrongly.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.models.cpu import native
from slipstream.models.cpu.native import library
from slipstream.models.cpu.packed_weight import interleave
from slipstream.models.cpu.structs import LayerStruct, LinearStruct, ModelStruct
from slipstream.models.families.experts import ExpertParts
from slipstream.models.families.inputs import InputParts
from slipstream.models.families.parts import LayerParts
from slipstream.models.files.stored import StoredEmbedding
from slipstream.models.linear.formats import WeightFormat
from slipstream.models.linear.grouped import GroupedLinear
from slipstream.models.linear.layers import PackedLinear
from slipstream.models.support import unsupported
from slipstream.models.trial import NUM_SIGN_ROWS, sign_rows

_EXACT = 1e-4
"""Bound of weights that are the checkpoint's numbers: sums are taken in another order."""
_STORED = 0.005
"""Bound of weights that stay as a file holds them quantised: their groups' zeros are rounded to half floats."""
_OF_ONE_OUTPUT = 4
"""The worst output may be so many times as far off as half of all may be."""


@dataclass(frozen=True, slots=True)
class Expected:
    """Products of the checkpoint's numbers."""

    products: Tensor
    """float32 [NUM_SIGN_ROWS, out]"""
    bound: float
    """How far half of the outputs may be off, relative to their size."""


class WeightCheck:
    """Collects the products before weights are packed, and compares those afterwards with them."""

    def __init__(self, config: Any, fmt: WeightFormat) -> None:
        """`fmt` holds the weights that no file holds quantised."""
        self._config, self._format = config, fmt
        self._of_layers: list[dict[str, list[Expected]]] = []
        self._of_modules: dict[str, Expected] = {}
        self.head: Expected | None = None
        self.table: Expected | None = None
        self.input_table: Expected | None = None
        self.input_projection: Expected | None = None

    def add_layer(self, parts: LayerParts, was_grouped: set[int]) -> None:
        """Add the products of a layer of the fused decoder, in floating point; `was_grouped` are ids of linears that a
        file holds quantised."""
        found = {
            "qkv": [self._stack(parts.ordered_qkv, parts.qkv, was_grouped)],
            "output": [self._stack([parts.output], [parts.output], was_grouped)],
        }
        if parts.down is not None:
            gate_up = self._stack(parts.ordered_gate_up, parts.gate_up, was_grouped, parts.is_gated)
            found |= {"gate_up": [gate_up], "down": [self._stack([parts.down], [parts.down], was_grouped)]}
        if parts.experts is not None:
            found |= self._of_experts(parts.experts)
        if parts.inputs is not None:
            gate, last = [parts.inputs.gate], [parts.inputs.last]
            found["input_gate"] = [self._stack(gate, gate, was_grouped)]
            found["input_projection"] = [self._stack(last, last, was_grouped)]
        self._of_layers.append(found)

    def _of_experts(self, experts: ExpertParts) -> dict[str, list[Expected]]:
        """Return what is expected of the experts of a layer, and of what chooses among them."""
        bound = _STORED if experts.kept_in is not None else self._bound(self._format)
        if experts.are_in_a_file:  # 16 bits round them, which rounds nothing in checkpoints of 16 bits
            bound = max(bound, _STORED)
        numbers = range(experts.num_experts)
        return {
            "router": [Expected(_product(experts.router, experts.router_bias), _EXACT)],
            "expert_gate_up": [
                Expected(
                    _interleaved(_products(experts.gate_and_up(each), experts.gate_and_up_biases(each))),
                    bound,
                )
                for each in numbers
            ],
            "expert_down": [
                Expected(_product(experts.last(each), experts.last_bias(each)), bound) for each in numbers
            ],
        }

    def add_inputs(self, parts: InputParts) -> None:
        """Add what makes the inputs of all layers besides the states."""
        if parts.stored is not None:
            self.input_table = Expected(parts.stored(sign_rows(parts.stored.in_features)), _STORED)
        plain = parts.plain_projection()
        self.input_projection = self._stack([plain], [plain], {id(plain)} - {id(parts.projection)})

    def check_layers(self, layers: Sequence[LayerStruct]) -> None:
        """Raise `UnsupportedModelError` for a packed layer whose weights are not those that were added."""
        for number, (layer, found) in enumerate(zip(layers, self._of_layers, strict=True)):
            for name, expected in found.items():
                structs = _structs(layer, name, len(expected))
                for each, struct in zip(expected, structs, strict=True):
                    self.compare(f"{name} of layer {number}", each, _multiply(struct))

    def add_table(self, embedding: Any, head: Any) -> None:
        """Add an embedding that a file holds quantised and that is not the output layer: no pass reads all of it."""
        if isinstance(embedding, StoredEmbedding) and embedding.linear is not head:
            table = embedding.linear
            self.table = Expected(table(sign_rows(table.in_features)), _STORED)

    def check_tables(self, model: ModelStruct) -> None:
        """As `check_layers`, of the output layer, packed embeddings, and what makes inputs of the layers."""
        of_model = (
            ("the output layer", self.head, model.head),
            ("the embedding", self.table, model.table),
            ("the embedding of layers", self.input_table, model.inputs.packed_table),
            ("the inputs of layers", self.input_projection, model.inputs.projection),
        )
        for what, expected, struct in of_model:
            if expected is not None:
                self.compare(what, expected, _multiply(struct))

    @contextlib.contextmanager
    def watching(
        self, modules: dict[str, nn.Module], fmt: Callable[[nn.Module], WeightFormat]
    ) -> Iterator[None]:
        """Collect the products of linear layers in the pass that runs within the body; those that it does not call are
        not compared.

        Each multiplies the rows of signs along with its own, so that a weight that is widened for it is widened once.
        """
        handles = []
        for name, module in modules.items():
            bound = _STORED if isinstance(module, GroupedLinear) else self._bound(fmt(module))
            watch = _AppendedSigns(self._of_modules, name, bound)
            handles.append(module.register_forward_pre_hook(watch.before, with_kwargs=True))
            handles.append(module.register_forward_hook(watch.behind))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def take_head(self, name: str) -> None:
        """The watched layer of this name is the fused decoder's output layer."""
        self.head = self._of_modules.pop(name, None)

    def check_modules(self, model: nn.Module) -> None:
        """As `check_layers`, of the packed linear layers of a model that runs layer by layer."""
        for name, expected in self._of_modules.items():
            packed = model.get_submodule(name)
            if isinstance(packed, PackedLinear):
                self.compare(name, expected, packed(sign_rows(packed.in_features)))

    def check_stack(
        self,
        what: str,
        linears: Sequence[nn.Linear],
        multiply: Callable[[Tensor], Tensor],
        dtype: torch.dtype,
    ) -> None:
        """As `check_layers`, of linear layers that were packed as one for rows of `dtype`, on any device."""
        rows = sign_rows(linears[0].in_features).to(linears[0].weight.device)
        products = [_product(linear.weight, linear.bias, rows) for linear in linears]
        expected = Expected(torch.cat(products, dim=1), self._bound(self._format))
        self.compare(what, expected, multiply(rows.to(dtype)).float())

    def compare(self, what: str, expected: Expected, ours: Tensor) -> None:
        """Raise `UnsupportedModelError` unless products [NUM_SIGN_ROWS, out] are those that are expected."""
        size = expected.products.norm(dim=0)  # [out]
        error = (ours - expected.products).norm(dim=0)
        # Small outputs, zeros of the padding among them, are measured by the size of others.
        error /= size.clamp_min(0.5 * float(size[size > 0].median()) if bool(size.any()) else 1.0)
        half, worst = float(error.median()), float(error.max())
        if half <= expected.bound and worst <= _OF_ONE_OUTPUT * expected.bound:
            return  # NaN is refused too
        odd = int((~(error <= _OF_ONE_OUTPUT * expected.bound)).sum())
        raise unsupported(
            self._config,
            f"the packed weights of {what} are not the checkpoint's: {odd} of {len(error)} outputs are wrong, the "
            f"worst by {worst:.2g} of its size, half of all by {half:.2g} (at most {expected.bound:g})",
        )

    def _stack(
        self,
        ordered: Sequence[nn.Linear | GroupedLinear],
        linears: Sequence[nn.Module],
        was_grouped: set[int],
        is_interleaved: bool = False,
    ) -> Expected:
        """Return what is expected of linear layers that are packed as one."""
        found = [_product(linear.weight, linear.bias) for linear in ordered if isinstance(linear, nn.Linear)]
        stored = any(id(linear) in was_grouped for linear in linears)
        return Expected(
            _interleaved(found) if is_interleaved else torch.cat(found, dim=1),
            _STORED if stored else self._bound(self._format),
        )

    @staticmethod
    def _bound(fmt: WeightFormat) -> float:
        return _EXACT if fmt.weight_error is None else fmt.weight_error


class _AppendedSigns:
    """Gives a linear layer rows of signs along with its own, and takes what it makes of them off its outputs."""

    def __init__(self, into: dict[str, Expected], name: str, bound: float) -> None:
        self._into, self._name, self._bound = into, name, bound
        self._shape: torch.Size = torch.Size()

    def before(
        self, _: nn.Module, inputs: tuple[Tensor, ...], keywords: dict[str, Tensor]
    ) -> tuple[tuple[Tensor], dict[str, Tensor]]:
        (rows,) = (*inputs, *keywords.values())  # some models name the input
        self._shape = rows.shape[:-1]
        return (torch.cat([rows.reshape(-1, rows.shape[-1]), sign_rows(rows.shape[-1]).to(rows)]),), {}

    def behind(self, _: nn.Module, __: object, output: Tensor) -> Tensor:
        self._into[self._name] = Expected(output[-NUM_SIGN_ROWS:].float().clone(), self._bound)
        return output[:-NUM_SIGN_ROWS].view(*self._shape, output.shape[-1])


def _product(weight: Tensor, bias: Tensor | None, rows: Tensor | None = None) -> Tensor:
    """[out, in] -> float32 [NUM_SIGN_ROWS, out]; `rows` are the signs where the weight is."""
    rows = sign_rows(weight.shape[1]) if rows is None else rows
    return nn.functional.linear(
        rows, weight.detach().float(), None if bias is None else bias.detach().float()
    )


def _products(weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[Tensor]:
    return [_product(weight, bias) for weight, bias in zip(weights, biases, strict=True)]


def _interleaved(products: Sequence[Tensor]) -> Tensor:
    """Return the products of gate and up, as the kernels have their outputs."""
    return interleave([each.T.contiguous() for each in products]).T


def _structs(layer: LayerStruct, name: str, count: int) -> list[LinearStruct]:
    """The packed weights of a layer by the name under which they were added."""
    mixture = layer.mixture
    if name == "router":
        return [mixture.router]
    if name.startswith("expert_"):
        return [getattr(mixture, name.removeprefix("expert_"))[each] for each in range(count)]
    return [getattr(layer, name)]


def _multiply(struct: LinearStruct) -> Tensor:
    """[NUM_SIGN_ROWS, out]"""
    rows = sign_rows(struct.in_features)
    made = native.empty_rows(NUM_SIGN_ROWS, struct.out_features)
    library().slipstream_multiply(ctypes.byref(struct), rows.data_ptr(), NUM_SIGN_ROWS, made.data_ptr(), 1)
    return made
