"""What a model will hold in memory, from its configuration alone: nothing is loaded and no weights are downloaded.

The model is made on PyTorch's meta device, whose tensors have shapes and no memory. So every family that can be loaded
can be planned, by the same classes, and nothing about a family is written down twice.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.kv.pool import LayerShape
from slipstream.kv.state import StateShape
from slipstream.models.attention.base import AttentionBackend
from slipstream.models.attention.registry import fitting_backend
from slipstream.models.cpu import threads
from slipstream.models.cpu.experts import packed_expert_bytes
from slipstream.models.cpu.kernel import common_kernel
from slipstream.models.cpu.packed_weight import packed_bytes
from slipstream.models.cpu.pages import SLICE_WEIGHTS
from slipstream.models.executor.base import Executor, kernels_label
from slipstream.models.executor.eager import EagerExecutor
from slipstream.models.executor.registry import AUTO, check_attention, check_executor, likely_executor
from slipstream.models.families.experts import ExpertParts, file_stacks
from slipstream.models.families.parts import LayerParts
from slipstream.models.families.registry import find_family
from slipstream.models.fast_prompts import check_fast_prompts, check_model
from slipstream.models.files.stored import KeptWeights, StoredEmbedding, quantised_layers
from slipstream.models.identity import ModelIdentity
from slipstream.models.linear.formats import OF_DTYPE, WeightFormat, check_quantization, checked_format
from slipstream.models.linear.grouped import GroupedLinear, plain_bits
from slipstream.models.load_options import LoadOptions
from slipstream.models.matrices import has_only_plain_matrices, plain_matrices
from slipstream.models.mixers.latent import latent_projections
from slipstream.models.resolve import (
    resolve_cache_dtype,
    resolve_dtype,
)
from slipstream.models.support import context_length
from slipstream.models.unloaded import unloaded_model

_CODE_BYTES = 2
"""Bytes of a weight while it is packed in groups: its code, and its part of its group's scale and zero."""


@dataclass(frozen=True, slots=True)
class HeldWeights:
    """Bytes of a model's weights as they are held."""

    linear_bytes: int
    """Bytes of the linear layers, in their weight format."""
    scale_bytes: int
    """Scales and sums of that format."""
    embedding_bytes: int
    """Bytes of an embedding table that is held besides the output layer."""
    other_bytes: int
    """Norms, biases, and weights that no format packs."""
    adapter_bytes: int = 0
    """Bytes of an adapter that is kept apart from weights that a file holds quantised."""

    @property
    def total_bytes(self) -> int:
        """All of them."""
        own = self.linear_bytes + self.scale_bytes + self.embedding_bytes + self.other_bytes
        return own + self.adapter_bytes


