"""What a GGUF file holds of a model, its tokenizer apart: sizes, rotary positions, and tensors bit for bit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from slipstream.draft.heads.gguf_heads import SIZES
from slipstream.errors import ConfigError, ModelError
from slipstream.models.files.gguf import Gguf
from slipstream.models.files.gguf_rope import llama3_factors
from slipstream.tools.export.refusals import ExportError


def add_sizes(writer: Any, config: Mapping[str, Any]) -> None:
    """Write a Transformers configuration's sizes; `writer` is a `gguf.GGUFWriter` of the architecture."""
    for key, name in SIZES.items():
        value = config[name]
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"{writer.arch}.{key}", value)
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])


def add_rope(writer: Any, rope: Mapping[str, Any], head_dim: int, name: str) -> Tensor | None:
    """Write the rotary settings; returns the factors that a Llama 3 file holds as the tensor `rope_freqs.weight`.

    Raises `ExportError` for a kind that is not written.
    """
    kind = rope.get("rope_type", "default")
    writer.add_rope_freq_base(float(rope.get("rope_theta", 10000.0)))
    if kind == "default":
        return None
    if kind == "linear":
        writer.add_rope_scaling_type(gguf_package().RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(float(rope["factor"]))
        return None
    if kind == "llama3":
        return llama3_factors(rope, head_dim)
    raise ExportError(
        f"{name!r} has rotary positions of kind {kind!r}; only default, linear and llama3 are written: use "
        "llama.cpp's own convert_hf_to_gguf.py for this model"
    )


def gguf_package() -> Any:
    """llama.cpp's own Python package; raises `ConfigError` where it is not installed."""
    try:
        import gguf
    except ImportError:
        raise ConfigError('GGUF files need the package gguf: pip install "slipstream-llm[export]"') from None
    return gguf


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


def refuse_rounded(file: Gguf) -> None:
    """Raise `ModelError` for a file with quantised tensors."""
    for entry in file.tensors.values():
        if entry.format.dtype is None:
            raise ModelError(
                f"{file.path!r} holds {entry.format.name} weights, which were rounded; import the checkpoint that it "
                "was made from, or a GGUF file in F32, F16 or BF16"
            )


def add_file_type(writer: Any, dtypes: Iterable[torch.dtype]) -> None:
    """Write of which format most of a file is; the matrices have these dtypes."""
    kinds = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
    kind = min(kinds[dtype] for dtype in dtypes)
    name = {"F32": "ALL_F32", "F16": "MOSTLY_F16", "BF16": "MOSTLY_BF16"}[kind]
    writer.add_file_type(getattr(gguf_package().LlamaFileType, name))
