"""What a model runs on and in: device, types, kernels, as requested and as the machine and the checkpoint permit."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch

from slipstream.errors import ConfigError
from slipstream.models.cpu.native import unavailable
from slipstream.models.linear.formats import OF_DTYPE

log = logging.getLogger(__name__)

UNKNOWN_DEVICE = "unknown device {!r}; use auto, cpu or cuda"


def resolve_device(name: str) -> torch.device:
    """`auto` is `cuda` where there is one, else `cpu`."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = named_device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {name!r} was requested but PyTorch sees no GPU; use cpu")
    if device.type == "cuda" and (device.index or 0) >= (there := torch.cuda.device_count()):
        raise ConfigError(f"device {name!r} was requested but the last GPU is 'cuda:{there - 1}'")
    return device


def plannable_device(name: str) -> torch.device:
    """As `resolve_device`, but a device need not be there to be planned for."""
    return resolve_device(name) if name == "auto" else named_device(name)


def named_device(name: str) -> torch.device:
    """Raises `ConfigError` unless it names a CPU or a CUDA device, there or not; `meta` stands for one in tests."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(UNKNOWN_DEVICE.format(name)) from None
    if device.type not in ("cpu", "cuda", "meta"):
        raise ConfigError(UNKNOWN_DEVICE.format(name))
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


def kept_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """The type that a model computes in by itself whose file holds codes and names no type: a GPU multiplies float32
    rows slowly."""
    return torch.bfloat16 if device.type != "cpu" and dtype == torch.float32 else dtype


def resolve_cache_dtype(
    name: str, dtype: str, stored: torch.dtype | None, computed: torch.dtype, fused: bool
) -> torch.dtype:
    """How keys and values are held.

    `name` and `dtype` are what was requested, `stored` is the checkpoint's type and `computed` what the model computes
    in. `auto` is the checkpoint's own type where our kernels run whole passes (`fused`): they widen what they read.
    PyTorch's attention would copy the whole cache in every pass.
    """
    requested = name if name != "auto" or not fused else dtype
    if requested != "auto":
        chosen = getattr(torch, requested)
        assert isinstance(chosen, torch.dtype)
        return chosen
    return stored if fused and stored in (torch.bfloat16, torch.float16) else computed


def resolve_weight_dtype(
    name: str,
    device: torch.device,
    config: Any,
    native: bool,
    is_plain: Callable[[], bool],
) -> tuple[torch.dtype, str | None]:
    """The type that a model computes in, and the weight format that `name` requests; None where it requests none.

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
