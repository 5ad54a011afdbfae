"""The weights of a GGUF file in PyTorch, for the types that this target's file has: F32, Q8_0 and Q4_1.

It reads the format by itself, so that a machine with nothing but PyTorch and Transformers can run the recipe.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

EOS = "tokenizer.ggml.eos_token_id"
"""The field that names the token at which an answer ends."""
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _LIST = 8, 9
_F32, _Q4_1, _Q8_0 = 0, 3, 8
_BLOCK = 32
"""Weights that share a scale."""
_BLOCK_BYTES = {_F32: 4 * _BLOCK, _Q4_1: 2 + 2 + _BLOCK // 2, _Q8_0: 2 + _BLOCK}
_ALIGNMENT = 32


def read_gguf(parts: Sequence[Path]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The fields, and the weights in float32, [outputs, inputs], of a file that may come in several parts.

    Raises `ValueError` for another format or type of weight.
    """
    whole = np.concatenate([np.fromfile(part, np.uint8) for part in parts])
    file = io.BytesIO(whole.tobytes())
    magic, version, num_tensors, num_fields = struct.unpack("<4sIQQ", file.read(24))
    if magic != b"GGUF" or version != 3:
        raise ValueError(f"{parts[0].name} is not a GGUF file of version 3")
    fields = {}
    for _ in range(num_fields):
        name = _text(file)
        fields[name] = _value(file, *struct.unpack("<I", file.read(4)))
    infos = [_info(file) for _ in range(num_tensors)]
    data = whole[-(-file.tell() // _ALIGNMENT) * _ALIGNMENT :]
    return fields, {name: _widened(data, name, shape, kind, at) for name, shape, kind, at in infos}


def _text(file: BinaryIO) -> str:
    (length,) = struct.unpack("<Q", file.read(8))
    return file.read(length).decode()


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == _TEXT:
        return _text(file)
    if kind == _LIST:
        of, length = struct.unpack("<IQ", file.read(12))
        return [_value(file, of) for _ in range(length)]
    code = "<" + _SCALARS[kind]
    return struct.unpack(code, file.read(struct.calcsize(code)))[0]


def _info(file: BinaryIO) -> tuple[str, list[int], int, int]:
    """Name, shape from the outermost dimension on, type, and place in the data."""
    name = _text(file)
    (num_dimensions,) = struct.unpack("<I", file.read(4))
    shape = struct.unpack(f"<{num_dimensions}Q", file.read(8 * num_dimensions))
    return name, list(reversed(shape)), *struct.unpack("<IQ", file.read(12))


def _widened(data: np.ndarray, name: str, shape: list[int], kind: int, offset: int) -> Tensor:
    if kind not in _BLOCK_BYTES:
        raise ValueError(f"{name} has the type {kind}; this recipe reads F32 (0), Q4_1 (3) and Q8_0 (8)")
    num_blocks = -(-int(np.prod(shape)) // _BLOCK)
    if kind == _F32:
        values = np.array(data[offset : offset + 4 * int(np.prod(shape))].view("<f4"))
        return torch.from_numpy(values).reshape(shape)
    rows = np.array(data[offset : offset + num_blocks * _BLOCK_BYTES[kind]]).reshape(num_blocks, -1)
    scales = torch.from_numpy(rows[:, :2].copy().view("<f2").astype(np.float32))
    if kind == _Q8_0:
        return (scales * torch.from_numpy(rows[:, 2:].view(np.int8).astype(np.float32))).reshape(shape)
    lows = torch.from_numpy(rows[:, 2:4].copy().view("<f2").astype(np.float32))
    codes = torch.from_numpy(np.concatenate([rows[:, 4:] & 15, rows[:, 4:] >> 4], axis=1).astype(np.float32))
    return (scales * codes + lows).reshape(shape)
