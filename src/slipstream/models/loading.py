"""Loads a checkpoint, or refuses it with the reason before any request depends on it."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.utils import logging as hub_logging
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from slipstream.errors import ConfigError, ModelError, SlipstreamError, UnsupportedModelError
from slipstream.models.attention.base import ModelTraits
from slipstream.models.attention.registry import AUTO, cannot_run, choose_backend
from slipstream.models.canary import check_logits, check_masks, probe_layers, stock_logits
from slipstream.models.causal_lm import CausalLM
from slipstream.models.cpu.native import unavailable
from slipstream.models.files.folder import (
    chat_template_beside,
    check_folder,
    check_tokenizer_files,
    check_weight_files,
    without_adapter,
)
from slipstream.models.files.lora import chosen_adapter, merge_adapter
from slipstream.models.files.quantized import settle_quantized
from slipstream.models.linear.formats import OF_DTYPE, check_quantization, checked_format
from slipstream.models.linear.packing import pack_linears
from slipstream.models.longrope import settle_frequencies
from slipstream.models.matrices import (
    STORED,
    has_only_plain_matrices,
    matrix_dtype,
    reading,
    row_dtype,
    settle_matrices,
    widened,
)
from slipstream.models.support import check_config, context_length, unsupported
from slipstream.models.text_tower import KEY_MAPPING, TextTower, text_tower

log = logging.getLogger(__name__)


def resolve_device(name: str) -> torch.device:
    """`auto` is `cuda` where there is one, else `cpu`."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"unknown device {name!r}; use auto, cpu or cuda") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {name!r} was asked for but PyTorch sees no GPU; use cpu")
    return device


def resolve_dtype(name: str, device: torch.device, config: Any) -> torch.dtype:
    """The type of a model in PyTorch: `auto` is float32 on a CPU and the checkpoint's own type on a GPU."""
    if name != "auto":
        dtype = getattr(torch, name)
    elif device.type == "cpu":
        dtype = torch.float32
    else:
        dtype = getattr(config, "dtype", None) or torch.float32
    assert isinstance(dtype, torch.dtype)
    return dtype


def resolve_cache_dtype(
    name: str, dtype: str, stored: torch.dtype | None, computed: torch.dtype, fused: bool
) -> torch.dtype:
    """How keys and values are held.

    `name` and `dtype` are what was asked for, `stored` is the checkpoint's type and `computed` what the model computes
    in. `auto` is the checkpoint's own type where our kernels run whole passes (`fused`): they widen what they read.
    PyTorch's attention would copy the whole cache in every pass.
    """
    asked = name if name != "auto" or not fused else dtype
    if asked != "auto":
        chosen = getattr(torch, asked)
        assert isinstance(chosen, torch.dtype)
        return chosen
    return stored if fused and stored in (torch.bfloat16, torch.float16) else computed


def settle_dtype(
    name: str,
    device: torch.device,
    config: Any,
    native: bool,
    is_plain: Callable[[], bool],
) -> tuple[torch.dtype, str | None]:
    """The type that a model computes in, and the weight format that `name` asks for; None where it asks for none.

    In the native kernels all arithmetic is float32, and 16 bits say how weights are kept. They can be where `is_plain`,
    see `has_only_plain_matrices`; other models are PyTorch's in that type.
    """
    dtype = resolve_dtype(name, device, config)
    if native and dtype in (torch.bfloat16, torch.float16) and is_plain():
        return torch.float32, OF_DTYPE[dtype]
    return dtype, None


def resolve_kernels(name: str) -> str:
    """`auto` is `native` where the kernels can be compiled, else `torch`, with a warning."""
    if name == "torch":
        return name
    reason = unavailable()
    if reason is None:
        return "native"
    if name == "native":
        raise ConfigError(f"cpu_kernels is native, but {reason}")
    warn_once(reason)
    return "torch"


@functools.cache
def warn_once(reason: str) -> None:
    log.warning(
        "%s. PyTorch's own operators are used instead, several times slower (--cpu-kernels torch asks for them)",
        reason,
    )


def load_config(path: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """The checkpoint's Transformers configuration."""
    check_folder(path)
    with _one_line(f"cannot read the configuration of {_named(path)}"), silenced():
        return AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=trust_remote_code)


def meta_model(config: Any, attention: str, trust_remote_code: bool) -> Any:
    """The Transformers model without numbers. Its type is none that counts, and `config` stays as it is."""
    make: Any = AutoModelForCausalLM.from_config
    try:
        with silenced(), torch.device("meta"):
            model = make(
                copy.deepcopy(config),
                dtype=torch.bfloat16,  # experts' products have no other type on this device
                attn_implementation=attention,
                trust_remote_code=trust_remote_code,
            )
    except Exception as error:
        lines = str(error).strip().splitlines()
        reason = lines[0] if lines else type(error).__name__
        raise ModelError(
            f"no {config.model_type} model can be made of this configuration: {reason}"
        ) from None
    return model.eval()


