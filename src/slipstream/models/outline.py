"""What a model will hold in memory, from its configuration alone: nothing is loaded and no weights are downloaded.

The model is made on PyTorch's meta device, whose tensors have shapes and no memory. So every family that can be loaded
can be planned, by the same classes, and nothing about a family is written down twice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.errors import ConfigError
from slipstream.kv.pool import LayerShape, bytes_per_token
from slipstream.models.attention.base import AttentionBackend, ModelTraits, Variant
from slipstream.models.attention.registry import AUTO, choose_backend
from slipstream.models.canary import probe_layers
from slipstream.models.cpu.families import find_family
from slipstream.models.cpu.native import packed_bytes
from slipstream.models.files.quantized import settle_quantized
from slipstream.models.linear.formats import OF_DTYPE, WeightFormat, check_quantization, checked_format
from slipstream.models.loading import (
    load_config,
    meta_model,
    read_config_file,
    resolve_cache_dtype,
    resolve_device,
    resolve_dtype,
    resolve_kernels,
    settle_dtype,
    silenced,
)
from slipstream.models.matrices import has_only_plain_matrices, plain_matrices
from slipstream.models.support import check_config, context_length
from slipstream.models.text_tower import text_tower

STORED_BYTES = {"fp8": 1.0, "mxfp8": 1.0, "mxfp4": 0.5}
"""Bytes a weight in checkpoints whose weights are widened while they are read."""


@dataclass(frozen=True, slots=True)
class HeldWeights:
    """Bytes of a model's weights as they are held."""

    linear_bytes: int
    """Of the linear layers, in their weight format."""
    scale_bytes: int
    """Scales and sums of that format."""
    embedding_bytes: int
    """Of an embedding table that is held beside the output layer."""
    other_bytes: int
    """Norms, biases, and weights that no format packs."""

    @property
    def total_bytes(self) -> int:
        """All of them."""
        return self.linear_bytes + self.scale_bytes + self.embedding_bytes + self.other_bytes


