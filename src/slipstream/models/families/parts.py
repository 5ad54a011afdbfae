"""The weights of a model's layers, as a Transformers model has them and in the order that the CPU kernels read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from slipstream.models.families.experts import ExpertParts
from slipstream.models.linear.grouped import GroupedLinear, GroupedRows


@dataclass(frozen=True, slots=True)
class NormParts:
    """One norm's weights."""

    weight: Tensor
    bias: Tensor | None = None
    offset: float = 0.0
    """What is added to the weight."""
    is_centred: bool = False
    """Whether it is a layer norm, and no root mean square norm."""
    factor: float = 1.0
    """What the weight is multiplied with."""

    @classmethod
    def of(cls, norm: Any, offset: float) -> NormParts:
        """Read the parts from a module; raises `AttributeError` for one without a weight."""
        if getattr(norm, "weight", None) is None:
            raise AttributeError(f"{type(norm).__name__} has no weight")
        return cls(norm.weight, getattr(norm, "bias", None), offset, isinstance(norm, nn.LayerNorm))


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """What a layer does with what it is given besides the states."""

    gate: nn.Linear
    """Of the states; as wide as the inputs that it gates."""
    last: nn.Linear
    norm: NormParts
    """Of what they add to the states."""


@dataclass(frozen=True, slots=True)
class BesideParts:
    """What experts that stand beside an MLP have besides others."""

    router_norm: NormParts
    """Of what the router reads of the states."""
    input_norm: NormParts
    """Of what the experts read."""
    mlp_out_norm: NormParts
    """Of what the MLP gives, before the two are added."""
    output_norm: NormParts
    """Of what the experts give."""
    scales: Tensor
    """[experts]: what a row's share of an expert is multiplied with."""

    @property
    def norms(self) -> list[NormParts]:
        return [self.router_norm, self.input_norm, self.mlp_out_norm, self.output_norm]


@dataclass(frozen=True, slots=True)
class LayerParts:
    """One layer's weights, as the model has them."""

    attention_norm: NormParts | None
    """None where the attention reads its rows as they are."""
    mlp_norm: NormParts | None
    query_norm: NormParts | None
    key_norm: NormParts | None
    qkv: tuple[nn.Linear, ...]
    """Those of queries, keys and values, or one of all three; see `projected`."""
    output: nn.Linear
    gate_up: tuple[nn.Linear, ...]
    """Gate and up, or one of both; up alone in an MLP without a gate."""
    down: nn.Linear | None
    """None where experts are in its place: then there are no gate and up either."""
    attended_norm: NormParts | None = None
    """Norm of what attention adds to the states."""
    mlp_out_norm: NormParts | None = None
    """Norm of what the MLP adds to them."""
    is_gated: bool = True
    interleaved_heads: int = 0
    """Heads of which one layer has query, key and value head by head; 0: it has not."""
    experts: ExpertParts | None = None
    """In the MLP's place, or beside it."""
    beside: BesideParts | None = None
    """Where experts are beside the MLP."""
    sinks: Tensor | None = None
    """[heads]: scores that take part in attention and carry no value."""
    projected: int = 2
    """Of keys and values, what its linear layers make: 2: both; 1: keys, which are the values too before norms and
    rotation; 0: neither, as it reads the entries of an earlier layer."""
    has_value_norm: bool = False
    """Whether values are divided by their root mean square, head by head."""
    head_dim: int | None = None
    """None: as its linear layers have it."""
    key_groups: int | None = None
    """Heads that share a key head; None: as the configuration says."""
    inputs: LayerInputs | None = None
    scale: Tensor | None = None
    """[1]: what the states behind the layer are multiplied with."""

    @property
    def linears(self) -> tuple[nn.Linear, ...]:
        """All but those of experts."""
        of_inputs = () if self.inputs is None else (self.inputs.gate, self.inputs.last)
        return (
            *self.qkv,
            self.output,
            *self.gate_up,
            *(() if self.down is None else (self.down,)),
            *of_inputs,
        )

    @property
    def matrices(self) -> list[Tensor]:
        """The weights that are packed and are not those of layers that a file holds quantised."""
        plain = [linear.weight for linear in self.linears if isinstance(linear, nn.Linear)]
        return plain + ([] if self.experts is None else list(self.experts.stacks))

    @property
    def norms(self) -> list[NormParts]:
        found = [*self.norms_of_states, self.query_norm, self.key_norm]
        return [norm for norm in found if norm is not None]

    @property
    def norms_of_states(self) -> list[NormParts]:
        """All but those of heads."""
        of_layer = (self.attention_norm, self.mlp_norm, self.attended_norm, self.mlp_out_norm)
        found = [*of_layer, None if self.inputs is None else self.inputs.norm]
        found += [] if self.beside is None else self.beside.norms
        return [norm for norm in found if norm is not None]

    @property
    def parameters(self) -> list[Tensor]:
        """Every parameter of the layer."""
        of_norms = [tensor for norm in self.norms for tensor in (norm.weight, norm.bias)]
        of_linears = [tensor for linear in self.linears for tensor in linear.parameters()]
        of_experts = [] if self.experts is None else self.experts.parameters
        scales = None if self.beside is None else self.beside.scales
        every = (*of_norms, *of_linears, *of_experts, scales, self.sinks)
        return [tensor for tensor in every if tensor is not None]

    @property
    def ordered_qkv(self) -> list[nn.Linear | GroupedLinear]:
        """What the kernels read: all queries, then all keys, then all values."""
        if not self.interleaved_heads:
            return list(self.qkv)
        (fused,) = self.qkv
        width = fused.out_features // (3 * self.interleaved_heads)
        firsts = [width * (3 * head + part) for part in range(3) for head in range(self.interleaved_heads)]
        return [outputs(fused, first, first + width) for first in firsts]

    @property
    def ordered_gate_up(self) -> list[nn.Linear | GroupedLinear]:
        """Gate and up apart; up alone where there is no gate."""
        if not self.is_gated or len(self.gate_up) == 2:
            return list(self.gate_up)
        (fused,) = self.gate_up
        half = fused.out_features // 2
        return [outputs(fused, 0, half), outputs(fused, half, 2 * half)]

    @property
    def intermediate(self) -> int:
        """Inputs of the last linear layer of the MLP, or of an expert in its place."""
        if self.down is not None:
            return self.down.in_features
        assert self.experts is not None
        return self.experts.intermediate


def outputs(linear: nn.Linear | GroupedLinear, begin: int, end: int) -> nn.Linear | GroupedLinear:
    """Some neighbouring outputs of a linear layer, in its memory."""
    if isinstance(linear, GroupedLinear):
        return GroupedRows(linear, begin, end)
    part = nn.Linear(linear.in_features, end - begin, bias=False, device="meta")
    part.weight = nn.Parameter(linear.weight.detach()[begin:end], requires_grad=False)
    if linear.bias is not None:
        part.bias = nn.Parameter(linear.bias.detach()[begin:end], requires_grad=False)
    return part