def read_config_file(file: str, *, trust_remote_code: bool = False) -> Any:
    """The Transformers configuration in a file of its own: a `config.json` without a checkpoint."""
    with _one_line(f"cannot read the configuration {file!r}"), silenced():
        return AutoConfig.from_pretrained(file, trust_remote_code=trust_remote_code)


def load_tokenizer(path: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """The checkpoint's tokenizer; a fast one, since text is streamed through its decoder."""
    if not _is_tokenizer_folder(path):
        check_folder(path)
    check_tokenizer_files(path)
    with _one_line(f"cannot load the tokenizer of {_named(path)}"), silenced():
        tokenizer = AutoTokenizer.from_pretrained(
            path, revision=revision, trust_remote_code=trust_remote_code
        )
    if not tokenizer.is_fast:
        raise ModelError(f"the tokenizer of {path!r} has no fast (tokenizers) form; convert it first")
    if not tokenizer.chat_template:
        tokenizer.chat_template = chat_template_beside(path)
    return tokenizer


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
) -> CausalLM:
    """Load a decoder-only Transformers model from a folder or the hub.

    Raises `ModelError` when there is no such checkpoint or its weights are not exactly the model's, and
    `UnsupportedModelError` when its architecture cannot be decoded exactly: recurrent state, an encoder,
    attention that is not causal or bypasses the attention interface. `canary=False` skips the comparison
    with the model's own attention (about four passes of a dozen rows). `pack=False` keeps the Transformers model as it
    is, for code that reads its weights. See `EngineConfig` for `quantization`, `cpu_kernels`, `attention_backend`,
    `kv_cache_dtype`, `lora` and `max_model_len`, which matters to LongRoPE alone. Of a checkpoint that reads images,
    the language model is loaded.
    """
    where = resolve_device(device)
    check_quantization(quantization)
    with _with_path(path):
        source = _open(path, revision, trust_remote_code, lora)
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
        backend = choose_backend(attention_backend, ModelTraits(source.config, where, kind, native))
        read_as: torch.dtype | str | None = None
        if native and kind == torch.float32 and dtype != "float32" and source.stores_its_numbers:
            read_as = STORED if name is None or fmt.stored_dtype is None else fmt.stored_dtype
        with reading(read_as):
            model = _load_weights(source, kind, backend.attn_implementation)
        kept = matrix_dtype(model)
        if name is None and read_as == STORED and kept is not None:
            name = OF_DTYPE.get(kept)
        lm = adapt(
            model.to(where).eval(),
            path,
            max_model_len=max_model_len,
            canary=canary,
            pack=pack,
            quantization=name,
            native=native,
            attention_backend=attention_backend,
            dtype=kind,
        )
    fused = lm.decoder is not None
    lm.cache_dtype = resolve_cache_dtype(kv_cache_dtype, dtype, stored, lm.dtype, fused)
    _tell_cache_dtype(lm, kv_cache_dtype)
    return lm


def load_plain(path: str, *, dtype: torch.dtype, attention: str) -> Any:
    """The Transformers model of a checkpoint, with its own attention, for training.

    Reads the same weights as `load_model`, an adapter included, and raises the same errors.
    """
    with _with_path(path):
        return _load_weights(_open(path, None, False, None), dtype, attention)


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
) -> CausalLM:
    """Wrap a Transformers model that was made with the `slipstream` attention, once it has passed the canary.

    With `pack` the model's own weights are freed, and views of them become invalid. `dtype` is the type that it
    computes in, where its matrices may have another; None asks the model.
    """
    check_config(model.config)
    dtype = dtype or row_dtype(model)
    may_widen = dtype == torch.float32
    fmt = checked_format(quantization, model.device, dtype)
    if may_widen:
        settle_matrices(model, fmt.stored_dtype)
    length = context_length(model.config, max_model_len)
    settle_frequencies(model, length)
    traits = ModelTraits(model.config, model.device, dtype, native and pack)
    backend = choose_backend(attention_backend, traits)
    with widened(model) if may_widen else contextlib.nullcontext():
        probed = probe_layers(model, backend)
    reason = backend.misfit(model, probed.variants, fmt)
    if reason is not None:
        if attention_backend != AUTO:
            raise cannot_run(attention_backend, traits, reason)
        log.info("%s runs layer by layer: %s", model.config.model_type, reason)
        backend = choose_backend(AUTO, replace(traits, native=False))
    lm = CausalLM(model, path, backend, probed.shapes, probed.vocab_size, length, fmt, dtype)
    expected = None
    with silenced():
        if canary:
            with widened(model) if may_widen else contextlib.nullcontext():
                check_masks(lm)
                expected = stock_logits(lm)
        if pack:
            lm.decoder = backend.take_over(model, probed.variants, fmt)
            if lm.decoder is None:
                pack_linears(model, fmt, native, give_back=True, widens=may_widen)
        if expected is not None:
            check_logits(lm, expected)
    return lm


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