@dataclass(frozen=True)
class ModelOutline:
    """A model that is not loaded: its sizes, and what it will hold and compute with."""

    path: str
    config: Any
    """Transformers' configuration of the language model."""
    model: Any
    """The Transformers model on the meta device."""
    shapes: tuple[LayerShape, ...]
    """What each layer stores for a token."""
    vocab_size: int
    context_length: int
    dtype: torch.dtype
    """In which rows, keys and values are computed."""
    cache_dtype: torch.dtype
    """How keys and values are held."""
    matrix_dtype: torch.dtype
    """In which matrices are read, and embeddings kept; see `models.matrices`."""
    device: torch.device
    weight_format: WeightFormat
    kernels: str
    """As `CausalLM.kernels`: `decoder`, `native` or `torch`."""
    kv_unit: int
    """Slots of its caches are given out in multiples of this many."""
    stored_bytes_per_weight: float
    """In the checkpoint's files."""

    @property
    def family(self) -> str:
        return str(self.config.model_type)

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states."""
        return int(self.config.hidden_size)

    @property
    def num_layers(self) -> int:
        return int(self.config.num_hidden_layers)

    @cached_property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def kv_bytes_per_token(self) -> int:
        return bytes_per_token(self.shapes, self.cache_dtype)

    @property
    def packs(self) -> bool:
        """Whether the linear layers are packed: float32 on a CPU."""
        return self.device.type in self.weight_format.devices and self.dtype == torch.float32

    @property
    def rounds_to_16_bits(self) -> bool:
        """Whether a 16-bit `dtype` says how its weights are kept, and not what computes."""
        return self.kernels != "torch" and has_only_plain_matrices(self.model)

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
        packed = {id(linear.weight) for group in groups for linear in group}
        if self.kernels != "torch":
            packed |= {id(linear.bias) for group in groups for linear in group if linear.bias is not None}
        # The decoder reads a tied embedding out of the packed output layer; in other models the table stays.
        read_out = self.kernels == "decoder" and id(table) in packed
        sizes = [self._group_bytes(group) for group in groups]
        others = [weight for key, weight in parameters.items() if key not in packed and weight is not table]
        return HeldWeights(
            linear_bytes=sum(weights for weights, _, _ in sizes),
            scale_bytes=sum(scales for _, scales, _ in sizes),
            embedding_bytes=0 if table is None or read_out else table.numel() * self._itemsize(table),
            other_bytes=sum(biases for _, _, biases in sizes)
            + sum(weight.numel() * self._itemsize(weight) for weight in others),
        )

    def packing_extra_bytes(self) -> int:
        """The most that packing takes beside the unpacked weights: one group of layers, stacked and packed.

        The decoder gives a weight that is not stacked back to the system while it is packed.
        """
        extra = 0
        for group in self._groups:
            if len(group) > 1 or self.kernels != "decoder":
                weights, scales, _ = self._group_bytes(group)
                stacked = sum(linear.weight.numel() * self._itemsize(linear.weight) for linear in group)
                extra = max(extra, weights + scales + (stacked if len(group) > 1 else 0))
        return extra

    def _itemsize(self, weight: Tensor) -> int:
        """Bytes of a number of this weight once it is read."""
        return (self.matrix_dtype if id(weight) in self._matrices else self.dtype).itemsize

    @cached_property
    def _matrices(self) -> set[int]:
        return {id(weight) for weight in plain_matrices(self.model)}

    @cached_property
    def _groups(self) -> list[list[nn.Linear]]:
        """The layers that are packed (see `models.linear.packing`), together where the decoder stacks them."""
        if not self.packs:
            return []
        if self.kernels != "decoder":
            return [[module] for module in self.model.modules() if type(module) is nn.Linear]
        family = find_family(self.model)
        assert family is not None
        layers = [family.layer_parts(layer) for layer in family.part(self.model, family.layers)]
        groups = [[family.part(self.model, family.head)]]
        for parts in layers:
            groups += [list(parts.qkv), [parts.output], list(parts.gate_up), [parts.down]]
        return groups

    def _group_bytes(self, group: list[nn.Linear]) -> tuple[int, int, int]:
        """Bytes of (weights, scales, biases) of layers that are packed as one."""
        fmt, inputs = self.weight_format, group[0].in_features
        outputs = sum(linear.out_features for linear in group)
        biased = any(linear.bias is not None for linear in group)
        if self.kernels == "torch" or fmt.kernel is None:
            weights = round(inputs * outputs * fmt.bytes_per_weight)
            return weights, round(outputs * fmt.bytes_per_output), 0
        if (inputs, outputs) not in self._sizes:
            self._sizes[inputs, outputs] = packed_bytes(fmt.kernel, inputs, outputs)
        weights, scales, biases = self._sizes[inputs, outputs]
        return weights, scales, biases if biased else 0

    @cached_property
    def _sizes(self) -> dict[tuple[int, int], tuple[int, int, int]]:
        """What the kernels have said of weights of a shape."""
        return {}


def outline_model(
    path: str,
    *,
    dtype: str = "auto",
    device: str = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    quantization: str | None = None,
    cpu_kernels: str = "auto",
    max_model_len: int | None = None,
    attention_backend: str = AUTO,
    kv_cache_dtype: str = "auto",
) -> ModelOutline:
    """The outline of a checkpoint folder, a hub id (its configuration alone is downloaded) or a `config.json`.

    The options are those of `load_model`; a GPU need not be there. Raises as `load_model` does, as far as a
    configuration tells.
    """
    check_quantization(quantization)
    seen = _described(path, dtype, device, revision, trust_remote_code, cpu_kernels, attention_backend)
    checked_format(quantization, seen.device, resolve_dtype(dtype, seen.device, seen.config))
    name = quantization or seen.asked
    matrices = seen.matrix_dtype
    if name is None and matrices != seen.dtype:
        name = OF_DTYPE[matrices]
    fmt = checked_format(name, seen.device, seen.dtype)
    if name is not None and fmt.stored_dtype is not None:
        matrices = fmt.stored_dtype
    packs = seen.dtype == torch.float32 and seen.device.type in fmt.devices
    kernels = "native" if seen.native and packs and fmt.kernel is not None else "torch"
    if kernels == "native" and seen.fuses:
        kernels = "decoder"
    fused = kernels == "decoder"
    return ModelOutline(
        path=path,
        config=seen.config,
        model=seen.model,
        shapes=seen.shapes,
        vocab_size=seen.vocab_size,
        context_length=context_length(seen.config, max_model_len),
        dtype=seen.dtype,
        cache_dtype=resolve_cache_dtype(kv_cache_dtype, dtype, seen.stored_dtype, seen.dtype, fused),
        matrix_dtype=matrices,
        device=seen.device,
        weight_format=fmt,
        kernels=kernels,
        kv_unit=seen.kv_unit,
        stored_bytes_per_weight=seen.stored_bytes_per_weight,
    )


@dataclass(frozen=True, slots=True)
class _Described:
    """What is known of a model whatever format its weights get."""

    config: Any
    model: Any
    shapes: tuple[LayerShape, ...]
    vocab_size: int
    dtype: torch.dtype
    stored_dtype: torch.dtype | None
    asked: str | None
    """The weight format that `dtype` asks for."""
    matrix_dtype: torch.dtype
    """In which matrices are read where nothing else asks for a type."""
    device: torch.device
    native: bool
    fuses: bool
    kv_unit: int
    stored_bytes_per_weight: float


_shared: ContextVar[dict[tuple[Any, ...], _Described] | None] = ContextVar("_shared", default=None)
"""What `shared_outlines` has seen."""


@contextlib.contextmanager
def shared_outlines() -> Iterator[None]:
    """Read every configuration once within the body, however many plans are made of it."""
    token = _shared.set({})
    try:
        yield
    finally:
        _shared.reset(token)


def _described(
    path: str,
    dtype: str,
    device: str,
    revision: str | None,
    trust_remote_code: bool,
    cpu_kernels: str,
    attention_backend: str,
) -> _Described:
    key = (path, dtype, device, revision, trust_remote_code, cpu_kernels, attention_backend)
    known = _shared.get()
    if known is not None and key in known:
        return known[key]
    config = _config(path, revision, trust_remote_code)
    where = _device(device)
    stored_dtype = getattr(config, "dtype", None)  # Transformers overwrites it
    stores_its_numbers = getattr(config, "quantization_config", None) is None
    stored = _stored_bytes_per_weight(config)
    native = where.type == "cpu" and resolve_kernels(cpu_kernels) == "native"
    traits = ModelTraits(config, where, resolve_dtype(dtype, where, config), native)
    backend = choose_backend(attention_backend, traits)
    model = meta_model(config, backend.attn_implementation, trust_remote_code)
    plain = native and has_only_plain_matrices(model)
    kind, asked = settle_dtype(dtype, where, config, native, lambda: plain)
    backend = choose_backend(attention_backend, replace(traits, dtype=kind))
    matrices = kind
    if plain and stores_its_numbers and dtype == "auto" and getattr(config, "dtype", None) in OF_DTYPE:
        matrices = config.dtype
    shapes, variants, vocab_size = _probed(model, backend)
    found = _Described(
        config=config,
        model=model,
        shapes=tuple(shapes),
        vocab_size=vocab_size,
        dtype=kind,
        stored_dtype=stored_dtype,
        asked=asked,
        matrix_dtype=matrices,
        device=where,
        native=native,
        fuses=_fuses(model, variants),
        kv_unit=backend.layout.unit,
        stored_bytes_per_weight=stored,
    )
    if known is not None:
        known[key] = found
    return found


def _config(path: str, revision: str | None, trust_remote_code: bool) -> Any:
    """The language model's configuration; raises for one that the engine would refuse."""
    if Path(path).is_file() and path.endswith(".json"):
        config = read_config_file(path, trust_remote_code=trust_remote_code)
    else:
        config = load_config(path, revision=revision, trust_remote_code=trust_remote_code)
    tower = text_tower(config)
    config = config if tower is None else tower.config
    check_config(config)
    settle_quantized(path, config)
    return config


