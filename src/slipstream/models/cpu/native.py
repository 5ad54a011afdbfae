"""The CPU kernels in `kernels/`, loaded in the build that this processor runs fastest (`builds.py`).

A wheel has them compiled. Elsewhere they are compiled once, on the user's machine, and cached: they are plain C++
without dependencies, and take some seconds. Where there is no compiler either the engine runs on PyTorch's operators
instead (`models.linear`); `unavailable` says why.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import mmap
import os
import subprocess
import sys
import tempfile
from ctypes import (
    POINTER,
    Structure,
    c_char_p,
    c_double,
    c_float,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_void_p,
)
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from slipstream.config import cache_folder
from slipstream.errors import ConfigError
from slipstream.models.cpu import builds, threads
from slipstream.models.cpu.builds import Build

log = logging.getLogger(__name__)

TABLE_KINDS = {torch.float32: 0, torch.bfloat16: 2, torch.float16: 3}
"""`WeightKind` of a table that is no format's: an embedding, row by row."""

SLICE_WEIGHTS = 2**22
"""How many weights are converted and packed at a time, where one layer has more."""


class NativeUnavailable(RuntimeError):
    """The kernels cannot be used here; the message says why, in one line."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """How linear.h holds and multiplies the weights of one format."""

    kind: int
    """Its number in `WeightKind`."""
    pack: str
    """The function that packs a weight: (weight, in, out, panels, threads), and where there are scales (weight, in,
    out, panels, scales, sums, threads)."""
    bytes_per_weight: float
    bytes_per_output: float = 0.0
    """Of a float32 scale and an int32 sum an output; 0 where the format has none."""
    dtype: torch.dtype = torch.float32
    """Of the weights that `pack` reads; others are converted."""

    @property
    def has_scales(self) -> bool:
        return self.bytes_per_output > 0


ENTRY_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}
"""How the kernels number the types of cache entries: `EntryType` of entries.h."""


class LinearStruct(Structure):
    """`Linear` of linear.h."""

    _fields_ = (
        ("kind", c_int32),
        ("in_features", c_int32),
        ("out_features", c_int32),
        ("unused", c_int32),
        ("panels", c_void_p),
        ("scales", c_void_p),
        ("sums", c_void_p),
        ("bias", c_void_p),
    )


class LayerStruct(Structure):
    """`Layer` of decoder.h."""

    _fields_ = (
        ("attention_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("qkv", LinearStruct),
        ("output", LinearStruct),
        ("gate_up", LinearStruct),
        ("down", LinearStruct),
        ("sliding_window", c_int64),
    )


class ModelStruct(Structure):
    """`Model` of decoder.h."""

    _fields_ = (
        *((name, c_int32) for name in ("num_layers", "hidden", "num_heads", "num_kv_heads")),
        *((name, c_int32) for name in ("head_dim", "rotary_dim", "intermediate", "vocab")),
        *((name, c_float) for name in ("norm_epsilon", "attention_scale", "rotary_scale")),
        ("embedding_kind", c_int32),
        ("inverse_frequencies", c_void_p),
        ("embedding", c_void_p),
        ("final_norm", c_void_p),
        ("head", LinearStruct),
        ("layers", POINTER(LayerStruct)),
    )


class BatchStruct(Structure):
    """`Batch` of decoder.h."""

    _fields_ = (
        *((name, c_int32) for name in ("num_rows", "num_logit_rows", "num_taps", "num_layers")),
        *((name, c_void_p) for name in ("token_ids", "positions", "slots")),
        *((name, c_void_p) for name in ("run_begin", "run_length", "tail_begin")),
        *((name, c_void_p) for name in ("tail_slots", "tail_positions", "logit_rows")),
        *((name, c_void_p) for name in ("keys", "values", "tap_layers", "taps", "logits", "layers")),
        *((name, c_int64) for name in ("num_slots", "entry_type")),
        *((name, c_void_p) for name in ("key_scales", "value_scales")),
    )


class EagleStruct(Structure):
    """`Eagle` of eagle.h."""

    _fields_ = (
        ("model", ModelStruct),
        ("embedder", POINTER(ModelStruct)),
        ("fc", LinearStruct),
        ("embedding_norm", c_void_p),
        ("token_ids", c_void_p),
        ("residual_is_normed", c_int64),
    )


class StatesStruct(Structure):
    """`States` of eagle.h."""

    _fields_ = (("given", c_void_p), ("made", c_void_p), ("from_target", c_int64))


class BlockStruct(Structure):
    """`Block` of heads.h."""

    _fields_ = (("linear", LinearStruct), ("shortcut", LinearStruct))


class HeadsStruct(Structure):
    """`Heads` of heads.h."""

    _fields_ = (
        *((name, c_int32) for name in ("num_heads", "num_blocks", "hidden", "vocab")),
        ("blocks", POINTER(BlockStruct)),
        ("outputs", POINTER(LinearStruct)),
        ("shared", c_int64),
    )


class HeadRowsStruct(Structure):
    """`HeadRows` of heads.h."""

    _fields_ = (
        *((name, c_int32) for name in ("n", "first", "count", "unused")),
        ("rows", c_void_p),
        ("logits", c_void_p),
    )


class DrawingStruct(Structure):
    """`Drawing` of draw.h."""

    _fields_ = (
        *((name, c_double) for name in ("min_p", "top_p", "least_confidence")),
        ("temperature", c_float),
        ("top_k", c_int32),
        ("noisy", c_int64),
    )


class ChainsStruct(Structure):
    """`Chains` of chain.h."""

    _fields_ = (
        *((name, c_int32) for name in ("depth", "num_tokens")),
        *((name, c_void_p) for name in ("lengths", "drawings", "keys", "confidences", "token_ids")),
    )


_SIGNATURES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "slipstream_instructions": (c_char_p, ()),
    "slipstream_panel": (c_int, ()),
    "slipstream_padded_out": (c_int, (c_int,)),
    "slipstream_packed_bytes": (c_size_t, (c_int, c_int, c_int)),
    "slipstream_multiply": (None, (c_void_p, c_void_p, c_int, c_void_p, c_int)),
    "slipstream_unpack": (None, (c_void_p, c_void_p, c_int, c_void_p)),
    "slipstream_new_scratch": (c_void_p, ()),
    "slipstream_free_scratch": (None, (c_void_p,)),
    "slipstream_forward": (None, (c_void_p, c_void_p, c_void_p, c_int)),
    "slipstream_draft": (None, (c_void_p, c_void_p, c_void_p, c_void_p, c_int)),
    "slipstream_eagle": (None, (c_void_p, c_void_p, c_void_p, c_void_p, c_int)),
    "slipstream_draft_eagle": (None, (c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_int)),
    "slipstream_heads": (None, (c_void_p, c_void_p, c_void_p, c_int)),
    "slipstream_draft_medusa": (None, (c_void_p, c_void_p, c_void_p, c_void_p, c_int)),
    "slipstream_draft_hydra": (None, (*[c_void_p] * 6, c_int)),
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

    Raises `NativeUnavailable`, and `ConfigError` for a build that this processor cannot run.
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
        loaded = _prebuilt(wanted) or ctypes.CDLL(str(_compiled(wanted)))
    except NativeUnavailable as error:
        return str(error)
    except OSError as error:
        return f"the compiled CPU kernels cannot be loaded: {error}"
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded


def unavailable() -> str | None:
    """Why the kernels cannot be used here, in one line; None when they can."""
    loaded = _load()
    return loaded if isinstance(loaded, str) else None


def instructions() -> str:
    """The processor's instructions that the kernels use, as messages say it: 'AVX-512 VNNI'."""
    name: bytes = library().slipstream_instructions()
    return name.decode()


