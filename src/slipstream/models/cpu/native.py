"""The CPU kernels in `kernels/`, loaded in the build that this processor runs fastest (`builds.py`).

A wheel has them compiled. Elsewhere they are compiled once, on the user's machine, and cached: they are plain C++
without dependencies, and take some seconds. Where there is no compiler either the engine runs on PyTorch's operators
instead (`models.linear`); `unavailable` says why.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import subprocess
import tempfile
from ctypes import c_char_p, c_int, c_size_t, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from slipstream.config import cache_folder
from slipstream.errors import ConfigError
from slipstream.models.cpu import builds
from slipstream.models.cpu.builds import Build

log = logging.getLogger(__name__)


class NativeUnavailable(RuntimeError):
    """The kernels cannot be used here; the message says why, in one line."""


class Status(c_int):
    """What functions of the kernels return that may lack memory: 0, or 1 where they do. See `library`."""


_SIGNATURES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "slipstream_instructions": (c_char_p, ()),
    "slipstream_has_bfloat16_tiles": (c_int, ()),
    "slipstream_panel": (c_int, ()),
    "slipstream_padded_out": (c_int, (c_int,)),
    "slipstream_packed_bytes": (c_size_t, (c_int, c_int, c_int, c_int)),
    **{
        f"slipstream_pack_{name}": (Status, (c_void_p, c_int, c_int, c_void_p, c_int))
        for name in ("float32", "bfloat16", "float16")
    },
    "slipstream_pack_groups": (
        Status,
        (c_int, c_int, *[c_void_p] * 3, c_int, c_int, c_void_p, c_void_p, c_int),
    ),
    "slipstream_pack_blocks": (Status, (*[c_void_p] * 5, c_int, c_int, c_void_p, c_void_p, c_int)),
    "slipstream_fit_blocks": (Status, (c_void_p, c_int, c_int, c_void_p, c_void_p, c_int)),
    "slipstream_fit_groups": (Status, (c_void_p, *[c_int] * 4, *[c_void_p] * 3, c_int)),
    "slipstream_round_groups": (Status, (c_void_p, *[c_int] * 3, *[c_void_p] * 2, c_int)),
    "slipstream_multiply": (Status, (c_void_p, c_void_p, c_int, c_void_p, c_int)),
    "slipstream_unpack": (None, (c_void_p, c_void_p, c_int, c_void_p)),
    "slipstream_new_scratch": (c_void_p, ()),
    "slipstream_free_scratch": (None, (c_void_p,)),
    "slipstream_scratch_bytes": (c_size_t, (c_void_p,)),
    "slipstream_new_layer_scratch": (c_void_p, ()),
    "slipstream_free_layer_scratch": (None, (c_void_p,)),
    "slipstream_layer_scratch_bytes": (c_size_t, (c_void_p,)),
    "slipstream_attend": (Status, (c_void_p, c_void_p, c_int)),
    "slipstream_latent": (Status, (c_void_p, c_void_p, c_int)),
    "slipstream_forward": (Status, (c_void_p, c_void_p, c_void_p, c_int)),
    "slipstream_forward_by_part": (Status, (*[c_void_p] * 4, c_int)),
    "slipstream_draft": (Status, (c_void_p, c_void_p, c_void_p, c_void_p, c_int)),
    "slipstream_eagle": (Status, (c_void_p, c_void_p, c_void_p, c_void_p, c_int)),
    "slipstream_draft_eagle": (Status, (c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_int)),
    "slipstream_heads": (Status, (c_void_p, c_void_p, c_void_p, c_int)),
    "slipstream_draft_medusa": (Status, (c_void_p, c_void_p, c_void_p, c_void_p, c_int)),
    "slipstream_outer_products": (Status, (c_void_p, c_void_p, c_int)),
    "slipstream_convolve": (Status, (c_void_p, c_void_p, c_int)),
    "slipstream_draw_levels": (Status, (c_void_p, c_int, c_void_p)),
    "slipstream_draw_level": (Status, (c_void_p, c_int, c_void_p, c_int, c_void_p)),
    "slipstream_draft_hydra": (Status, (*[c_void_p] * 6, c_int)),
}


def build() -> Build:
    """The build of the kernels for this process: the fastest, or the one that `SLIPSTREAM_CPU_ISA` names.

    Raises `ConfigError` for a name that this processor cannot run, `NativeUnavailable` where there is none.
    """
    try:
        return builds.choose(os.environ.get("SLIPSTREAM_CPU_ISA", ""))
    except ValueError as error:
        raise ConfigError(str(error)) from None
    except LookupError as error:
        raise NativeUnavailable(str(error)) from None


def library() -> ctypes.CDLL:
    """The compiled kernels; compiles them where they are in neither the package nor the cache.

    Raises `NativeUnavailable`, and `ConfigError` for a build that this processor cannot run. Its functions raise
    `MemoryError` where the system has no memory for them, before anything is computed.
    """
    loaded = _load()
    if isinstance(loaded, str):
        raise NativeUnavailable(loaded)
    return loaded


@functools.cache
def _load() -> ctypes.CDLL | str:
    """The library, or why there is none. Cached, so that a compiler that fails runs once and not for every model."""
    try:
        wanted = build()
        loaded = _prebuilt(wanted) or _compiled(wanted)
    except NativeUnavailable as error:
        return str(error)
    except OSError as error:
        return f"the compiled CPU kernels cannot be loaded: {error}"
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
        if result is Status:
            function.errcheck = _check
    return loaded


def _check(status: Status, _function: object, _arguments: tuple[object, ...]) -> None:
    if status.value:
        raise MemoryError(
            "there is no memory for what the CPU kernels compute with; lower max_num_batched_tokens, max_num_seqs or "
            "kv_cache_bytes"
        )


def unavailable() -> str | None:
    """Why the kernels cannot be used here, in one line; None when they can."""
    loaded = _load()
    return loaded if isinstance(loaded, str) else None


def instructions() -> str:
    """The processor's instructions that the kernels use, as messages say it: 'AVX-512 VNNI'."""
    name: bytes = library().slipstream_instructions()
    return name.decode()