def _device(name: str) -> torch.device:
    """As `resolve_device`, but a device need not be there to be planned for."""
    if name == "auto":
        return resolve_device(name)
    try:
        return torch.device(name)
    except RuntimeError:
        raise ConfigError(f"unknown device {name!r}; use auto, cpu or cuda") from None


def _stored_bytes_per_weight(config: Any) -> float:
    """Bytes a weight in the checkpoint; the configuration is left without its quantisation, which a plan widens."""
    settings = getattr(config, "quantization_config", None)
    if settings is not None:
        method = str(settings["quant_method"])
        del config.quantization_config
        return STORED_BYTES.get(method, 2.0)
    stored: torch.dtype | None = getattr(config, "dtype", None)
    return float(torch.float32.itemsize if stored is None else stored.itemsize)


def _probed(model: Any, backend: AttentionBackend) -> tuple[list[LayerShape], list[Variant], int]:
    """What each layer stores and how it attends, and the width of the logits."""
    with silenced():
        probed = probe_layers(model, backend)
    return probed.shapes, probed.variants, probed.vocab_size


def _fuses(model: Any, variants: list[Variant]) -> bool:
    """Whether the kernels' decoder computes whole passes of it."""
    family = find_family(model)
    return family is not None and next(family.misfits(model, variants), None) is None