@dataclass(frozen=True, slots=True)
class _Source:
    """A checkpoint whose configuration can be loaded."""

    path: str
    revision: str | None
    trust_remote_code: bool
    config: Any
    """Of the language model."""
    tower: TextTower | None
    adapter: str | None

    @property
    def stores_its_numbers(self) -> bool:
        """Whether the model's weights are those in the files: nothing is dequantised, and no adapter merged."""
        return self.adapter is None and getattr(self.config, "quantization_config", None) is None


def _open(path: str, revision: str | None, trust_remote_code: bool, lora: str | None) -> _Source:
    config = load_config(path, revision=revision, trust_remote_code=trust_remote_code)
    with _one_line(f"cannot look for an adapter beside {path!r}"), silenced():
        adapter = chosen_adapter(path, revision, lora)
    tower = text_tower(config)
    config = config if tower is None else tower.config
    check_config(config)
    settle_quantized(path, config)
    check_weight_files(path)
    return _Source(path, revision, trust_remote_code, config, tower, adapter)


def _load_weights(source: _Source, dtype: torch.dtype, attention: str) -> Any:
    """The Transformers model, with all of its weights from the checkpoint, and an adapter merged into them."""
    from_pretrained: Any = AutoModelForCausalLM.from_pretrained
    path, tower = source.path, source.tower
    options = {} if tower is None else {"key_mapping": KEY_MAPPING}
    with _one_line(f"cannot load the weights of {path!r}"), silenced(), without_adapter(path) as folder:
        try:
            model, loaded = from_pretrained(
                folder,
                config=source.config,
                dtype=dtype,
                revision=source.revision,
                trust_remote_code=source.trust_remote_code,
                attn_implementation=attention,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # `_check_complete` reports them
                **options,
            )
        except KeyError as error:
            if error.args != (attention,):
                raise
            # Older models look their attention class up by name.
            reason = "its attention does not go through the attention interface"
            raise unsupported(source.config, reason) from None
    if tower is not None:
        loaded = {**loaded, "unexpected_keys": tower.without_image_weights(loaded["unexpected_keys"])}
        log.info("%s reads images; its language model alone was loaded", tower.family)
    _check_complete(path, loaded)
    if source.adapter is not None:
        with _one_line(f"cannot merge the LoRA adapter {source.adapter!r} into {path!r}"), silenced():
            return merge_adapter(model, source.adapter)
    return model


def _is_tokenizer_folder(path: str) -> bool:
    """True for a folder with a tokenizer and no model."""
    return (
        Path(path).is_dir()
        and not (Path(path) / "config.json").is_file()
        and (Path(path) / "tokenizer.json").is_file()
    )


def _check_complete(path: str, loaded: Mapping[str, Any]) -> None:
    """Raise `ModelError` for missing or unknown weights. Transformers would initialise or ignore them."""
    mismatched = {key for key, *_ in loaded["mismatched_keys"]}
    for what, keys in [
        ("lacks", loaded["missing_keys"]),
        ("has unknown", loaded["unexpected_keys"]),
        ("has misshapen", mismatched),
    ]:
        if keys:
            more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
            raise ModelError(f"the checkpoint {path!r} {what} weights: {min(keys)}{more}")


@contextlib.contextmanager
def _with_path(path: str) -> Iterator[None]:
    """Put the checkpoint's path in front of an `UnsupportedModelError`."""
    try:
        yield
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{path!r}: {error}") from None


def _named(path: str) -> str:
    """The path as a message names it; what is no folder is said to be a hub id."""
    return repr(path) if Path(path).is_dir() else f"{path!r} (no folder of that name, so taken as a hub id)"


@contextlib.contextmanager
def _one_line(what: str) -> Iterator[None]:
    """Turn any exception of Transformers into a `ModelError` of one line."""
    try:
        yield
    except SlipstreamError:
        raise
    except Exception as error:
        lines = str(error).strip().splitlines()
        raise ModelError(f"{what}: {lines[0] if lines else type(error).__name__}") from None


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """Silence Transformers' progress bars and warnings within the body."""
    quiet: Any = transformers_logging
    bars, verbosity, hub_verbosity = (
        quiet.is_progress_bar_enabled(),
        quiet.get_verbosity(),
        hub_logging.get_verbosity(),
    )
    quiet.disable_progress_bar()
    quiet.set_verbosity_error()
    hub_logging.set_verbosity(40)  # ERROR: it would log each retry
    try:
        yield
    finally:
        quiet.set_verbosity(verbosity)
        hub_logging.set_verbosity(hub_verbosity)
        if bars:
            quiet.enable_progress_bar()