def has_bfloat16_tiles() -> bool:
    """Whether the arithmetic of `fast_prompts` is faster here: the build, the processor and the system have AMX."""
    return bool(library().slipstream_has_bfloat16_tiles())


def empty_rows(*shape: int) -> Tensor:
    """An uninitialised output of the kernels: float32 on the CPU, whatever PyTorch's defaults are."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def fingerprint() -> str:
    """Changes with the build and the sources of the kernels, and with what the system permits: profiles of others do
    not hold."""
    wanted = build()
    return f"{wanted.name} {wanted.fingerprint} ({instructions()})"


def _prebuilt(wanted: Build) -> ctypes.CDLL | None:
    """The library that came with the package; None where there is none of these sources, or it does not load here."""
    file = builds.PREBUILT / wanted.file_name
    if not file.is_file():
        return None
    try:
        return ctypes.CDLL(str(file))
    except OSError as error:  # of another C library, or an older one
        log.info("the CPU kernels that came with the package do not load here (%s): compiling them", error)
        return None


def _compiled(wanted: Build) -> ctypes.CDLL:
    """The library that this compiler makes of these sources, compiled unless it is in the cache and loads.

    Where there is no compiler, one of the cache that another has made. Raises `NativeUnavailable` without any.
    """
    folder = cache_folder()
    try:
        compiler = builds.compiler(os.environ.get("CXX"))
    except LookupError as error:
        kept = _kept(folder, f"{wanted.stem}-*.so")
        if kept is None:
            raise NativeUnavailable(str(error)) from None
        return kept
    stem = f"{wanted.stem}-{builds.compiler_key(compiler)}"
    kept = _kept(folder, f"{stem}-*.so")
    if kept is not None:
        return kept
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = _compile(wanted, compiler, folder, stem)
    except OSError as error:
        log.warning(
            "the compiled CPU kernels cannot be kept in %s (%s), so every start compiles them; set SLIPSTREAM_CACHE to "
            "a folder that can be written",
            folder,
            error.strerror,
        )
        file = _compile(wanted, compiler, Path(tempfile.mkdtemp(prefix="slipstream-")), stem)
    return ctypes.CDLL(str(file))


def _kept(folder: Path, pattern: str) -> ctypes.CDLL | None:
    """The first of these libraries that is as it was compiled and loads here; None where none is.

    A damaged one might crash the process as it is loaded, so that its name says what it holds.
    """
    for file in sorted(folder.glob(pattern)):
        try:
            if not file.stem.endswith(f"-{library_digest(file)}"):
                raise OSError("it is damaged")
            return ctypes.CDLL(str(file))
        except OSError as error:  # as with another C library
            log.info("the compiled CPU kernels in %s do not load (%s)", file, error)
    return None


def _compile(wanted: Build, compiler: list[str], folder: Path, stem: str) -> Path:
    """The new library in `folder`."""
    with tempfile.TemporaryDirectory(dir=folder) as own:
        log.warning("compiling the CPU kernels, once; this takes some seconds")
        built = Path(own) / f"{stem}.so"
        done = subprocess.run(wanted.command(compiler, built), capture_output=True, text=True, check=False)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
            reason = lines[0] if lines else f"exit status {done.returncode}"
            raise NativeUnavailable(f"{compiler[0]} could not build the CPU kernels: {reason}")
        # Atomic: another process may be doing the same.
        return built.replace(folder / f"{stem}-{library_digest(built)}.so")


def library_digest(file: Path) -> str:
    """Return the digest of a kept library's contents, the last part of its name."""
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]
