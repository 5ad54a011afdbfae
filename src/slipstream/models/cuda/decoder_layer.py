"""One layer of the GPU's decoder: its weights, its attention and its MLP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from slipstream.models.attention.base import AttentionPass, Variant
from slipstream.models.cuda.activation import activate
from slipstream.models.cuda.linear import DeviceWeight
from slipstream.models.cuda.norm import Norm
from slipstream.models.cuda.rotation import Turns, rotate
from slipstream.models.families.parts import LayerParts
from slipstream.models.linear.formats import WeightFormat
from slipstream.models.linear.grouped import GroupedLinear
from slipstream.models.weight_check import WeightCheck


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """What all layers of a model have in common."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    activation: int
    """A number of `families.activations`."""
    is_gated: bool
    has_interleaved_heads: bool
    """Whether query, key and value of a head lie behind each other."""
    epsilon: float
    """Of norms."""
    dtype: torch.dtype
    """Of the states."""


class Packing(NamedTuple):
    """What becomes of a model's linear layers."""

    fmt: WeightFormat | None
    """What plain ones are packed in; None: they stay as they are, and share their memory with the model."""
    frees: bool
    """Whether the model's own numbers are freed where the two share nothing."""
    config: Any
    """The model's, for what is said of packed weights that are wrong."""
    device: torch.device
    """For weights that stay in a file."""
    reproducible: bool = True
    """See `EngineConfig.reproducible`."""


