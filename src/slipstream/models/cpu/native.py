"""The CPU kernels in `kernels/`: compiled once on the user's machine, for its instructions, and cached.

They are plain C++ without dependencies, and compile in a few seconds. Where there is no compiler the engine runs on
PyTorch's operators instead (`models.linear`); `unavailable` says why.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import mmap
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from ctypes import POINTER, Structure, c_char_p, c_float, c_int, c_int32, c_int64, c_size_t, c_void_p
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from slipstream.config import cache_folder
from slipstream.models.cpu import threads

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "kernels"
FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-std=c++20", "-fPIC", "-shared", "-pthread")
COMPILERS = ("c++", "g++", "clang++")


class NativeUnavailable(RuntimeError):
    """The kernels cannot be used here; the message says why, in one line."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """How linear.h holds and multiplies the weights of one format."""

    kind: int
    """Its number in `WeightKind`."""
    pack: str
    """The function that packs a weight: (float32 weight, in, out, panels, threads), and where there are scales (weight,
    in, out, panels, scales, sums, threads)."""
    bytes_per_weight: float
    bytes_per_output: float = 0.0
    """Of a float32 scale and an int32 sum an output; 0 where the format has none."""

    @property
    def has_scales(self) -> bool:
        return self.bytes_per_output > 0


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
        ("unused", c_int32),
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
}


def library() -> ctypes.CDLL:
    """The compiled kernels; compiles them when they are not in the cache. Raises `NativeUnavailable`."""
    loaded = _load()
    if isinstance(loaded, str):
        raise NativeUnavailable(loaded)
    return loaded


@functools.cache
def _load() -> ctypes.CDLL | str:
    """The library, or why there is none. Cached, so that a compiler that fails runs once and not for every model."""
    try:
        loaded = ctypes.CDLL(str(_compiled()))
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
    ) -> None:
        self._kernel = kernel
        self.num_weights = sum(weight.numel() for weight in weights)
        self._num_biases = sum(bias.numel() for bias in biases if bias is not None)
        self._num_outputs = sum(len(weight) for weight in weights)
        if interleaved:
            weight, bias = _interleave(weights), None
        else:
            weight = torch.cat(weights) if len(weights) > 1 else weights[0]
            bias = _stacked_bias(weights, biases)
        weight = weight.detach().float().contiguous()
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
        written = [self.panels, self.scales, self.sums] if kernel.has_scales else [self.panels]
        pointers = [c_void_p(tensor.data_ptr()) for tensor in written]
        getattr(lib, kernel.pack)(
            c_void_p(weight.data_ptr()), *map(c_int, shape), *pointers, c_int(self.num_threads)
        )
        self.struct = LinearStruct(
            kernel.kind,
            *shape,
            0,
            self.panels.data_ptr(),
            self.scales.data_ptr(),
            self.sums.data_ptr(),
            None if self.bias is None else self.bias.data_ptr(),
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


def _compiled() -> Path:
    """The shared library for these sources and this machine."""
    name = f"kernels-{fingerprint()}.so"
    folder = cache_folder()
    if (folder / name).is_file():
        return folder / name
    chosen = os.environ.get("CXX")
    command = shlex.split(chosen) if chosen else [next(filter(shutil.which, COMPILERS), "")]
    if not command or shutil.which(command[0]) is None:
        raise NativeUnavailable(
            f"there is no C++ compiler ({chosen or ', '.join(COMPILERS)}) to build the CPU kernels with; install one, "
            "or set CXX"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return _compile(command, folder / name)
    except OSError as error:
        log.warning(
            "the compiled CPU kernels cannot be kept in %s (%s), so every start compiles them; set SLIPSTREAM_CACHE to "
            "a folder that can be written",
            folder,
            error.strerror,
        )
        return _compile(command, Path(tempfile.mkdtemp(prefix="slipstream-")) / name)


def _compile(compiler: list[str], target: Path) -> Path:
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        log.warning("compiling the CPU kernels, once; this takes some seconds")
        built = Path(folder) / target.name
        command = [*compiler, *FLAGS, str(SOURCES / "kernels.cpp"), "-o", str(built)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
            reason = lines[0] if lines else f"exit status {done.returncode}"
            raise NativeUnavailable(f"{compiler[0]} could not build the CPU kernels: {reason}")
        built.replace(target)  # atomic: another process may be doing the same
    return target


@functools.cache
def fingerprint() -> str:
    """Changes with the sources, the flags and the processor's instructions."""
    digest = hashlib.sha256("\0".join(FLAGS).encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.read_bytes())
    digest.update(platform.machine().encode())
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        lines = (line for line in cpuinfo.read_text().splitlines() if line.startswith(("flags", "Features")))
        digest.update(next(lines, "").encode())
    return digest.hexdigest()[:16]