@dataclass(frozen=True)
class ModelOutline(ModelIdentity):
    """A model that is not loaded: its sizes, and what it will hold and compute with."""

    path: str
    config: Any
    """Transformers' configuration of the language model."""
    model: Any
    """The Transformers model on the meta device."""
    shapes: tuple[LayerShape, ...]
    vocab_size: int
    context_length: int
    dtype: torch.dtype
    cache_dtype: torch.dtype
    matrix_dtype: torch.dtype
    """In which matrices are read, and embeddings kept; see `models.matrices`."""
    device: torch.device
    backend: AttentionBackend
    weight_format: WeightFormat
    native: bool
    """Whether our kernels may compute."""
    stored_bytes_per_weight: float
    """In the checkpoint's files."""
    num_threads: int
    stored_dtype: torch.dtype | None = None
    """The type that the checkpoint names as its own."""
    stored_as: str = ""
    states: tuple[StateShape, ...] = ()
    fast_prompts: bool = False
    exact_rows: bool = False
    rounds_head: bool = False
    executor: str = AUTO
    """The name under which what computes it was requested."""
    encoded_shapes: tuple[LayerShape, ...] = ()
    has_biases: bool = False

    @property
    def kernels(self) -> str:
        return kernels_label(self.executor_type, self.is_native)

    @property
    def is_fused(self) -> bool:
        return self.executor_type.is_fused

    @cached_property
    def executor_type(self) -> type[Executor]:
        """What will compute it; weights that the CPU kernels do not read are as for `eager`."""
        found = likely_executor(self.executor, self.backend)
        return EagerExecutor if found.is_fused and not self.is_native else found

    @property
    def is_native(self) -> bool:
        return self.native and self.packs and self.weight_format.kernel is not None

    @property
    def weight_bytes(self) -> int:
        return self.held.total_bytes

    @cached_property
    def num_parameters(self) -> int:
        plain = sum(parameter.numel() for parameter in self.model.parameters())
        rounded = (stack.numel() for stack in file_stacks(self.model) if not stack.is_kept)
        return int(plain) + self.kept.num_weights + sum(rounded)

    @cached_property
    def kept(self) -> KeptWeights:
        """As `CausalLM.kept`."""
        return KeptWeights.of(quantised_layers(self.model))

    @property
    def rounds_to_16_bits(self) -> bool:
        """Whether a 16-bit `dtype` says how its weights are kept, and not what computes."""
        return self.is_native and has_only_plain_matrices(self.model)

    @property
    def has_experts(self) -> bool:
        """Whether the decoder's layers have experts in the place of an MLP."""
        return bool(self._experts)

    @property
    def stored_bytes(self) -> int:
        """Bytes of the weights in the checkpoint's files."""
        return round(self.num_parameters * self.stored_bytes_per_weight)

    @property
    def unpacked_bytes(self) -> int:
        """Bytes of all weights once they are read, before any of them is packed."""
        return sum(weight.numel() * self._itemsize(weight) for weight in self.model.parameters())

    @cached_property
    def held(self) -> HeldWeights:
        """The weights as the engine holds them."""
        groups = self._groups
        parameters = {id(weight): weight for weight in self.model.parameters()}
        table = getattr(self.model.get_input_embeddings(), "weight", None)
        packed = {id(linear.weight) for group in groups for linear in group if isinstance(linear, nn.Linear)}
        if self.is_native:
            packed |= {id(linear.bias) for group in groups for linear in group if linear.bias is not None}
        # The decoder reads a tied embedding out of the packed output layer; in other models the table stays.
        read_out = (self.is_fused or self._is_coded) and id(table) in packed
        packed |= {id(parameter) for parts in self._experts for parameter in parts.parameters}
        sizes = [self._group_bytes(group) for group in groups]
        if self.weight_format.kernel is not None:
            sizes += [packed_expert_bytes(parts, self.weight_format.kernel) for parts in self._experts]
        others = [weight for key, weight in parameters.items() if key not in packed and weight is not table]
        return HeldWeights(
            linear_bytes=sum(weights for weights, _, _ in sizes),
            scale_bytes=sum(scales for _, scales, _ in sizes),
            embedding_bytes=self._packed_table_bytes()
            + (0 if table is None or read_out else table.numel() * self._itemsize(table)),
            other_bytes=sum(biases for _, _, biases in sizes)
            + self._widened_bytes
            + sum(weight.numel() * self._itemsize(weight) for weight in others),
            adapter_bytes=self.executor_type.adapter_bytes(self.model, self.is_native),
        )

    def _packed_table_bytes(self) -> int:
        """Return the bytes of embeddings that the file holds quantised, where they are kept in addition to the output
        layer."""
        if not (self.is_fused or self._is_coded):
            return 0
        tables = [part.linear for part in self.model.modules() if isinstance(part, StoredEmbedding)]
        head = self.model.get_output_embeddings()
        return sum(sum(self._group_bytes([table])) for table in tables if table is not head)

    @property
    def _widened_bytes(self) -> int:
        """Return the bytes of what attention over latents reads where the file holds it quantised."""
        widened = [part for part in latent_projections(self.model) if isinstance(part, GroupedLinear)]
        return sum(part.in_features * part.out_features for part in widened) * torch.float32.itemsize

    @property
    def maps_weights(self) -> bool:
        """Whether weights stay in their file until they are packed: those that are read as they are stored."""
        is_mapped = sys.platform == "linux" and self.device.type == "cpu"
        return is_mapped and self.stored_bytes_per_weight == self.matrix_dtype.itemsize

    @property
    def widest_bytes(self) -> int:
        """Bytes of the largest weight once it is read."""
        return int(max(weight.numel() * self._itemsize(weight) for weight in self.model.parameters()))

    def packing_extra_bytes(self) -> int:
        """The most that packing takes besides what is not packed yet and what is: a part of one group of layers.

        PyTorch's formats are packed whole, out of float32.
        """
        fmt, groups = self.weight_format, self._groups
        if not self.is_native or fmt.kernel is None:
            plain = (linear for group in groups for linear in group if isinstance(linear, nn.Linear))
            widest = max((linear.weight.numel() for linear in plain), default=0)
            return round(widest * (torch.float32.itemsize + fmt.bytes_per_weight))
        most = max(sum(int(part.in_features * part.out_features) for part in group) for group in groups)
        most = max(most, *(parts.gate_up.numel() // parts.num_experts for parts in self._experts), 0)
        has_codes = fmt.kernel.group or bool(self.kept.num_weights)
        each = self.matrix_dtype.itemsize + torch.float32.itemsize + (_CODE_BYTES if has_codes else 0)
        # An expert that is rounded out of its file is widened whole.
        rounded = (stack for stack in file_stacks(self.model) if not stack.is_kept)
        whole = max((math.prod(stack.shape[1:]) for stack in rounded), default=0)
        return min(most, SLICE_WEIGHTS) * each + whole * torch.float32.itemsize

    def _itemsize(self, weight: Tensor) -> int:
        """Bytes of a number of this weight once it is read, and experts that are not packed are widened."""
        is_kept = weight.ndim < 3 or self.is_fused
        return (self.matrix_dtype if is_kept and id(weight) in self._matrices else self.dtype).itemsize

    @cached_property
    def _matrices(self) -> set[int]:
        return {id(weight) for weight in plain_matrices(self.model)}

    @cached_property
    def _experts(self) -> list[ExpertParts]:
        """Those of all layers, where the decoder packs them."""
        return [parts.experts for parts in self._layer_parts if parts.experts is not None]

    @cached_property
    def _layer_parts(self) -> list[LayerParts]:
        """The parts of all layers, where whole layers are packed."""
        return self.executor_type.layer_parts(self.model)

    @cached_property
    def _groups(self) -> list[list[nn.Linear | GroupedLinear]]:
        """The layers that are packed, together where they are packed as one."""
        return self.executor_type.packed_groups(self.model) if self.packs or self._is_coded else []

    @property
    def _is_coded(self) -> bool:
        """Whether the fused decoder of a GPU holds codes, a file's or those of a weight format."""
        return self.executor_type.decodes and (bool(self.stored_as) or self.weight_format.in_decoder)

    def _group_bytes(self, group: Sequence[nn.Linear | GroupedLinear]) -> tuple[int, int, int]:
        """Bytes of (weights, scales, biases) of layers that are packed as one."""
        is_head = group[0] is self.model.get_output_embeddings()
        fmt, inputs = self.weight_format.of_head() if is_head else self.weight_format, group[0].in_features
        outputs = sum(linear.out_features for linear in group)
        biased = any(linear.bias is not None for linear in group)
        grouped = [linear for linear in group if isinstance(linear, GroupedLinear)]
        kernel = common_kernel(grouped) if grouped else fmt.kernel
        if grouped and self.executor_type.decodes:
            (layer,) = grouped
            groups = outputs * -(-inputs // layer.group) * (1 + layer.has_zeros)
            return inputs * outputs * plain_bits(grouped) // 8, groups * torch.float32.itemsize, 0  # at most
        if grouped and not self.is_native:
            return 0, 0, 0  # they stay in the file, and their pages come and go
        if not self.is_native or kernel is None:
            weights = round(inputs * outputs * fmt.bytes_per_weight)
            return weights, round(outputs * fmt.bytes_per_output), 0
        key = (kernel.kind, kernel.group, inputs, outputs)
        if key not in self._sizes:
            self._sizes[key] = packed_bytes(kernel, inputs, outputs)
        weights, scales, biases = self._sizes[key]
        if is_head and self.rounds_head:
            scales += self.executor_type.rounded_head_bytes(self.model, kernel)
        order = grouped[0].order if grouped else None
        return weights, scales + (0 if order is None else int(order.nbytes)), biases if biased else 0

    @cached_property
    def _sizes(self) -> dict[tuple[int, int, int, int], tuple[int, int, int]]:
        """What the kernels have said of weights of a kind and shape."""
        return {}


def outline_model(path: str, options: LoadOptions | None = None, **given: Any) -> ModelOutline:
    """The outline of a checkpoint folder, a hub id (its configuration alone is downloaded) or a `config.json`.

    The options are those of `load_model`; a GPU need not be there. Raises as `load_model` does, as far as a
    configuration tells.
    """
    options = replace(options or LoadOptions(), **given)
    check_quantization(options.quantization)
    check_executor(options.executor)
    seen = unloaded_model(path, options)
    dtype, quantization = options.dtype, options.quantization
    computes = resolve_dtype(dtype, seen.device, seen.config)
    checked_format(quantization, seen.device, computes, seen.decodes)
    name = quantization or seen.requested
    matrices = seen.matrix_dtype
    if name is None and dtype == "auto" and matrices != seen.dtype:
        name = OF_DTYPE[matrices]
    fmt = checked_format(name, seen.device, seen.dtype, seen.decodes)
    if name is not None and fmt.stored_dtype not in (None, torch.float32):
        matrices = fmt.stored_dtype
    outline = ModelOutline(
        path=path,
        config=seen.config,
        model=seen.model,
        shapes=tuple(seen.probed.shapes),
        encoded_shapes=seen.probed.encoded_shapes,
        has_biases=seen.probed.has_biases,
        vocab_size=seen.probed.vocab_size,
        context_length=context_length(seen.config, options.max_model_len),
        dtype=seen.dtype,
        cache_dtype=seen.dtype,
        matrix_dtype=matrices,
        device=seen.device,
        backend=fitting_backend(
            seen.backend, options.attention_backend, seen.traits, seen.model, seen.probed.variants, fmt
        ),
        weight_format=fmt,
        native=seen.native,
        stored_bytes_per_weight=seen.stored_bytes_per_weight,
        num_threads=threads.available(),
        stored_dtype=seen.stored_dtype,
        stored_as=seen.stored_as,
        fast_prompts=options.fast_prompts,
        exact_rows=options.exact_rows,
        rounds_head=options.rounds_head,
        executor=options.executor,
        states=tuple(seen.probed.states),
    )
    check_attention(options.executor, outline.backend)
    _check_experts(outline)
    if options.fast_prompts:
        check_fast_prompts(outline.device, outline.is_native, outline.weight_type)
        check_model(outline.family, outline.weight_type, outline.is_fused, outline.has_experts)
    requested, widens = options.kv_cache_dtype, outline.is_fused
    kept_in = resolve_cache_dtype(requested, dtype, seen.stored_dtype, seen.dtype, widens)
    return replace(outline, cache_dtype=kept_in)


def _check_experts(outline: ModelOutline) -> None:
    """Raise `ConfigError` where experts are to be held in a format that the fused decoder of a GPU has not for them."""
    family = find_family(outline.model) if outline.executor_type.decodes else None
    if family is not None and family.experts is not None and outline.weight_format.weight_error is not None:
        outline.weight_format.check(outline.device, outline.dtype)