class PackedWeight:
    """One or more weights [out, in], stacked, in the kernels' layout. `struct` is passed to the kernels.

    `interleaved` alternates the panels of two weights of one shape (gate and up), so that one thread computes the
    matching outputs of both.
    """

    def __init__(
        self,
        weights: list[Tensor],
        biases: list[Tensor | None],
        kernel: Kernel,
        interleaved: bool = False,
        give_back: bool = False,
    ) -> None:
        """With `give_back` the pages of a weight that is not stacked are returned to the system as it is packed."""
        self._kernel = kernel
        self.num_weights = sum(weight.numel() for weight in weights)
        self._num_biases = sum(bias.numel() for bias in biases if bias is not None)
        self._num_outputs = sum(len(weight) for weight in weights)
        if interleaved:
            weight, bias = _interleave(weights), None
        else:
            weight = torch.cat(weights) if len(weights) > 1 else weights[0]
            bias = _stacked_bias(weights, biases)
        weight = weight.detach()
        self.out_features, self.in_features = weight.shape
        lib = library()
        shape = (self.in_features, self.out_features)
        padded = lib.slipstream_padded_out(self.out_features)
        num_scales = padded if kernel.has_scales else 0
        self.panels = huge_buffer(lib.slipstream_packed_bytes(kernel.kind, *shape))
        self.scales = empty_rows(num_scales)
        self.sums = torch.empty(num_scales, dtype=torch.int32, device="cpu")
        self.bias = (
            None if bias is None else torch.nn.functional.pad(bias.float(), (0, padded - self.out_features))
        )
        self.num_threads = threads.available()
        for begin in range(0, self.out_features, _slice_length(self.in_features)):
            part = weight[begin : begin + _slice_length(self.in_features)]
            self._pack(part, begin)
            if give_back and len(weights) == 1:
                release(part)
        self.struct = LinearStruct(
            kernel.kind,
            *shape,
            0,
            self.panels.data_ptr(),
            self.scales.data_ptr(),
            self.sums.data_ptr(),
            None if self.bias is None else self.bias.data_ptr(),
        )

    def _pack(self, part: Tensor, first: int) -> None:
        """Pack the outputs from `first` on, a multiple of what threads share out."""
        part = part.to(self._kernel.dtype).contiguous()
        lib = library()
        begin = self.panels[lib.slipstream_packed_bytes(self._kernel.kind, self.in_features, first) :]
        written = [begin]
        if self._kernel.has_scales:
            written += [self.scales[first:], self.sums[first:]]
        getattr(lib, self._kernel.pack)(
            c_void_p(part.data_ptr()),
            c_int(self.in_features),
            c_int(len(part)),
            *(c_void_p(tensor.data_ptr()) for tensor in written),
            c_int(self.num_threads),
        )

    @property
    def least_bytes(self) -> int:
        """Bytes that a product must read: `nbytes` without the padding."""
        weights = self.num_weights * self._kernel.bytes_per_weight
        scales = self._num_outputs * self._kernel.bytes_per_output
        return round(weights + scales) + self._num_biases * torch.float32.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes held, padding included."""
        tensors = (self.panels, self.scales, self.sums, self.bias)
        return sum(int(tensor.nbytes) for tensor in tensors if tensor is not None)

    def multiply(self, rows: Tensor) -> Tensor:
        """float32 [n, in] -> [n, out]; a row's bits do not depend on the others."""
        if rows.dtype != torch.float32 or rows.device.type != "cpu":
            raise TypeError(f"the CPU kernels multiply float32 rows, not {rows.dtype} on {rows.device}")
        rows = rows.contiguous()
        output = empty_rows(len(rows), self.out_features)
        library().slipstream_multiply(
            ctypes.byref(self.struct), rows.data_ptr(), len(rows), output.data_ptr(), self.num_threads
        )
        return output

    def unpack(self, indices: Tensor) -> Tensor:
        """int64 [n] -> float32 [n, in]: these outputs' weights, as `multiply` uses them."""
        indices = indices.contiguous()
        if indices.numel() and not 0 <= int(indices.min()) <= int(indices.max()) < self.out_features:
            raise IndexError(f"rows are numbered 0 to {self.out_features - 1}")
        output = empty_rows(len(indices), self.in_features)
        library().slipstream_unpack(
            ctypes.byref(self.struct), indices.data_ptr(), len(indices), output.data_ptr()
        )
        return output


