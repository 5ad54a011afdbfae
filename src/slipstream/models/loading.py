"""Loads a checkpoint, or refuses it with the reason before any request depends on it."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from slipstream.errors import ConfigError, UnsupportedModelError
from slipstream.models.attention.base import ATTENTION_NAME, AttentionBackend, ModelTraits
from slipstream.models.attention.counted import pass_positions
from slipstream.models.attention.indexer import lead_indexers
from slipstream.models.attention.numbered import number_layers
from slipstream.models.attention.own_forward import lead_forwards, loads_with
from slipstream.models.attention.registry import choose_backend, fitting_backend
from slipstream.models.canary import StockPass, check_cache, check_masks, probe_layers
from slipstream.models.causal_lm import CausalLM
from slipstream.models.checkpoint import Checkpoint, load_weights, not_kept, open_checkpoint
from slipstream.models.configuration import meta_model
from slipstream.models.cpu import threads
from slipstream.models.cpu.exact_rows import multiplying_exactly
from slipstream.models.cpu.native import fingerprint, unavailable
from slipstream.models.cpu.packed_copy import PackedCopy
from slipstream.models.executor.base import Executor, ProbedModel
from slipstream.models.executor.eager import EagerExecutor
from slipstream.models.executor.registry import (
    AUTO,
    EXECUTORS,
    candidates,
    check_attention,
    check_executor,
    choose_executor,
    likely_executor,
)
from slipstream.models.families.registry import FAMILIES
from slipstream.models.fast_prompts import check_fast_prompts, check_format, turn_on_fast_prompts
from slipstream.models.files.folder import all_float32
from slipstream.models.files.stored import KEPT_AS_STORED
from slipstream.models.files.stored_experts import KEPT
from slipstream.models.huggingface import model_class
from slipstream.models.linear.formats import (
    OF_DTYPE,
    WeightFormat,
    check_quantization,
    checked_format,
    weight_format,
)
from slipstream.models.load_options import LoadOptions
from slipstream.models.longrope import resolve_frequencies
from slipstream.models.matrices import (
    STORED,
    has_only_plain_matrices,
    matrix_dtype,
    read_and_forgotten,
    reading,
    resolve_matrices,
    row_dtype,
    widened,
)
from slipstream.models.mixers.base import Mixers
from slipstream.models.mixers.latent import attends_in_the_kernels, hold_latents
from slipstream.models.mixers.registry import RECURRENCES, recurrences
from slipstream.models.quiet import one_line, silenced
from slipstream.models.resolve import (
    kept_dtype,
    resolve_cache_dtype,
    resolve_device,
    resolve_dtype,
    resolve_kernels,
    resolve_weight_dtype,
)
from slipstream.models.support import check_config, context_length, is_encoder_decoder, unsupported
from slipstream.models.verdicts import LoadVerdict, verdict_of

log = logging.getLogger(__name__)


def load_model(
    path: str, options: LoadOptions | None = None, *, canary: bool = True, pack: bool = True, **given: Any
) -> CausalLM:
    """Load a Transformers model from a folder or the hub.

    `given` are fields of `LoadOptions`, in place of those of `options`. `canary=False` skips the comparisons with the
    model's own layers and weights and with a cache that rounds nothing; a model that has passed them before is not
    compared again (see `verdicts`). `pack=False` keeps the Transformers model as it is, for code that reads its
    weights. Of a checkpoint that reads images, the language model is loaded.

    Raises `ModelError` when there is no such checkpoint or its weights are not exactly the model's, and
    `UnsupportedModelError` when its architecture cannot be decoded exactly: a recurrence that is not known, attention
    that is not causal or bypasses the attention interface, keys or values that the type of the cache does not hold.
    """
    options = replace(options or LoadOptions(), **given)
    check_quantization(options.quantization)
    check_executor(options.executor)
    with _with_path(path), multiplying_exactly(options.exact_rows):
        choice = _choose(path, options, pack)
        verdict = _verdict(choice, options, pack) if canary else None
        compares = canary and not (verdict is not None and verdict.is_kept())
        copy = None if verdict is None or not choice.native else PackedCopy(_copy_name(verdict, options))
        model, stored_as, name = _read(choice, options, pack)
        lm = adapt(
            model.to(choice.device).eval(),
            path,
            canary=compares,
            pack=pack,
            native=choice.native,
            dtype=choice.dtype,
            stored_as=stored_as,
            quantization=name,
            copy=copy,
            **{
                key: getattr(options, key)
                for key in ("max_model_len", "attention_backend", "executor", "rounds_head")
            },
        )
        lm.unused_tensors = choice.source.unused_tensors()
        requested, widens = options.kv_cache_dtype, lm.executor.widens_entries
        lm.cache_dtype = resolve_cache_dtype(requested, options.dtype, choice.stored, lm.dtype, widens)
        if compares:
            check_cache(lm)
            if verdict is not None and lm.was_compared and not lm.fell_back:
                verdict.keep()
        if copy is not None and verdict is not None and verdict.is_kept():
            copy.keep()
    _tell_cache_dtype(lm, requested)
    if options.fast_prompts:
        turn_on_fast_prompts(lm)
    return lm


@dataclass(frozen=True, slots=True)
class _Choice:
    """What a checkpoint is loaded as, before its weights are read."""

    source: Checkpoint
    stored: torch.dtype | None
    """The checkpoint's own type."""
    device: torch.device
    native: bool
    """Whether the native CPU kernels may compute."""
    decodes: bool
    """Whether the fused decoder of a GPU is to compute."""
    dtype: torch.dtype
    """Type that it computes in."""
    weights: str | None
    """The weight format that is requested."""
    format: WeightFormat
    backend: AttentionBackend

    @property
    def read_as(self) -> torch.dtype | str | None:
        """For `reading`."""
        if not (self.native and self.dtype == torch.float32 and self.source.stores_its_numbers):
            return None
        return STORED if self.format.stored_dtype in (None, torch.float32) else self.format.stored_dtype


