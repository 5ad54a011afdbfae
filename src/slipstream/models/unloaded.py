"""A checkpoint's model without its weights: on PyTorch's meta device, made from its configuration alone."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from slipstream.models.attention.base import ATTENTION_NAME, AttentionBackend, ModelTraits, Probed
from slipstream.models.attention.indexer import lead_indexers
from slipstream.models.attention.numbered import number_layers
from slipstream.models.attention.own_forward import lead_forwards, loads_with
from slipstream.models.attention.registry import choose_backend
from slipstream.models.canary import probe_layers
from slipstream.models.checkpoint import read_by_transformers, read_weights
from slipstream.models.configuration import load_config, meta_model, read_config_file
from slipstream.models.executor.registry import likely_executor
from slipstream.models.files.gguf import open_gguf
from slipstream.models.files.gguf_architectures import read_config
from slipstream.models.files.gguf_model import find_gguf, read_gguf_model
from slipstream.models.files.lora import chosen_adapter, outlined_changes
from slipstream.models.files.quantized import Quantised, resolve_quantized
from slipstream.models.files.stored import StoredModel
from slipstream.models.files.stored_experts import KEPT
from slipstream.models.huggingface import unused_deferred
from slipstream.models.linear.formats import OF_DTYPE
from slipstream.models.load_options import LoadOptions
from slipstream.models.matrices import has_only_plain_matrices
from slipstream.models.mixers.base import Mixers
from slipstream.models.mixers.latent import hold_latents
from slipstream.models.mixers.registry import recurrences
from slipstream.models.quiet import one_line, silenced
from slipstream.models.resolve import (
    kept_dtype,
    plannable_device,
    resolve_dtype,
    resolve_kernels,
    resolve_weight_dtype,
)
from slipstream.models.support import check_config
from slipstream.models.text_tower import text_tower

log = logging.getLogger(__name__)

STORED_BYTES = {"fp8": 1.0, "mxfp8": 1.0, "mxfp4": 0.5}
"""Bytes a weight in checkpoints whose weights are widened while they are read."""


@dataclass(frozen=True, slots=True)
class UnloadedModel:
    """What is known of a model whatever format its weights get, but for experts that a file holds quantised."""

    config: Any
    model: Any
    probed: Probed
    dtype: torch.dtype
    stored_dtype: torch.dtype | None
    requested: str | None
    """The weight format that `dtype` requests."""
    matrix_dtype: torch.dtype
    """In which matrices are read where nothing else sets a type."""
    device: torch.device
    native: bool
    decodes: bool
    """Whether the fused decoder of a GPU is to compute it, as far as its configuration tells."""
    backend: AttentionBackend
    traits: ModelTraits
    """What the choice of the backend depends on."""
    stored_bytes_per_weight: float
    stored_as: str = ""
    """How the file holds layers that stay quantised; empty where none does."""


_shared: ContextVar[dict[tuple[Any, ...], UnloadedModel] | None] = ContextVar("_shared", default=None)
"""What `shared_outlines` has seen."""


@contextlib.contextmanager
def shared_outlines() -> Iterator[None]:
    """Read every configuration once within the body, however many plans are made of it."""
    if _shared.get() is not None:
        yield
        return
    token = _shared.set({})
    try:
        yield
    finally:
        _shared.reset(token)


def unloaded_model(path: str, options: LoadOptions) -> UnloadedModel:
    """The model of a checkpoint, read from its configuration; raises what loading it would raise.

    Within `shared_outlines` each is read once. See `outline_model` for the arguments.
    """
    dtype, quantization, trust_remote_code = options.dtype, options.quantization, options.trust_remote_code
    # What the rest of the options says is no matter here.
    key: tuple[Any, ...] = (
        path,
        replace(
            options,
            quantization=None,
            max_model_len=None,
            kv_cache_dtype="auto",
            fast_prompts=False,
            exact_rows=False,
            rounds_head=False,
        ),
    )
    known = _shared.get()
    for seen in () if known is None else (known.get(key), known.get((*key, quantization))):
        if seen is not None:
            return seen
    config, stored_weights, quantised = _config(path, options.revision, trust_remote_code)
    where = plannable_device(options.device)
    stored_dtype = getattr(config, "dtype", None)  # Transformers overwrites it
    adapter = _adapter(path, options.revision, options.lora)
    stores_its_numbers = adapter is None and getattr(config, "quantization_config", None) is None
    stored = _stored_bytes_per_weight(config)
    if quantised is not None and quantised.converted_bytes is not None:
        stored = quantised.converted_bytes
    native = where.type == "cpu" and resolve_kernels(options.cpu_kernels) == "native"
    computes = torch.float32 if native else resolve_dtype(dtype, where, config)
    # Until the model says in which type it computes.
    traits = ModelTraits(config, where, computes, native, options.fuses)
    backend = choose_backend(options.attention_backend, traits)
    model = meta_model(config, loads_with(config, backend.attn_implementation), trust_remote_code)
    plain = native and has_only_plain_matrices(model)
    decodes = not native and likely_executor(options.executor, backend).decodes
    kind, requested = resolve_weight_dtype(dtype, where, config, native, lambda: plain)
    if stored_weights is not None and dtype == "auto" and decodes:
        kind = kept_dtype(where, kind)
    traits = replace(traits, dtype=kind)
    backend = choose_backend(options.attention_backend, traits)
    matrices = kind
    if plain and stores_its_numbers and kind == torch.float32 and stored_dtype in OF_DTYPE:
        matrices = stored_dtype
    number_layers(model)
    lead_forwards(model)
    lead_indexers(model)
    if backend.holds_latents:
        hold_latents(model, ATTENTION_NAME)
    probed = probed_outline(model, backend)
    stored_as = ""
    if stored_weights is not None and dtype == "auto" and (where.type == "cpu" or decodes):
        experts_in = (quantization or KEPT) if native and kind == torch.float32 else None
        fitted = stored_weights.fit(model, experts_in)
        changes = (
            None if adapter is None else outlined_changes(model, adapter, fitted.matrices, fitted.stacks)
        )
        fitted.install(model, changes)
        stored_as = fitted.kind if fitted.stay else ""
        if fitted.stacks:
            key = (*key, quantization)
    found = UnloadedModel(
        config=config,
        model=model,
        probed=probed,
        dtype=kind,
        stored_dtype=stored_dtype,
        requested=requested,
        matrix_dtype=matrices,
        device=where,
        native=native,
        decodes=decodes,
        backend=backend,
        traits=traits,
        stored_bytes_per_weight=stored,
        stored_as=stored_as,
    )
    if known is not None:
        known[key] = found
    return found


def _config(
    path: str, revision: str | None, trust_remote_code: bool
) -> tuple[Any, StoredModel | None, Quantised | None]:
    """The language model's configuration, and the quantised weights of one that is here and keeps them.

    The last is how the configuration says that they are quantised.

    Raises for a configuration that the engine would refuse.
    """
    file = find_gguf(path, revision)
    gguf = None if file is None else open_gguf(file)
    if gguf is not None:
        config = read_config(gguf)
    elif Path(path).is_file() and path.endswith(".json"):
        config = read_config_file(path, trust_remote_code=trust_remote_code)
    else:
        config = load_config(path, revision=revision, trust_remote_code=trust_remote_code)
    tower = text_tower(config)
    config = config if tower is None else tower.config
    check_config(config)
    quantised = resolve_quantized(path, config, read_by_transformers(config))
    if gguf is not None:
        stored = read_gguf_model(gguf, config)
        return config, stored if stored.matrices else None, None
    if quantised is None or not quantised.is_kept:
        return config, None, quantised
    if not any(Path(path).glob("*.safetensors")):
        log.warning(
            "the %s weights of %r are not here, and are planned as plain ones", quantised.method, path
        )
        return config, None, quantised
    with one_line(f"cannot read the weights of {path!r}"):
        stored = read_weights(path, revision, quantised, config, tower)
    return config, stored, quantised


def _adapter(path: str, revision: str | None, lora: str | None) -> str | None:
    """The adapter that the engine would take; one next to the weights of a hub id is not looked for."""
    if lora is None and not Path(path).is_dir():
        return None
    with one_line(f"cannot look for an adapter next to {path!r}"), silenced():
        return chosen_adapter(path, revision, lora)


def _stored_bytes_per_weight(config: Any) -> float:
    """Bytes a weight in the checkpoint; the configuration is left without its quantisation, which a plan widens."""
    settings = getattr(config, "quantization_config", None)
    if settings is not None:
        method = str(settings["quant_method"])
        del config.quantization_config
        return STORED_BYTES.get(method, 2.0)
    stored: torch.dtype | None = getattr(config, "dtype", None)
    return float(torch.float32.itemsize if stored is None else stored.itemsize)


_READING_CHOICES = frozenset({"dbrx"})
"""Types of models whose code reads which experts the rows have chosen, numbers that the meta device does not have."""


def probed_outline(model: Any, backend: AttentionBackend) -> Probed:
    """What a pass over two rows tells of a model that is not loaded.

    Arithmetic on the meta device imports PyTorch's compiler and SymPy. Where the pass multiplies with none of the large
    weights (see `unread`), they are zeros on the CPU instead.
    """
    reads_none = has_only_plain_matrices(model) or model.config.model_type in _READING_CHOICES
    with silenced(), unused_deferred(), _weights_of_zeros(model) if reads_none else contextlib.nullcontext():
        return probe_layers(model, backend, Mixers(model, recurrences()))


@contextlib.contextmanager
def _weights_of_zeros(model: Any) -> Iterator[None]:
    """Within the body, all weights are zeros on the CPU, each one number that is read again and again."""
    kept = [
        (held, name, tensor)
        for module in model.modules()
        for held in (module._parameters, module._buffers)
        for name, tensor in held.items()
        if tensor is not None and tensor.is_meta
    ]
    for held, name, tensor in kept:
        if isinstance(tensor, nn.Parameter):
            held[name] = nn.Parameter(torch.zeros((), dtype=tensor.dtype).expand(tensor.shape), False)
        else:
            held[name] = torch.zeros(tensor.shape, dtype=tensor.dtype)  # some are written to
    try:
        yield
    finally:
        for held, name, tensor in kept:
            held[name] = tensor