def _slice_length(in_features: int) -> int:
    """How many outputs of a weight are packed at a time: whole units, some megabytes."""
    unit: int = library().slipstream_padded_out(1)
    return max(SLICE_WEIGHTS // (in_features * unit), 1) * unit


def moved(tensor: Tensor) -> Tensor:
    """A copy of a tensor [n, width], whose own pages are returned to the system as it is made."""
    copy = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    length = max(SLICE_WEIGHTS // tensor.shape[1], 1)
    for begin in range(0, len(tensor), length):
        part = tensor[begin : begin + length]
        copy[begin : begin + length] = part
        release(part)
    return copy


def empty_rows(*shape: int) -> Tensor:
    """An uninitialised output of the kernels: float32 on the CPU, whatever PyTorch's defaults are."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def huge_buffer(num_bytes: int) -> Tensor:
    """uint8 [num_bytes], in large pages where the system grants them. Weights are read from end to end."""
    private = {} if os.name == "nt" else {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}
    memory = mmap.mmap(-1, max(num_bytes, 1), **private)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes)


def release(tensor: Tensor) -> None:
    """Return the pages of a tensor to the system. The tensor must not be read again.

    Weights that are mapped from their file stay in memory until the whole file is closed. Without this the packed
    weights would be held beside all the unpacked ones.
    """
    if sys.platform != "linux" or tensor.device.type != "cpu" or not tensor.is_contiguous():
        return
    begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if end > begin:  # whole pages only: those at the edges may hold other data
        ctypes.CDLL(None).madvise(c_void_p(begin), c_size_t(end - begin), c_int(mmap.MADV_DONTNEED))


def trim_heap() -> None:
    """Return the C library's freed memory to the system, where it can.

    Weights are stacked and converted before they are packed. What that takes is freed layer by layer, but glibc keeps
    it in pieces that the next layer does not fit into: 0.75 GB beside 1.2 GB of weights.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(c_size_t(0))


def packed_bytes(kernel: Kernel, in_features: int, out_features: int) -> tuple[int, int, int]:
    """What `PackedWeight` holds of a weight, padding included: (panels, scales and sums, a bias if it has one)."""
    lib = library()
    padded = lib.slipstream_padded_out(out_features)
    panels = lib.slipstream_packed_bytes(kernel.kind, in_features, out_features)
    return int(panels), int(padded * kernel.bytes_per_output), int(padded * torch.float32.itemsize)


def _interleave(weights: list[Tensor]) -> Tensor:
    """Two weights [out, in] as alternating panels of rows; the last panel of each is padded with zeros."""
    panel = library().slipstream_panel()
    out, in_features = weights[0].shape
    padded = weights
    if out % panel:  # without need it would be a copy
        padded = [torch.nn.functional.pad(weight, (0, 0, 0, -out % panel)) for weight in weights]
    return torch.stack([weight.view(-1, panel, in_features) for weight in padded], dim=1).view(
        -1, in_features
    )


def _stacked_bias(weights: list[Tensor], biases: list[Tensor | None]) -> Tensor | None:
    if all(bias is None for bias in biases):
        return None
    return torch.cat(
        [
            torch.zeros(len(weight), dtype=torch.float32, device="cpu")
            if bias is None
            else bias.detach().float()
            for weight, bias in zip(weights, biases, strict=True)
        ]
    )


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


def _compiled(wanted: Build) -> Path:
    """The shared library for these sources, compiled unless it is in the cache."""
    folder, name = cache_folder(), wanted.file_name
    if (folder / name).is_file():
        return folder / name
    try:
        compiler = builds.compiler(os.environ.get("CXX"))
    except LookupError as error:
        raise NativeUnavailable(str(error)) from None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return _compile(wanted, compiler, folder / name)
    except OSError as error:
        log.warning(
            "the compiled CPU kernels cannot be kept in %s (%s), so every start compiles them; set SLIPSTREAM_CACHE to "
            "a folder that can be written",
            folder,
            error.strerror,
        )
        return _compile(wanted, compiler, Path(tempfile.mkdtemp(prefix="slipstream-")) / name)


def _compile(wanted: Build, compiler: list[str], target: Path) -> Path:
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        log.warning("compiling the CPU kernels, once; this takes some seconds")
        built = Path(folder) / target.name
        done = subprocess.run(wanted.command(compiler, built), capture_output=True, text=True, check=False)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
            reason = lines[0] if lines else f"exit status {done.returncode}"
            raise NativeUnavailable(f"{compiler[0]} could not build the CPU kernels: {reason}")
        built.replace(target)  # atomic: another process may be doing the same
    return target
