"""Loads a checkpoint, or refuses it with the reason before any request depends on it."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator
from typing import Any

import torch

from slipstream.errors import UnsupportedModelError
from slipstream.models.attention.base import ModelTraits
from slipstream.models.attention.registry import AUTO, choose_backend, fitting_backend
from slipstream.models.canary import StockPass, check_cache, check_masks, probe_layers
from slipstream.models.causal_lm import CausalLM
from slipstream.models.checkpoint import Checkpoint, load_weights, open_checkpoint
from slipstream.models.configuration import meta_model
from slipstream.models.cpu.families import FAMILIES
from slipstream.models.cpu.native import fingerprint
from slipstream.models.fast_prompts import check_fast_prompts, check_format, turn_on_fast_prompts
from slipstream.models.files.folder import all_float32
from slipstream.models.files.stored import KEPT_AS_STORED
from slipstream.models.huggingface import model_class
from slipstream.models.linear.formats import OF_DTYPE, check_quantization, checked_format
from slipstream.models.linear.packing import pack_linears
from slipstream.models.longrope import settle_frequencies
from slipstream.models.matrices import (
    STORED,
    has_only_plain_matrices,
    matrix_dtype,
    read_and_forgotten,
    reading,
    row_dtype,
    settle_matrices,
    widen_experts,
    widened,
)
from slipstream.models.quiet import one_line, silenced
from slipstream.models.settling import (
    resolve_cache_dtype,
    resolve_device,
    resolve_dtype,
    resolve_kernels,
    settle_dtype,
)
from slipstream.models.support import check_config, context_length
from slipstream.models.verdicts import LoadVerdict, verdict_of

log = logging.getLogger(__name__)


def load_model(
    path: str,
    *,
    dtype: str = "auto",
    device: str = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    canary: bool = True,
    pack: bool = True,
    quantization: str | None = None,
    cpu_kernels: str = "auto",
    lora: str | None = None,
    max_model_len: int | None = None,
    attention_backend: str = AUTO,
    kv_cache_dtype: str = "auto",
    fast_prompts: bool = False,
) -> CausalLM:
    """Load a decoder-only Transformers model from a folder or the hub.

    Raises `ModelError` when there is no such checkpoint or its weights are not exactly the model's, and
    `UnsupportedModelError` when its architecture cannot be decoded exactly: recurrent state, an encoder,
    attention that is not causal or bypasses the attention interface, keys or values that the type of the cache does
    not hold. `canary=False` skips the comparisons with the model's own layers and weights and with a cache that rounds
    nothing; a model that has passed them before is not compared again (see `verdicts`). `pack=False` keeps the
    Transformers model as it is, for code that reads its weights. See `EngineConfig` for `quantization`, `cpu_kernels`,
    `attention_backend`, `kv_cache_dtype`, `fast_prompts`, `lora` and `max_model_len`, which matters to LongRoPE alone.
    Of a checkpoint that reads images, the language model is loaded.
    """
    where = resolve_device(device)
    check_quantization(quantization)
    with _with_path(path):
        says_how = dtype != "auto" or quantization is not None
        source = open_checkpoint(path, revision, trust_remote_code, lora, widens=says_how)
        stored = getattr(source.config, "dtype", None)  # Transformers overwrites it
        kernels = resolve_kernels(cpu_kernels) if where.type == "cpu" and pack else "torch"
        native = kernels == "native"
        checked_format(quantization, where, resolve_dtype(dtype, where, source.config))
        kind, asked = settle_dtype(
            dtype,
            where,
            source.config,
            native,
            lambda: has_only_plain_matrices(meta_model(source.config, "eager", trust_remote_code)),
        )
        name = quantization or asked
        fmt = checked_format(name, where, kind)
        if fast_prompts:
            check_fast_prompts(where, native, name or (dtype if dtype == "float32" else None))
            if dtype == "auto" and pack:
                _check_stored(source, name, stored)
        backend = choose_backend(attention_backend, ModelTraits(source.config, where, kind, native))
        read_as: torch.dtype | str | None = None
        if native and kind == torch.float32 and source.stores_its_numbers:
            read_as = STORED if fmt.stored_dtype in (None, torch.float32) else fmt.stored_dtype
        verdict = None
        if canary:
            settings = {
                "dtype": dtype,
                "device": str(where),
                "pack": pack,
                "quantization": quantization,
                "cpu_kernels": kernels,
                "max_model_len": max_model_len,
                "kv_cache_dtype": kv_cache_dtype,
                "fast_prompts": fast_prompts,
            }
            verdict = _verdict(source, settings, native, [type(backend), type(fmt), type(fmt.of_head())])
        compares = canary and not (verdict is not None and verdict.is_kept())
        narrow = stored if read_as == STORED else read_as if isinstance(read_as, torch.dtype) else None
        if "float32" in (dtype, name):
            narrow = None  # what is stored in 8 bits becomes float32, which rounds nothing
        with reading(read_as):
            model, stored_as = load_weights(
                source,
                kind,
                backend.attn_implementation,
                keeps=dtype == "auto" and pack,
                where=where,
                narrow=narrow,
                experts_in=quantization if native and kind == torch.float32 else None,
            )
        if stored_as and quantization is not None:
            log.warning(KEPT_AS_STORED, path, stored_as, quantization)
        if stored_as and not native:
            log.warning(
                "%s weights are widened part by part in every pass without our own kernels", stored_as
            )
        kept = matrix_dtype(model)
        if name is None and dtype == "auto" and read_as == STORED and kept is not None:
            name = OF_DTYPE.get(kept)
        lm = adapt(
            model.to(where).eval(),
            path,
            max_model_len=max_model_len,
            canary=compares,
            pack=pack,
            quantization=name,
            native=native,
            attention_backend=attention_backend,
            dtype=kind,
            stored_as=stored_as,
        )
        fused = lm.decoder is not None
        lm.cache_dtype = resolve_cache_dtype(kv_cache_dtype, dtype, stored, lm.dtype, fused)
        if compares:
            check_cache(lm)
            if verdict is not None and lm.was_compared:
                verdict.keep()
    _tell_cache_dtype(lm, kv_cache_dtype)
    if fast_prompts:
        turn_on_fast_prompts(lm)
    return lm


def _verdict(
    source: Checkpoint, settings: dict[str, Any], native: bool, classes: list[type]
) -> LoadVerdict | None:
    """Under what the checks of this checkpoint are kept; None where they are made at every start."""
    if source.trust_remote_code:
        return None  # its code may lie elsewhere
    try:
        classes = [*classes, type(source.config), model_class(source.config)]
    except KeyError:
        return None  # Transformers has no class for it
    model_type = source.config.model_type
    if native and model_type in FAMILIES.names():
        classes = [*classes, FAMILIES.load(model_type)]
    kernels = fingerprint() if native else "torch"
    return verdict_of(source.path, source.revision, source.adapter, settings, kernels, classes)


def _check_stored(source: Checkpoint, name: str | None, dtype: torch.dtype | None) -> None:
    """Raise `ConfigError` where a checkpoint whose weights are kept as they are cannot have `fast_prompts`.

    `name` is the format of those that are not quantised, None where it is the checkpoint's, whose type is `dtype`.
    What this cannot know is left to `turn_on_fast_prompts`.
    """
    with one_line(f"cannot read the weights of {source.path!r}"), silenced():
        weights = source.stored()
    if weights is not None and weights.matrices:
        check_format(weights.kind)
    if name is None and dtype == torch.float32 and all_float32(source.path):
        check_format("float32")


def load_plain(path: str, *, dtype: torch.dtype, attention: str) -> Any:
    """The Transformers model of a checkpoint, with its own attention, for training.

    Reads the same weights as `load_model`, an adapter included, and raises the same errors.
    """
    with _with_path(path):
        return load_weights(open_checkpoint(path, None, False, None), dtype, attention)[0]


def adapt(
    model: Any,
    path: str = "",
    *,
    canary: bool = True,
    pack: bool = True,
    quantization: str | None = None,
    native: bool = True,
    max_model_len: int | None = None,
    attention_backend: str = AUTO,
    dtype: torch.dtype | None = None,
    stored_as: str = "",
) -> CausalLM:
    """Wrap a Transformers model that was made with the `slipstream` attention, once it has passed the canary.

    With `pack` the model's own weights are freed, and views of them become invalid. `dtype` is the type that it
    computes in, where its matrices may have another; None asks the model. `stored_as` says how a file holds those that
    are still quantised.
    """
    check_config(model.config)
    dtype = dtype or row_dtype(model)
    may_widen = dtype == torch.float32
    fmt = checked_format(quantization, model.device, dtype)
    if may_widen:
        settle_matrices(model, fmt.stored_dtype, keeps_narrow=native and pack and fmt.kernel is not None)
    length = context_length(model.config, max_model_len)
    settle_frequencies(model, length)
    traits = ModelTraits(model.config, model.device, dtype, native and pack)
    backend = choose_backend(attention_backend, traits)
    probed = probe_layers(model, backend)
    backend = fitting_backend(backend, attention_backend, traits, model, probed.variants, fmt)
    lm = CausalLM(model, path, backend, probed.shapes, probed.vocab_size, length, fmt, dtype, stored_as)
    stock = None
    with silenced():
        if canary:
            trial = backend.layer_trial(model, probed.variants) if pack else None
            check_masks(lm)
            with _as_stored(model, may_widen):
                stock = StockPass(lm, trial)
                lm.was_compared = stock.run()
            del trial
        if pack:
            lm.decoder = backend.take_over(model, probed.variants, fmt)
            if lm.decoder is None:
                if may_widen:
                    widen_experts(model)
                pack_linears(model, fmt, native, give_back=True, widens=may_widen, called=probed.called)
            if stock is not None and lm.was_compared:
                stock.check_packed()
    return lm


@contextlib.contextmanager
def _as_stored(model: Any, may_widen: bool) -> Iterator[None]:
    """Passes over weights as they were read, which hold no more than one layer of what is mapped from a file."""
    with widened(model) if may_widen else contextlib.nullcontext(), read_and_forgotten(model):
        yield


def _tell_cache_dtype(lm: CausalLM, asked: str) -> None:
    """Log how keys and values are held, and warn of a narrow type that our kernels do not read."""
    name, fused = str(lm.cache_dtype).removeprefix("torch."), lm.decoder is not None
    why = (
        ""
        if asked != "auto"
        else f" (kv_cache_dtype auto, {'with' if fused else 'without'} the fused decoder)"
    )
    log.info("%s: keys and values are kept in %s%s", lm.family, name, why)
    if asked != "auto" and not fused and lm.cache_dtype.itemsize < lm.dtype.itemsize:
        _warn_of_copies(name)


@functools.cache
def _warn_of_copies(name: str) -> None:
    log.warning(
        "kv_cache_dtype is %s where the fused decoder does not run: every pass copies the entries that it reads, "
        "widened, and where company changes PyTorch's last bits, text may differ at near ties by a step of the type",
        name,
    )


@contextlib.contextmanager
def _with_path(path: str) -> Iterator[None]:
    """Put the checkpoint's path in front of an `UnsupportedModelError`."""
    try:
        yield
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{path!r}: {error}") from None
