"""Formats in which the weights of linear layers are held: how many bytes, how they are packed, read back and checked.

A format is a subclass of `WeightFormat`. `quantization` names one, and so does `--spec self:NAME`. A package adds a
format with one line of its own `pyproject.toml`:

    [project.entry-points."slipstream.weight_formats"]
    my_format = "my_package.module:MyFormat"

Without packaging the name may be "my_package.module:MyFormat" itself, or a script calls `WEIGHT_FORMATS.register`.

What a pass of many rows costs follows from two numbers of a format: the bytes that a pass reads (`bytes_per_weight`,
`bytes_per_output`), and the rate of its products, which `slipstream.profiling` measures over `forms`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import nn

from slipstream.errors import ConfigError
from slipstream.models.cpu.kernel import Kernel
from slipstream.models.cpu.native import unavailable
from slipstream.models.linear.layers import NativeLinear, PackedLinear
from slipstream.registry import Registry

UNCHANGED = "float32"
"""The format of weights that no `quantization` was given for and that the checkpoint does not store in 16 bits."""

OF_DTYPE = {torch.float32: UNCHANGED, torch.bfloat16: "bfloat16", torch.float16: "float16"}
"""The formats that `dtype` names: they hold a checkpoint's own numbers, or those rounded once."""


class WeightFormat(ABC):
    """One way to hold the weights of linear layers, whose inputs and outputs are float32."""

    summary: ClassVar[str]
    """In a few words: '8-bit integers'."""
    bytes_per_weight: ClassVar[float]
    """Bytes that one weight takes, without scales: 4 for float32, 0.5 for 4 bits."""
    bytes_per_output: ClassVar[float] = 0.0
    """Scales and the like, for each row of a weight [out, in]."""
    weight_error: ClassVar[float | None] = None
    """None where the numbers are the checkpoint's. Otherwise how far rounding may put the products of half of a layer's
    outputs off, relative to their size, with rows that are not rounded: some times what is usual."""
    stored_dtype: ClassVar[torch.dtype | None] = None
    """For a format that is one of PyTorch's types: a checkpoint's weights of this type are kept as they are stored, and
    others are rounded to it when they are loaded, before anything is compared with them. None for the others."""
    head: ClassVar[str | None] = None
    """The format of the output layer; None: this one too."""
    kernel: ClassVar[Kernel | None] = None
    """How the native CPU kernels hold such weights; None where they cannot."""
    devices: ClassVar[frozenset[str]] = frozenset({"cpu"})
    """Types of `torch.device` that have this format in any executor."""
    in_decoder: ClassVar[bool] = False
    """Whether the fused decoder of a GPU has it too, with rows of any type (`DeviceWeight.holds`)."""

    name: str = ""
    """The name it was found by."""

    @abstractmethod
    def pack_torch(self, linear: nn.Linear) -> PackedLinear:
        """The layer in PyTorch's operators, without a reference to the weight of `linear`.

        A row's output must not depend on the other rows of the pass.
        """

    def torch_unavailable(self) -> str | None:
        """Why `pack_torch` cannot be used on this machine, in one line; None where it can."""
        return None

    def check(self, device: torch.device, dtype: torch.dtype, decodes: bool = False) -> None:
        """Raise `ConfigError` where weights that are loaded as `dtype` on `device` cannot be held in this format;
        `decodes` says whether the fused decoder of a GPU computes the model."""
        if decodes and self.in_decoder:
            return
        if device.type not in self.devices:
            where = "the CPU" if self.devices == {"cpu"} else " or ".join(sorted(self.devices))
            also = " and for models that a GPU's fused decoder computes" if self.in_decoder else ""
            raise ConfigError(
                f"quantization {self.name!r} is for {where}{also}; on {device.type} leave it out"
            )
        if dtype != torch.float32:
            name = str(dtype).removeprefix("torch.")
            raise ConfigError(
                f"quantization {self.name!r} computes in float32; leave dtype at auto, it is {name}"
            )

    def pack(self, linear: nn.Linear, native: bool) -> PackedLinear:
        """The layer in the native kernels where they are wanted and have this format, else in PyTorch's operators."""
        if native and self.kernel is not None:
            return NativeLinear(linear, self.kernel)
        return self.pack_torch(linear)

    def of_head(self) -> WeightFormat:
        """What holds the output layer, and with it an embedding that is tied to it."""
        return self if self.head is None else weight_format(self.head)

    def forms(self, linear: nn.Linear) -> list[PackedLinear]:
        """The layer in every form that this machine has."""
        native = [True] if self.kernel is not None and unavailable() is None else []
        torch_form = [False] if self.torch_unavailable() is None else []
        return [self.pack(linear, kind) for kind in native + torch_form]

    def num_bytes(self, num_weights: int, num_outputs: int = 0) -> int:
        """Bytes of so many weights, padding left out."""
        return round(num_weights * self.bytes_per_weight + num_outputs * self.bytes_per_output)


WEIGHT_FORMATS = Registry[WeightFormat](
    "weight format",
    WeightFormat,  # type: ignore[type-abstract]
    "slipstream.weight_formats",
    {
        "float32": "slipstream.models.linear.float32:Float32",
        "bfloat16": "slipstream.models.linear.sixteen_bits:Bfloat16",
        "float16": "slipstream.models.linear.sixteen_bits:Float16",
        "int8": "slipstream.models.linear.int8:Int8",
        "int4": "slipstream.models.linear.int4:Int4",
        "int4_g64": "slipstream.models.linear.int4:Int4Groups64",
        "int4_g128": "slipstream.models.linear.int4:Int4Groups128",
    },
)
"""`WEIGHT_FORMATS.register(name, cls)` adds one for this process."""


def check_quantization(name: str | None, what: str = "") -> None:
    """Raise `ConfigError` unless `name`, an option of `what`, is None or a weight format, and name all that there are:
    what looks nearest, as int8 to int3, need not be what is meant."""
    if name is not None and ":" not in name and name not in WEIGHT_FORMATS.names():
        formats = ", ".join(sorted(WEIGHT_FORMATS.names()))
        raise ConfigError(f"unknown {f'{what} quantization'.lstrip()} {name!r}; formats: {formats}")


def weight_format(name: str | None) -> WeightFormat:
    """The format called `name`; `float32` for None. Raises `ConfigError` for an unknown one, and names all."""
    check_quantization(name)
    name = UNCHANGED if name is None else name
    try:
        made = WEIGHT_FORMATS.load(name)()
    except TypeError as error:  # an abstract method is missing
        raise ConfigError(f"weight format {name!r} cannot be made: {error}") from error
    made.name = name
    return made


def checked_format(
    name: str | None, device: torch.device, dtype: torch.dtype, decodes: bool = False
) -> WeightFormat:
    """As `weight_format`; raises `ConfigError` too where weights of `dtype` on `device` cannot be held in it."""
    found = weight_format(name)
    if name is not None:
        found.check(device, dtype, decodes)
    return found