def _choose(path: str, options: LoadOptions, pack: bool) -> _Choice:
    """Raises for what `options` request and the checkpoint, the machine or the kernels cannot give."""
    where = resolve_device(options.device)
    dtype, quantization, trusts = options.dtype, options.quantization, options.trust_remote_code
    source = open_checkpoint(path, options.revision, trusts, options.lora)
    stored = getattr(source.config, "dtype", None)  # Transformers overwrites it
    native = where.type == "cpu" and pack and resolve_kernels(options.cpu_kernels) == "native"
    computes = resolve_dtype(dtype, where, source.config)
    decodes = pack and not native and will_decode(options, ModelTraits(source.config, where, computes, False))
    checked_format(quantization, where, computes, decodes)

    def is_plain() -> bool:
        return has_only_plain_matrices(meta_model(source.config, "eager", trusts))

    kind, requested = resolve_weight_dtype(dtype, where, source.config, native, is_plain)
    if decodes and dtype == "auto" and source.keeps_codes:
        kind = kept_dtype(where, kind)
    name = quantization or requested
    fmt = checked_format(name, where, kind, decodes)
    if options.exact_rows and where.type == "cpu" and not native and fmt.weight_error is not None:
        raise ConfigError(
            f"exact_rows needs the native CPU kernels: with quantization {name!r} PyTorch's operators round rows to 8 "
            "bits; leave one of them out"
        )
    if options.fast_prompts:
        check_fast_prompts(where, native, name or (dtype if dtype == "float32" else None))
        if dtype == "auto" and pack:
            _check_stored(source, name, stored)
    traits = ModelTraits(source.config, where, kind, native, options.fuses)
    backend = choose_backend(options.attention_backend, traits)
    if pack:
        check_attention(options.executor, backend)
    return _Choice(source, stored, where, native, decodes, kind, name, fmt, backend)


def will_decode(options: LoadOptions, traits: ModelTraits) -> bool:
    """Whether the fused decoder of a GPU is to compute a model, as far as a configuration tells."""
    backend = choose_backend(options.attention_backend, traits)
    return likely_executor(options.executor, backend).decodes


