"""Mixtures of experts as a Transformers model has them.

Since version 5 of Transformers the weights of a layer's experts are two parameters of three dimensions.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from slipstream.models.cpu.kernel import Kernel
from slipstream.models.linear.grouped import GroupedLinear


class FileStack(ABC):
    """The weights of a layer's experts that stay in a file, in the place of a parameter."""

    ndim = 3
    shape: tuple[int, int, int]
    """That of the parameter."""
    kernel: Kernel | None = None
    """How kernels hold all experts as the file does, all of them alike; None where each is rounded as it is read."""

    @abstractmethod
    def read(self, expert: int) -> Tensor:
        """The file's numbers of one expert, float32, as the parameter has them."""

    @abstractmethod
    def layers(self, expert: int) -> list[GroupedLinear]:
        """Those of one expert as the file has them: gate and up, or one; without biases."""

    @property
    def is_kept(self) -> bool:
        """Whether kernels hold the weights as the file does."""
        return self.kernel is not None

    def __getitem__(self, expert: Any) -> Tensor:
        """As a parameter is indexed by the passes of a Transformers model."""
        return self.read(int(expert))

    def numel(self) -> int:
        """How many weights all experts have."""
        return math.prod(self.shape)


def file_stacks(model: nn.Module) -> list[FileStack]:
    """Those of all layers of a model."""
    return [held for part in model.modules() for held in vars(part).values() if isinstance(held, FileStack)]


@dataclass(frozen=True, slots=True)
class BesideNames:
    """Dotted names of what a layer has where experts stand beside its MLP."""

    router_scale: str
    """What the router's rows are multiplied with, once they are divided by their root mean square."""
    router_factor: str
    """A number that they are multiplied with besides."""
    scales: str
    """What a row's share of each expert is multiplied with."""
    input_norm: str
    """Norm of what the experts read of the states."""
    mlp_out_norm: str
    """Norm of what the MLP gives, before the two are added."""
    output_norm: str
    """Norm of what the experts give."""


@dataclass(frozen=True, slots=True)
class Clamp:
    """GPT-OSS's gate: (up + 1) * gate * sigmoid(slope * gate), the gate at most `limit`, up on both sides."""

    limit: float
    slope: float


