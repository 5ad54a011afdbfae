"""A model whose matrices stay as a file holds them, quantised, until each is packed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from slipstream.errors import ModelError
from slipstream.models.families.experts import file_stacks
from slipstream.models.files.converted import ConvertedMatrix
from slipstream.models.files.grouped import GroupedMatrix, bounds
from slipstream.models.files.lora import WIDENS
from slipstream.models.files.stored_experts import KEPT, StoredStack, take_experts, take_stacks
from slipstream.models.files.stored_linear import StoredLinear, kernel_groups
from slipstream.models.linear.grouped import GroupedLinear
from slipstream.models.linear.low_rank import LowRankChange

KEPT_AS_STORED = (
    "%r is loaded as %s: layers that it holds quantised are kept so, quantization %s is for all others"
)
"""What is logged of a path, how its file holds layers, and a weight format that was requested."""


@dataclass(frozen=True, slots=True)
class StoredModel:
    """The weights of a model, as its files hold them."""

    tensors: Mapping[str, Tensor]
    """Those of plain numbers, under the model's names."""
    matrices: Mapping[str, GroupedMatrix]
    """Those that are quantised, by the names of their layers."""
    kind: str
    """As messages say it: 'GPTQ, 4 bits'."""
    converted: Mapping[str, ConvertedMatrix] = field(default_factory=dict)
    """Those that are converted while they are read."""
    narrow: Mapping[str, ConvertedMatrix] = field(default_factory=dict)
    """Those in FP8 that stay so; see `keeping_fp8`."""
    stacks: Mapping[str, StoredStack] = field(default_factory=dict)
    """Experts that stay in the file until they are packed, by the names of the parameters that they stand for; see
    `fit`."""

    @property
    def stay(self) -> bool:
        """Whether some are held as the file has them, quantised."""
        return bool(self.matrices or self.narrow or any(stack.is_kept for stack in self.stacks.values()))

    def state(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """For Transformers: all weights, a quantised one as a single number that is seen everywhere."""
        nothing = torch.zeros((), dtype=dtype)
        stand_ins = {
            f"{name}.weight": nothing.expand(matrix.out_features, matrix.in_features)
            for name, matrix in self.matrices.items()
        }
        stand_ins |= {name: nothing.expand(stack.shape) for name, stack in self.stacks.items()}
        return {**self.tensors, **stand_ins}

    def stacked(self, model: Any) -> StoredModel:
        """The same with those experts as `stacks` that only we can put together for `model`, which may be without
        numbers."""
        taken = take_stacks(self.matrices, self.tensors, model)
        return replace(
            self,
            tensors=_without(self.tensors, taken.names),
            matrices=_without(self.matrices, taken.names),
            stacks=taken.stacks,
        )

    def widened(self, dtype: torch.dtype, experts: torch.dtype | None = None) -> dict[str, Tensor]:
        """For Transformers: as `state`, with the quantised ones as plain numbers of this type, stacks as `experts`."""
        found = dict(self.tensors)
        found |= {name: stack.widened(experts or dtype) for name, stack in self.stacks.items()}
        for name, matrix in self.matrices.items():
            weight = torch.empty(matrix.out_features, matrix.in_features, dtype=dtype)
            for begin, end in bounds(matrix):
                weight[begin:end] = matrix.widened(begin, end)
            found[f"{name}.weight"] = weight
        return found

    def converted_to(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Those that are converted, as plain numbers of this type, and those in FP8 as `state` has them."""
        found = {f"{name}.weight": matrix.widened(dtype) for name, matrix in self.converted.items()}
        nothing = torch.zeros((), dtype=dtype)
        return found | {
            f"{name}.weight": nothing.expand(matrix.shape) for name, matrix in self.narrow.items()
        }

    def keeping_fp8(self, model: Any) -> StoredModel:
        """These weights, of which those of plain layers of `model` (it may be without numbers) stay in FP8."""
        modules = dict(model.named_modules())
        narrow = {
            name: matrix
            for name, matrix in self.converted.items()
            if type(modules.get(name)) is nn.Linear
            and tuple(modules[name].weight.shape) == matrix.shape
            and matrix.can_be_kept
        }
        converted = {name: matrix for name, matrix in self.converted.items() if name not in narrow}
        return replace(self, narrow=narrow, converted=converted)

    def fit(self, model: Any, experts_in: str | None = None) -> StoredModel:
        """These weights, once it is sure that `model` (it may be without numbers) can have them as they are.

        Experts become `stacks`, to be rounded to the format `experts_in`, or kept as they are (`KEPT`); what chooses
        among them is widened. Biases of nothing that the model has not, which some tools write for every layer, are
        left out. Raises `ModelError` for a matrix that is no plain layer's, has another shape, or has groups that no
        kernel holds, and for experts that nothing may hold.
        """
        modules = dict(model.named_modules())
        taken = take_experts(self.matrices, self.tensors, model, self.kind, experts_in)
        matrices = _without(self.matrices, taken.names)
        for name, matrix in matrices.items():
            plain = modules.get(name)
            if not isinstance(plain, nn.Embedding) and type(plain) is not nn.Linear:
                raise ModelError(
                    f"{name} is no plain layer of a {model.config.model_type} model, so its {self.kind} weights cannot "
                    f"be kept as they are; {WIDENS}"
                )
            have, want = (matrix.out_features, matrix.in_features), tuple(plain.weight.shape)
            if have != want:
                raise ModelError(
                    f"{name} is {have[0]} x {have[1]}, and the configuration says {want[0]} x {want[1]}"
                )
            kernel_groups(matrix)
        names = {name for name, _ in model.named_parameters()}
        tensors = {
            name: tensor
            for name, tensor in _without(self.tensors, taken.names).items()
            if name in names or not name.endswith(".bias") or bool(tensor.any())
        }
        kind = f"{self.kind}, experts in {experts_in}" if taken.stacks and experts_in != KEPT else self.kind
        return replace(
            self, tensors={**tensors, **taken.routers}, matrices=matrices, kind=kind, stacks=taken.stacks
        )

    def install(
        self,
        model: Any,
        changes: Mapping[str, LowRankChange] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Put the quantised matrices where the model has plain layers; raises `ModelError` where it has others.

        `changes` are those of an adapter, by the names of the layers, `dtype` what the model computes in.
        """
        for name, matrix in self.matrices.items():
            plain = model.get_submodule(name)
            made: nn.Module
            if isinstance(plain, nn.Embedding):
                made = StoredEmbedding(StoredLinear(matrix, None), plain, dtype)
            else:
                made = StoredLinear(matrix, plain.bias)
            model.set_submodule(name, made)
        for name, narrow in self.narrow.items():
            model.set_submodule(name, narrow.layer(model.get_submodule(name).bias))
        for name, stack in self.stacks.items():
            holder, _, parameter = name.rpartition(".")
            experts = model.get_submodule(holder)
            delattr(experts, parameter)
            setattr(experts, parameter, stack)
        head, table = model.get_output_embeddings(), model.get_input_embeddings()
        if (
            isinstance(table, StoredEmbedding)
            and model.config.tie_word_embeddings
            and type(head) is nn.Linear
        ):
            model.set_output_embeddings(table.linear)
        for name, change in (changes or {}).items():
            layer: StoredLinear = model.get_submodule(name)
            layer.change = change


Weight = TypeVar("Weight")


def _without(weights: Mapping[str, Weight], layers: Collection[str]) -> dict[str, Weight]:
    """Weights but for those of some layers."""
    return {name: weight for name, weight in weights.items() if name.removesuffix(".weight") not in layers}


class StoredEmbedding(nn.Module):
    """An embedding whose table is a quantised matrix of a file."""

    def __init__(self, linear: StoredLinear, plain: nn.Embedding, dtype: torch.dtype = torch.float32) -> None:
        """Read rows of `linear`, as `dtype`, in the place of `plain`; raises `ModelError` where that computes something
        else."""
        super().__init__()
        scale = getattr(plain, "embed_scale", None)
        if scale is None and type(plain) is not nn.Embedding:
            raise ModelError(
                f"its embedding is a {type(plain).__name__}, whose weights cannot be kept as they are; {WIDENS}"
            )
        self.scale = None if scale is None else torch.as_tensor(scale, dtype=torch.float32)
        self.scalar_embed_scale: float | None = getattr(plain, "scalar_embed_scale", None)
        self.dtype = dtype
        self._table = [linear]  # no part of this module, or it would be packed as one

    @property
    def linear(self) -> StoredLinear:
        """The table, as a layer: the output layer itself where they share their weights."""
        return self._table[0]

    def forward(self, token_ids: Tensor) -> Tensor:
        """int64 [...] -> [..., width] in the type that the model computes in, on the device of `token_ids`."""
        flat = token_ids.reshape(-1)
        rows = self.linear.rows(flat).view(*token_ids.shape, self.linear.in_features)
        rows = rows if self.scale is None else rows * self.scale
        return rows.to(token_ids.device, self.dtype)


@dataclass(frozen=True, slots=True)
class KeptWeights:
    """The weights of a model that stay as a file holds them, whatever format is requested."""

    num_weights: int
    num_bytes: int
    """Bytes of their codes, without scales."""

    @classmethod
    def of(cls, layers: Sequence[GroupedLinear]) -> KeptWeights:
        """Return the kept weights of a model's `quantised_layers`."""
        sizes = [(int(part.in_features * part.out_features), part.bits) for part in layers]
        return cls(sum(count for count, _ in sizes), sum(count * bits // 8 for count, bits in sizes))


def quantised_layers(model: Any) -> list[GroupedLinear]:
    """The layers of a model whose weights are as a file holds them, a table that is no layer and those of experts among
    them."""
    found = [part for part in model.modules() if isinstance(part, GroupedLinear)]
    for table in (part for part in model.modules() if isinstance(part, StoredEmbedding)):
        if table.linear not in found:
            found.append(table.linear)
    for stack in (each for each in file_stacks(model) if each.is_kept):
        found += [layer for expert in range(stack.shape[0]) for layer in stack.layers(expert)]
    return found