class DecoderLayer:
    """Takes the weights of one layer of a Transformers model."""

    def __init__(
        self,
        number: int,
        parts: LayerParts,
        mixture: nn.Module | None,
        variant: Variant,
        sizes: LayerSizes,
        packing: Packing,
    ) -> None:
        """`mixture` is the module that sends rows to experts, in the place of an MLP."""
        self.number, self._variant, self._sizes = number, variant, sizes
        self.attention_norm = Norm.of(parts.attention_norm, sizes.epsilon)
        self.attended_norm = Norm.of(parts.attended_norm, sizes.epsilon)
        self.mlp_norm = Norm.of(parts.mlp_norm, sizes.epsilon)
        self.mlp_out_norm = Norm.of(parts.mlp_out_norm, sizes.epsilon)
        self._query_norm = Norm.of(parts.query_norm, sizes.epsilon)
        self._key_norm = Norm.of(parts.key_norm, sizes.epsilon)
        self._qkv = device_weight(parts.qkv, sizes.dtype, packing)
        self._output = device_weight([parts.output], sizes.dtype, packing)
        self._mixture = mixture
        self._mlp: tuple[DeviceWeight, DeviceWeight] | None = None
        if parts.down is not None:
            gate_up, down = parts.gate_up, [parts.down]
            self._mlp = (
                device_weight(gate_up, sizes.dtype, packing),
                device_weight(down, sizes.dtype, packing),
            )
        self.experts = parts.experts

    @property
    def linears(self) -> tuple[DeviceWeight, ...]:
        """In the order in which a pass reads them."""
        return self._qkv, self._output, *(self._mlp or ())

    @property
    def norms(self) -> list[Norm]:
        """All that it has."""
        found = (self.attention_norm, self.attended_norm, self.mlp_norm, self.mlp_out_norm)
        return [norm for norm in (*found, self._query_norm, self._key_norm) if norm is not None]

    def attend(self, rows: Tensor, attention: AttentionPass, turns: Turns | None) -> Tensor:
        """[n, width], behind the norm -> what attention adds to the states; `turns` is None where nothing rotates."""
        query, key, value = self._heads(self._qkv(rows), turns)
        query, key, value = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
        attended = attention.attend(self.number, query, key, value, self._variant)  # [1, n, heads, dim]
        return self._output(attended[0].flatten(1))

    def feed(self, rows: Tensor) -> Tensor:
        """[n, width], behind the norm -> what the MLP adds to the states; experts compute in Transformers' own code."""
        if self._mlp is None:
            assert self._mixture is not None
            found = self._mixture(rows[None])
            states: Tensor = found if isinstance(found, Tensor) else found[0]  # some give what was chosen too
            return states[0]
        gate_up, down = self._mlp
        return down(activate(gate_up(rows), self._sizes.activation, self._sizes.is_gated))

    def _heads(self, qkv: Tensor, turns: Turns | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, [n, heads, dim], normed and rotated."""
        sizes, dim = self._sizes, self._sizes.head_dim
        if sizes.has_interleaved_heads:
            query, key, value = qkv.view(len(qkv), sizes.num_heads, 3, dim).unbind(2)
        else:
            counts = (sizes.num_heads, sizes.num_kv_heads, sizes.num_kv_heads)
            query, key, value = (
                part.view(len(qkv), count, dim)
                for part, count in zip(
                    qkv.split_with_sizes([n * dim for n in counts], 1), counts, strict=True
                )
            )
        query_norm, key_norm = self._query_norm, self._key_norm
        if query_norm is not None and key_norm is not None and query_norm.weight.numel() != dim:
            query = query_norm(query.flatten(1)).view(query.shape)  # of all heads at once
            key = key_norm(key.flatten(1)).view(key.shape)
            query_norm = key_norm = None
        if turns is None and query_norm is None and key_norm is None:
            return query, key, value
        if turns is None:
            turns = Turns(*(query.new_empty(len(query), 0, dtype=torch.float32),) * 2)
        query, key = rotate(
            query, key, turns.cosines, turns.sines,
            None if query_norm is None else query_norm.weight, None if key_norm is None else key_norm.weight,
            sizes.epsilon,
        )  # fmt: skip
        return query, key, value


def device_weight(
    linears: Sequence[nn.Linear | GroupedLinear], dtype: torch.dtype, packing: Packing
) -> DeviceWeight:
    """Linear layers as one; plain ones that are not packed become views of it."""
    plain = [linear for linear in linears if isinstance(linear, nn.Linear)]
    if packing.fmt is None and len(plain) == len(linears):
        weight = DeviceWeight.of([plain[0] if len(plain) == 1 else _joined(plain)], dtype)
        weight.calls_library = not packing.reproducible and dtype != torch.float32
        return weight
    weight = DeviceWeight.of(linears, dtype, packing.fmt, packing.device)
    if packing.fmt is not None and plain:
        check = WeightCheck(packing.config, packing.fmt)
        check.check_stack(f"a stack of {len(plain)} linear layers", plain, weight, dtype)
    if packing.frees:
        for linear in linears:
            forget_numbers(linear)
    return weight


def forget_numbers(module: nn.Module) -> None:
    """Give up a module's numbers. One is left of each tensor, seen everywhere: a model is where its first tensor is."""
    for parameter in module.parameters():
        parameter.data = parameter.detach().new_zeros(()).expand(parameter.shape)


def _joined(linears: Sequence[nn.Linear]) -> nn.Linear:
    """One layer, in whose memory the weights of all lie from now on."""
    weights = [linear.weight.detach() for linear in linears]
    whole = nn.Linear(weights[0].shape[1], sum(map(len, weights)), bias=False, device="meta")
    whole.weight = nn.Parameter(_neighbours(weights), requires_grad=False)
    if any(linear.bias is not None for linear in linears):
        biases = [
            weight.new_zeros(len(weight)) if linear.bias is None else linear.bias.detach()
            for linear, weight in zip(linears, weights, strict=True)
        ]
        whole.bias = nn.Parameter(torch.cat(biases), requires_grad=False)
    for linear, part in zip(
        linears, whole.weight.detach().split_with_sizes([*map(len, weights)]), strict=True
    ):
        linear.weight.data = part
    return whole


def _neighbours(weights: Sequence[Tensor]) -> Tensor:
    """The weights [out, in] behind each other: in their own memory where they already lie so."""
    first = weights[0]
    ends = [weight.data_ptr() + weight.nbytes for weight in weights]
    lie_so = all(
        weight.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() and weight.is_contiguous()
        for weight in weights
    ) and ends[:-1] == [weight.data_ptr() for weight in weights[1:]]
    if not lie_so:
        return torch.cat([*weights])
    return first.as_strided((sum(map(len, weights)), first.shape[1]), (first.shape[1], 1))