@dataclass(frozen=True, slots=True)
class ExpertParts:
    """The experts of one layer, and what chooses among them."""

    router: Tensor
    """[experts, hidden]"""
    router_bias: Tensor | None
    gate_up: nn.Parameter | FileStack
    """[experts, 2 * intermediate, hidden], or its last two dimensions the other way round."""
    down: nn.Parameter | FileStack
    """[experts, hidden, intermediate], likewise."""
    gate_up_bias: Tensor | None
    """[experts, 2 * intermediate]"""
    down_bias: Tensor | None
    """[experts, hidden]"""
    is_transposed: bool
    """Whether the weights have their inputs first."""
    alternates: bool
    """Whether outputs of gate and up take turns; else the gate's come first."""
    num_chosen: int
    """Experts that a row is sent to."""
    has_whole_shares: bool
    """Whether a row's shares add up to 1: a softmax over the chosen alone."""
    clamp: Clamp | None = None
    """How gate and up are made one where it is not by an activation alone."""

    @classmethod
    def of(
        cls, router: Any, experts: Any, num_chosen: int, has_whole_shares: bool, clamp: Clamp | None
    ) -> ExpertParts:
        """Read the parts from a layer's modules; raises `AttributeError` where weights are missing or others."""
        shapes = ((router, "weight", 2), (experts, "gate_up_proj", 3), (experts, "down_proj", 3))
        for module, name, dimensions in shapes:
            if getattr(getattr(module, name), "ndim", 0) != dimensions:
                raise AttributeError(
                    f"{type(module).__name__}.{name} is no tensor of {dimensions} dimensions"
                )
        return cls(
            router=router.weight,
            router_bias=getattr(router, "bias", None),
            gate_up=experts.gate_up_proj,
            down=experts.down_proj,
            gate_up_bias=getattr(experts, "gate_up_proj_bias", None),
            down_bias=getattr(experts, "down_proj_bias", None),
            is_transposed=bool(experts.is_transposed),
            alternates=not experts.is_concatenated,
            num_chosen=num_chosen,
            has_whole_shares=has_whole_shares,
            clamp=clamp,
        )

    @property
    def parameters(self) -> list[Tensor]:
        """Every parameter of the two modules."""
        found = (self.router, self.router_bias, *self.stacks, self.gate_up_bias, self.down_bias)
        return [tensor for tensor in found if tensor is not None]

    @property
    def stacks(self) -> list[nn.Parameter]:
        """The weights of all experts, but for those that stay in a file."""
        return [stack for stack in (self.gate_up, self.down) if isinstance(stack, nn.Parameter)]

    @property
    def are_in_a_file(self) -> bool:
        """Whether some of the weights stay in a file until they are packed."""
        return len(self.stacks) < 2

    @property
    def kept_in(self) -> tuple[Kernel, Kernel] | None:
        """How kernels hold gate and up, and the last layer, as a file does; None where they do not."""
        stacks = [stack for stack in (self.gate_up, self.down) if isinstance(stack, FileStack)]
        kernels = [stack.kernel for stack in stacks if stack.kernel is not None]
        return (kernels[0], kernels[1]) if len(kernels) == 2 else None

    @property
    def num_experts(self) -> int:
        return len(self.router)

    @property
    def intermediate(self) -> int:
        """Inputs of an expert's last linear layer."""
        return int(self.down.shape[1 if self.is_transposed else 2])

    @property
    def shape(self) -> tuple[Any, ...]:
        """What the kernels have one of for all layers."""
        return self.num_experts, self.intermediate, self.num_chosen, self.has_whole_shares, self.clamp

    def misfits(self, hidden: int) -> str | None:
        """Why the kernels cannot read these experts with states of `hidden` numbers; None where they can."""
        number, inner = self.num_experts, self.intermediate
        widths = {
            "router": (self.router, (number, hidden)),
            "router's bias": (self.router_bias, (number,)),
            "gate and up": (self.gate_up, (number, *self._turned(2 * inner, hidden))),
            "bias of gate and up": (self.gate_up_bias, (number, 2 * inner)),
            "last linear layer": (self.down, (number, *self._turned(hidden, inner))),
            "bias of the last linear layer": (self.down_bias, (number, hidden)),
        }
        for name, (tensor, expected) in widths.items():
            if tensor is not None and tuple(tensor.shape) != expected:
                return f"its experts' {name} has the shape {tuple(tensor.shape)}, and not {expected}"
        if not 1 <= self.num_chosen <= number:
            return f"its rows choose {self.num_chosen} of {number} experts"
        return None

    def _turned(self, outputs: int, inputs: int) -> tuple[int, int]:
        return (inputs, outputs) if self.is_transposed else (outputs, inputs)

    def gate_and_up(self, expert: int) -> list[Tensor]:
        """The weights [intermediate, hidden] of one expert, in its own memory."""
        return self._halves(self._weight(self.gate_up, expert))

    def gate_and_up_biases(self, expert: int) -> list[Tensor | None]:
        """Their biases."""
        if self.gate_up_bias is None:
            return [None, None]
        return [*self._halves(self.gate_up_bias.detach()[expert])]

    def last(self, expert: int) -> Tensor:
        """As `gate_and_up`, [hidden, intermediate]."""
        return self._weight(self.down, expert)

    def last_bias(self, expert: int) -> Tensor | None:
        """Its bias."""
        return None if self.down_bias is None else self.down_bias.detach()[expert]

    def kept_layers(self, expert: int) -> tuple[list[GroupedLinear], list[GroupedLinear]]:
        """Gate and up, and the last layer, as a file has them, where it is known what they are `kept_in`."""
        assert isinstance(self.gate_up, FileStack)
        assert isinstance(self.down, FileStack)
        return self.gate_up.layers(expert), self.down.layers(expert)

    def _weight(self, stack: nn.Parameter | FileStack, expert: int) -> Tensor:
        weight = stack.read(expert) if isinstance(stack, FileStack) else stack.detach()[expert]
        return weight.T if self.is_transposed else weight

    def _halves(self, both: Tensor) -> list[Tensor]:
        if self.alternates:
            return [both[::2], both[1::2]]
        return [both[: self.intermediate], both[self.intermediate :]]
