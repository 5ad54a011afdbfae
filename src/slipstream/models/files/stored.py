"""A model whose matrices stay as a file holds them, quantised, until each is packed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.errors import ModelError
from slipstream.models.files.converted import ConvertedMatrix
from slipstream.models.files.grouped import GroupedMatrix, bounds
from slipstream.models.files.lora import WIDENS
from slipstream.models.files.stored_experts import StoredStack, joined, take_experts
from slipstream.models.linear.grouped import LARGEST_GROUP, BlockedWeight, GroupedLinear, GroupedWeight
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
    """Experts that are rounded while they are packed, by the names of the parameters that they stand for; see `fit`."""

    def state(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """For Transformers: all weights, a quantised one as a single number that is seen everywhere."""
        nothing = torch.zeros((), dtype=dtype)
        stand_ins = {
            f"{name}.weight": nothing.expand(matrix.out_features, matrix.in_features)
            for name, matrix in self.matrices.items()
        }
        stand_ins |= {name: nothing.expand(stack.shape) for name, stack in self.stacks.items()}
        return joined({**self.tensors, **stand_ins})

    def widened(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """For Transformers: as `state`, with the quantised ones as plain numbers of this type."""
        found = dict(self.tensors)
        for name, matrix in self.matrices.items():
            weight = torch.empty(matrix.out_features, matrix.in_features, dtype=dtype)
            for begin, end in bounds(matrix):
                weight[begin:end] = matrix.widened(begin, end)
            found[f"{name}.weight"] = weight
        return joined(found)

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

        Experts become `stacks`, to be rounded to the format `experts_in`, and what chooses among them is widened.
        Biases of nothing that the model has not, which some tools write for every layer, are left out. Raises
        `ModelError` for a matrix that is no plain layer's, has another shape, or has groups that no kernel holds, and
        for experts where nothing may round them.
        """
        modules = dict(model.named_modules())
        taken = take_experts(self.matrices, self.tensors, model, self.kind, experts_in)
        matrices = {name: matrix for name, matrix in self.matrices.items() if name not in taken.names}
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
            _kernel_groups(matrix)
        names = {name for name, _ in model.named_parameters()}
        tensors = {
            name: tensor
            for name, tensor in self.tensors.items()
            if name.removesuffix(".weight") not in taken.names
            and (name in names or not name.endswith(".bias") or bool(tensor.any()))
        }
        kind = f"{self.kind}, experts in {experts_in}" if taken.stacks else self.kind
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


class StoredLinear(GroupedLinear):
    """A linear layer whose weight is a quantised matrix of a file."""

    def __init__(self, matrix: GroupedMatrix, bias: Tensor | None) -> None:
        """Raises `ModelError` for groups that the kernels cannot hold."""
        bits, group = _kernel_groups(matrix)
        super().__init__(matrix.in_features, matrix.out_features, bits, group, not matrix.is_symmetric)
        self._matrix = matrix
        self.bias = bias
        self.order = None if matrix.order is None else matrix.order.to(torch.int32)

    def part(self, begin: int, end: int) -> GroupedWeight:
        """See `GroupedLinear.part`."""
        found = self._matrix.part(begin, end)
        count = -(-self.in_features // self.group)
        repeats = -(-found.group_size // self.group)
        scales, minimums = (
            each.repeat_interleave(repeats, 1)[:, :count] for each in (found.scales, found.minimums)
        )
        if self.has_zeros:
            return GroupedWeight.from_minimums(found.codes, scales, minimums, self.group, self.bits)
        codes = found.codes + (2 ** (self.bits - 1) - 2 ** (found.bits - 1))
        return GroupedWeight(codes, scales, None, self.group, self.bits)

    def blocks(self, begin: int, end: int) -> BlockedWeight | None:
        """See `GroupedLinear.blocks`."""
        return self._matrix.blocks(begin, end)

    def numbers(self, begin: int, end: int) -> Tensor:
        """See `GroupedLinear.numbers`: the file's own, where `part` has scales and zeros as the kernels hold them."""
        return self._matrix.widened(begin, end)

    def rows(self, indices: Tensor) -> Tensor:
        """int64 [n] -> float32 [n, in]: the file's numbers of these outputs."""
        return self._matrix.rows(indices)


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
    def of(cls, model: Any) -> KeptWeights:
        """Return the kept weights of a model before it is packed."""
        sizes = [(int(part.in_features * part.out_features), part.bits) for part in quantised_layers(model)]
        return cls(sum(count for count, _ in sizes), sum(count * bits // 8 for count, bits in sizes))


def quantised_layers(model: Any) -> list[GroupedLinear]:
    """The layers of a model whose weights are as a file holds them, a table that is no layer among them."""
    found = [part for part in model.modules() if isinstance(part, GroupedLinear)]
    table = model.get_input_embeddings()
    if isinstance(table, StoredEmbedding) and table.linear not in found:
        found.append(table.linear)
    return found


def _kernel_groups(matrix: GroupedMatrix) -> tuple[int, int]:
    """(bits, inputs of a group) in which the kernels hold a matrix."""
    bits = 4 if matrix.bits <= 4 else 8
    whole = matrix.group_size == matrix.in_features
    group = LARGEST_GROUP if whole else math.gcd(matrix.group_size, LARGEST_GROUP)
    if bits == 4 and group == 16:
        bits = 8
    if group < 16:
        raise ModelError(
            f"{matrix.name}: groups of {matrix.group_size} inputs cannot be kept as they are; {WIDENS}"
        )
    return bits, group
