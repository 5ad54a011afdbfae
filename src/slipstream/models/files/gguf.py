"""GGUF files: the keys and the places of the tensors, read without touching the tensors themselves.

llama.cpp's own Python package takes what a header says at its word: one that is damaged keeps it busy for ever, or
fills the memory. Here every length is held against what is left of the file before anything is made of it, and against
bounds that no real file comes near.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.core.model_path import gguf_parts
from slipstream.errors import ModelError
from slipstream.models.files.block_formats import FORMATS, QUANTISED, BlockFormat, format_name

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_HEADER = 2**28
"""Bytes: ten times what the largest vocabularies take."""
_MAX_STRING = 2**24
_MAX_ITEMS = 2**22
"""Items of an array, at most; the longest are lists of merges, some hundred thousand."""
_MAX_ITEMS_TOGETHER = 2**23
"""Items of all arrays, at most: a number takes ten times as much in Python as in a file."""
_MAX_DIMENSIONS = 4
_MAX_NAME = 128
"""Characters; llama.cpp's names of tensors have half as many."""

_NUMBERS = {
    **{0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"},
}
"""A value's type to how `struct` reads it. The others are strings and arrays."""
_BOOL, _STRING, _ARRAY = 7, 8, 9


class _Damaged(Exception):
    """What is wrong with a header."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor in a file, not read yet."""

    name: str
    shape: tuple[int, ...]
    """As PyTorch has it: the last dimension is contiguous."""
    format: BlockFormat
    raw: Tensor
    """uint8 [rows, bytes of a row], mapped from the file: rows are those of the last dimension."""
    expert: int | None = None
    """Which of a stack of matrices this is; None for a tensor as the file has it."""

    def numbers(self) -> Tensor:
        """A tensor of plain numbers in its own type, mapped from the file."""
        assert self.format.dtype is not None
        return self.raw.view(-1).view(self.format.dtype).view(self.shape)

    def widened(self) -> Tensor:
        """As `numbers`; of a quantised tensor, its numbers as float32."""
        if self.format.dtype is not None:
            return self.numbers()
        return self.format.read(self.raw).widened().view(self.shape)


@dataclass(frozen=True, slots=True)
class Gguf:
    """What is in a GGUF file, or in all parts of one."""

    path: str
    """Of the first part."""
    fields: Mapping[str, Any]
    """Keys to numbers, strings, or lists of these."""
    tensors: Mapping[str, GgufTensor]
    """Those of the model. Its fields count its layers only."""
    prediction: Mapping[str, GgufTensor] = field(default_factory=dict)
    """Those of layers for multi-token prediction, which lie behind the model's."""

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the model's family."""
        return str(self.fields.get("general.architecture", ""))


def open_gguf(path: str) -> Gguf:
    """Map a GGUF file, or all parts of a model of which it is one, and read the headers, not the tensors themselves.

    Raises `ModelError`, in one line, for a file that is none, is damaged or cut short, or holds a type of tensor that
    is not read here, and for a part that is missing.
    """
    names = gguf_parts(path)
    for name in (path, *names):
        if not Path(name).is_file():
            of = (
                ""
                if name == path
                else f": it is part {names.index(name) + 1} of the {len(names)} of {path!r}"
            )
            raise ModelError(f"there is no file {name!r}{of}")
    parts = [_open_part(name, number, len(names)) for number, name in enumerate(names)]
    first = parts[0]
    try:
        tensors = _together(parts)
        return _without_prediction(Gguf(first.path, first.fields, tensors))
    except _Damaged as error:
        raise ModelError(f"{first.path!r} {error}") from None


def _open_part(path: str, number: int, count: int) -> Gguf:
    """One of `count` files that hold a model; raises `ModelError`."""
    try:
        with Path(path).open("rb") as stream:
            mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:  # an empty file cannot be mapped
        raise ModelError(f"{path!r} is no GGUF file: {error}") from None
    try:
        found = _read(mapped, path)
        says = found.fields.get("split.count", 1), found.fields.get("split.no", 0)
        if says != (count, number) and not (count == 1 and says[0] in (0, 1)):
            named = (
                f"by its name it is part {number + 1} of {count}" if count > 1 else "its name says of none"
            )
            which = says[1] + 1 if type(says[1]) is int else says[1]
            raise _Damaged(
                f"says that it is part {which!r:.20} of {says[0]!r:.20}, and {named}; parts are called "
                "NAME-00001-of-00003.gguf"
            )
    except _Damaged as error:
        raise ModelError(f"{path!r} {error}") from None
    return found


def _together(parts: Sequence[Gguf]) -> dict[str, GgufTensor]:
    """The tensors of all parts of a model."""
    tensors: dict[str, GgufTensor] = {}
    for part in parts:
        twice = tensors.keys() & part.tensors.keys()
        if twice:
            raise _Damaged(f"is in parts of which two hold a tensor {min(twice)!r}")
        tensors |= part.tensors
    wanted = parts[0].fields.get("split.tensors.count", len(tensors))
    if len(parts) > 1 and wanted != len(tensors):
        raise _Damaged(f"is in parts that hold {len(tensors)} tensors, and says {wanted!r:.20}")
    return tensors


class _Header:
    """Reads one value after the other. Raises `_Damaged` beyond the end of the header."""

    def __init__(self, mapped: mmap.mmap) -> None:
        self._bytes = memoryview(mapped)[:_MAX_HEADER]
        self.place = 0
        self._num_items = 0
        self.is_whole = len(mapped) <= _MAX_HEADER

    def take(self, num_bytes: int) -> memoryview:
        end = self.place + num_bytes
        if end > len(self._bytes):
            raise _Damaged(
                "is cut short: its header ends in the middle" if self.is_whole else "has a damaged header"
            )
        taken = self._bytes[self.place : end]
        self.place = end
        return taken

    def number(self, kind: str) -> Any:
        return struct.unpack("<" + kind, self.take(struct.calcsize("<" + kind)))[0]

    def string(self) -> str:
        length = self.number("Q")
        if length > _MAX_STRING:
            raise _Damaged(f"has a damaged header: a text of {length} bytes")
        try:
            return str(self.take(length), "utf-8", "strict")
        except UnicodeDecodeError:
            raise _Damaged("has a damaged header: a text that is not UTF-8") from None

    def _strings(self, count: int) -> list[str]:
        """As many strings, in one loop without calls: a tokenizer has hundreds of thousands."""
        data, place, found = self._bytes, self.place, []
        length_at, end = struct.Struct("<Q").unpack_from, len(self._bytes)
        for _ in range(count):
            begin = place + 8
            after = begin + length_at(data, place)[0] if begin <= end else end + 1
            try:
                if after > end or after - begin > _MAX_STRING:
                    raise ValueError
                found.append(str(data[begin:after], "utf-8"))
            except ValueError:  # which one it is, `string` says
                self.place = place
                self.string()
            place = after
        self.place = place
        return found

    def name(self) -> str:
        """Read the name of a key or a tensor: short, and such as can be shown in a message."""
        found = self.string()
        if len(found) > _MAX_NAME or not found.isprintable():
            raise _Damaged(f"has a damaged header: a name of {len(found)} characters, {found!r:.40}")
        return found

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array()
        if kind not in _NUMBERS:
            raise _Damaged(f"has a damaged header: a value of type {kind}")
        found = self.number(_NUMBERS[kind])
        return bool(found) if kind == _BOOL else found

    def _array(self) -> list[Any]:
        kind, count = self.number("I"), self.number("Q")
        self._num_items += count
        if count > _MAX_ITEMS or self._num_items > _MAX_ITEMS_TOGETHER:
            raise _Damaged(f"has a damaged header: a list of {count} values")
        if kind == _STRING:
            return self._strings(count)
        if kind not in _NUMBERS:
            raise _Damaged(f"has a damaged header: a list of values of type {kind}")
        letter = _NUMBERS[kind]
        found = struct.unpack(f"<{count}{letter}", self.take(count * struct.calcsize("<" + letter)))
        return [bool(each) for each in found] if kind == _BOOL else list(found)


def _read(mapped: mmap.mmap, path: str) -> Gguf:
    header = _Header(mapped)
    if mapped[:4] != _MAGIC:
        raise _Damaged("is no GGUF file: it begins otherwise")
    header.take(4)
    version = header.number("I")
    if version not in _VERSIONS:
        swapped = version & 0xFFFF == 0
        what = "in big-endian order" if swapped else f"of GGUF version {version}"
        raise _Damaged(f"is a file {what}; read are little-endian files of versions 2 and 3")
    num_tensors, num_fields = header.number("Q"), header.number("Q")
    fields: dict[str, Any] = {}
    for _ in range(num_fields):  # a wrong number ends with the header, at an entry's some bytes each
        name = header.name()
        if name in fields:
            raise _Damaged(f"has a damaged header: two keys {name!r}")
        fields[name] = header.value(header.number("I"))
    places = [_place(header) for _ in range(min(num_tensors, _MAX_ITEMS + 1))]
    if len(places) > _MAX_ITEMS:
        raise _Damaged(f"has a damaged header: {num_tensors} tensors")
    alignment = fields.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1 or alignment & alignment - 1:
        raise _Damaged(f"has a damaged header: an alignment of {alignment!r}")
    architecture = fields.get("general.architecture", "")
    if not isinstance(architecture, str) or len(architecture) > _MAX_NAME or not architecture.isprintable():
        raise _Damaged(f"has a damaged header: an architecture {architecture!r:.40}")
    begin = -(-header.place // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for place in places:
        if place.name in tensors:
            raise _Damaged(f"has a damaged header: two tensors {place.name!r}")
        tensors[place.name] = place.tensor(mapped, begin, alignment)
    _check_apart(places, tensors)
    return Gguf(path, fields, tensors)


def _without_prediction(file: Gguf) -> Gguf:
    """The same with the last layers apart, as many as the file says are for multi-token prediction."""
    count = file.fields.get(f"{file.architecture}.nextn_predict_layers", 0)
    key = f"{file.architecture}.block_count"
    num_blocks = file.fields.get(key)
    if count == 0 or type(num_blocks) is not int:
        return file
    if type(count) is not int or not 0 < count < num_blocks:
        raise _Damaged(f"says that {count!r:.40} of its {num_blocks} layers are for multi-token prediction")
    first = num_blocks - count
    apart = {name for name in file.tensors if _layer_of(name) in range(first, num_blocks)}
    model = {name: each for name, each in file.tensors.items() if name not in apart}
    prediction = {name: each for name, each in file.tensors.items() if name in apart}
    return Gguf(file.path, {**file.fields, key: first}, model, prediction)


def _layer_of(name: str) -> int:
    """The number of the layer that a tensor belongs to; -1 for one of none."""
    parts = name.split(".")
    return int(parts[1]) if parts[0] == "blk" and len(parts) > 2 and parts[1].isdecimal() else -1


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor is, as the header says."""

    name: str
    shape: tuple[int, ...]
    number: int
    """Number of its type."""
    offset: int

    def tensor(self, mapped: mmap.mmap, begin: int, alignment: int) -> GgufTensor:
        fmt = FORMATS.get(self.number)
        if fmt is None:
            raise _Damaged(
                f"holds {format_name(self.number)} weights ({self.name}), which Slipstream cannot read; read are F32, "
                f"F16, BF16, {', '.join(QUANTISED)}"
            )
        width = self.shape[-1]
        if width % fmt.block_size:
            raise _Damaged(
                f"has a damaged header: {self.name} has rows of {width}, in {fmt.name} blocks of {fmt.block_size}"
            )
        if self.offset % alignment or (begin + self.offset) % (
            1 if fmt.dtype is None else fmt.dtype.itemsize
        ):
            raise _Damaged(f"has a damaged header: {self.name} begins at {self.offset}, between two places")
        num_bytes = fmt.num_bytes(math.prod(self.shape))
        if begin + self.offset + num_bytes > len(mapped):
            raise _Damaged(f"is cut short: its tensor {self.name} lies beyond its end")
        raw = torch.frombuffer(mapped, dtype=torch.uint8, count=num_bytes, offset=begin + self.offset)
        return GgufTensor(self.name, self.shape, fmt, raw.view(-1, fmt.num_bytes(width)))


def _check_apart(places: Sequence[_Place], tensors: Mapping[str, GgufTensor]) -> None:
    """Raise `_Damaged` where two tensors overlap: a small file could hold a model of any size."""
    end, before = 0, ""
    for place in sorted(places, key=lambda place: place.offset):
        if place.offset < end:
            raise _Damaged(f"has a damaged header: its tensors {before} and {place.name} overlap")
        end, before = place.offset + tensors[place.name].raw.numel(), place.name


def _place(header: _Header) -> _Place:
    name, dimensions = header.name(), header.number("I")
    if not 1 <= dimensions <= _MAX_DIMENSIONS:
        raise _Damaged(f"has a damaged header: a tensor of {dimensions} dimensions")
    sizes = struct.unpack(f"<{dimensions}Q", header.take(8 * dimensions))
    if not all(sizes):
        raise _Damaged(f"has a damaged header: {name} is empty")
    return _Place(name, tuple(reversed(sizes)), header.number("I"), header.number("Q"))
