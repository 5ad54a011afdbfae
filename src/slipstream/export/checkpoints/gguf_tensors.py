"""Tensors as GGUF files hold them, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.errors import ModelError
from slipstream.export.checkpoints.gguf_package import gguf_package


def add_tensor(writer: Any, name: str, tensor: Tensor) -> None:
    """Add a tensor to a `gguf.GGUFWriter`: matrices in their own dtype, vectors in float32.

    llama.cpp multiplies and adds vectors in float32 only; every 16-bit number is also a float32 number.
    """
    kinds = gguf_package().GGMLQuantizationType
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype.is_floating_point and (tensor.ndim == 1 or tensor.dtype == torch.float64):
        tensor = tensor.float()
    if tensor.dtype == torch.bfloat16:  # numpy has none
        writer.add_tensor(name, tensor.view(torch.uint8).numpy(), raw_dtype=kinds.BF16)
    else:
        writer.add_tensor(name, tensor.numpy())


def read_tensors(reader: Any, path: str) -> dict[str, Tensor]:
    """All tensors of a `gguf.GGUFReader`, copied; raises `ModelError` for quantised ones."""
    kinds = gguf_package().GGMLQuantizationType
    tensors = {}
    for entry in reader.tensors:
        if entry.tensor_type == kinds.BF16:
            bits = torch.from_numpy(np.ascontiguousarray(entry.data).view(np.uint8).copy())
            tensor = bits.view(torch.bfloat16).reshape([int(n) for n in reversed(entry.shape)])
        elif entry.tensor_type in (kinds.F32, kinds.F16, kinds.I64, kinds.I32):
            tensor = torch.from_numpy(np.array(entry.data))
        else:
            raise ModelError(
                f"{path!r} holds {entry.tensor_type.name} weights, which were rounded; import the checkpoint that it "
                "was made from, or a GGUF file in F32, F16 or BF16"
            )
        tensors[str(entry.name)] = tensor
    return tensors


def neighbouring(weight: Tensor, heads: int) -> Tensor:
    """Rows of a query or key projection in llama.cpp's order for Llamas: [heads * dim, ...], the same shape.

    Transformers rotates the first half of a head with the second, llama.cpp neighbours.
    """
    dim = len(weight) // heads
    return weight.reshape(heads, 2, dim // 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def halves(weight: Tensor, heads: int) -> Tensor:
    """The way back of `neighbouring`."""
    dim = len(weight) // heads
    return weight.reshape(heads, dim // 2, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)