def _read(choice: _Choice, options: LoadOptions, pack: bool) -> tuple[Any, str, str | None]:
    """The Transformers model, how its file holds layers that stay quantised, and the format of the others."""
    source, native, name, read_as = choice.source, choice.native, choice.weights, choice.read_as
    narrow = choice.stored if read_as == STORED else read_as if isinstance(read_as, torch.dtype) else None
    if "float32" in (options.dtype, name):
        narrow = None  # what is stored in 8 bits becomes float32, which rounds nothing
    with reading(read_as):
        model, stored_as = load_weights(
            source,
            choice.dtype,
            loads_with(source.config, choice.backend.attn_implementation),
            keeps=options.dtype == "auto" and pack,
            can_keep=choice.device.type == "cpu" or choice.decodes,
            narrow=narrow,
            keeps_fp8=options.dtype == "auto" and pack and choice.decodes,
            experts_in=(options.quantization or KEPT) if native and choice.dtype == torch.float32 else None,
        )
    if stored_as and options.quantization is not None:
        log.warning(KEPT_AS_STORED, source.path, stored_as, options.quantization)
    if stored_as and not native and not choice.decodes:
        log.warning("%s weights are widened part by part in every pass without our own kernels", stored_as)
    kept = matrix_dtype(model)
    if name is None and options.dtype == "auto" and read_as == STORED and kept is not None:
        name = OF_DTYPE.get(kept)
    return model, stored_as, name


def _verdict(choice: _Choice, options: LoadOptions, pack: bool) -> LoadVerdict | None:
    """Under what the checks of this checkpoint are kept; None where they are made at every start."""
    source, native = choice.source, choice.native
    if source.trust_remote_code:
        return None  # its code may lie elsewhere
    fmt = choice.format
    classes = [type(choice.backend), type(fmt), type(fmt.of_head()), type(source.config)]
    try:
        classes.append(model_class(source.config))
    except KeyError:
        return None  # Transformers has no class for it
    classes += candidates(options.executor, choice.backend)
    model_type = source.config.model_type
    if model_type in FAMILIES.names():
        classes.append(FAMILIES.load(model_type))
    classes += [RECURRENCES.load(name) for name in RECURRENCES.names()]
    settings = {
        "dtype": options.dtype,
        "device": str(choice.device),
        "pack": pack,
        "quantization": options.quantization,
        "cpu_kernels": "native" if native else "torch",
        "max_model_len": options.max_model_len,
        "kv_cache_dtype": options.kv_cache_dtype,
        "fast_prompts": options.fast_prompts,
        "exact_rows": options.exact_rows,
        "reproducible": options.reproducible,
    }
    kernels = kernels_of(choice.device, native)
    return verdict_of(source.path, source.revision, source.adapter, settings, kernels, classes)


def _copy_name(verdict: LoadVerdict, options: LoadOptions) -> str:
    """Of packed weights: by what of the verdict they depend on, and what is packed besides."""
    return verdict.digest(
        ("dtype", "device", "pack", "quantization", "cpu_kernels"), rounds_head=options.rounds_head
    )


def kernels_of(device: torch.device, native: bool) -> str:
    """What computes: kernels for a GPU are compiled for the one that is here."""
    if native:
        return fingerprint()
    return f"torch on {torch.cuda.get_device_name(device)}" if device.type == "cuda" else "torch"


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
        source = open_checkpoint(path, None, False, None)
        if is_encoder_decoder(source.config):
            raise unsupported(source.config, "encoder-decoders are not trained here")
        return load_weights(source, dtype, attention)[0]


def adapt(
    model: Any,
    path: str = "",
    *,
    canary: bool = True,
    pack: bool = True,
    native: bool = True,
    dtype: torch.dtype | None = None,
    stored_as: str = "",
    copy: PackedCopy | None = None,
    **given: Any,
) -> CausalLM:
    """Wrap a Transformers model that was made with the `slipstream` attention, once it has passed the canary.

    With `pack` the model's own weights are freed, and views of them become invalid. `dtype` is the type that it
    computes in, where its matrices may have another; None: as the model. `stored_as` says how a file holds those that
    are still quantised. Packed weights are taken from `copy`, where it has them. `given` are fields of `LoadOptions`:
    `quantization`, `max_model_len`, `attention_backend` and `executor` are read, and `reproducible`.
    """
    options = LoadOptions(**given)
    check_config(model.config)
    pass_positions(model)
    dtype = dtype or row_dtype(model)
    fmt = weight_format(options.quantization)
    if dtype == torch.float32:
        resolve_matrices(model, fmt.stored_dtype, keeps_narrow=native and pack and fmt.kernel is not None)
    length = context_length(model.config, options.max_model_len)
    resolve_frequencies(model, length)
    traits = ModelTraits(model.config, model.device, dtype, native and pack, options.fuses)
    name = options.attention_backend
    backend = choose_backend(name, traits)
    number_layers(model)
    lead_forwards(model)
    lead_indexers(model)
    if backend.holds_latents:
        is_native = native and pack and dtype == torch.float32 and model.device.type == "cpu"
        hold_latents(model, ATTENTION_NAME, threads.available() if is_native else 0)
    checked_format(
        options.quantization, model.device, dtype, likely_executor(options.executor, backend).decodes
    )
    walks = native and pack and model.device.type == "cpu" and unavailable() is None
    mixers = Mixers(model, recurrences(), walks)
    with silenced():
        probed = probe_layers(model, backend, mixers)
    backend = fitting_backend(backend, name, traits, model, probed.variants, fmt)
    tried = ProbedModel(
        model,
        backend,
        probed,
        fmt,
        dtype,
        native,
        options.reproducible,
        mixers if probed.states else None,
        options.rounds_head,
    )
    executor = choose_executor(options.executor, tried)
    lm = CausalLM(tried, EagerExecutor(tried, packs=False), path, length, stored_as)
    stock = None
    with silenced():
        if canary:
            check_masks(lm)
            with _as_stored(model, tried.widens):
                stock, executor = _compared(lm, tried, executor if pack else EagerExecutor, options.executor)
        if pack:
            check_kept(executor, tried, options.quantization, path, stored_as)
            with contextlib.nullcontext() if copy is None else copy.used():
                lm.executor = executor(tried)
            if stock is not None and lm.was_compared:
                stock.check_packed()
    return lm


def check_kept(
    executor: type[Executor], tried: ProbedModel, quantization: str | None, path: str, stored_as: str
) -> None:
    """Raise an error where weights are to be held in a way that what computes the model in the end has not."""
    device = tried.model.device
    if quantization is not None:
        tried.weight_format.check(device, tried.dtype, executor.decodes)
    if stored_as and device.type != "cpu" and not executor.decodes:
        raise not_kept(path, stored_as)


def _compared(
    lm: CausalLM, tried: ProbedModel, executor: type[Executor], requested: str
) -> tuple[StockPass, type[Executor]]:
    """Compare passes, as `executor` will compute them, with Transformers' own; returns what is to compute them.

    Raises `UnsupportedModelError` where they differ, and no other executor may take its place.
    """
    eager = lm.executor
    while True:
        lm.executor = executor.unpacked(tried) or eager
        stock = StockPass(lm, executor.layer_trial(tried), tried.probed.variants)
        try:
            lm.was_compared = stock.run()
        except UnsupportedModelError as error:
            if requested != AUTO or executor.otherwise is None:
                raise
            log.warning("executor %s is not used: %s", executor.name, error)
            executor, lm.fell_back = EXECUTORS.load(executor.otherwise), True
        else:
            lm.executor = eager  # before weights are taken once more, and packed
            return stock, executor


@contextlib.contextmanager
def _as_stored(model: Any, may_widen: bool) -> Iterator[None]:
    """Passes over weights as they were read, which hold no more than one layer of what is mapped from a file."""
    with widened(model) if may_widen else contextlib.nullcontext(), read_and_forgotten(model):
        yield


def _tell_cache_dtype(lm: CausalLM, requested: str) -> None:
    """Log how keys and values are held, and warn of a narrow type that our kernels do not read."""
    name, fused = str(lm.cache_dtype).removeprefix("torch."), lm.executor.widens_entries
    why = (
        ""
        if requested != "auto"
        else f" (kv_cache_dtype auto, {'with' if fused else 'without'} the fused decoder)"
    )
    log.info("%s: keys and values are kept in %s%s", lm.family, name, why)
    widens = fused or attends_in_the_kernels(lm.model)
    if requested != "auto" and not widens and lm.cache_dtype.itemsize < lm.dtype.itemsize:
        _warn_of_copies(name)


@functools.cache
def _warn_of_copies(name: str) -> None:
    log.warning(
        "kv_cache_dtype is %s where the fused decoder does not run: every pass copies the entries that it reads, "
        "widened; where other rows of the batch change PyTorch's last bits, text may differ at near ties by a step of "
        "the type",
        name,
    )


@contextlib.contextmanager
def _with_path(path: str) -> Iterator[None]:
    """Put the checkpoint's path in front of an `UnsupportedModelError`."""
    try:
        yield
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{path!r}: {error}") from None
