"""The shapes of a head's tensors, read from the header of its file: for planning, without its weights."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import get_safetensors_metadata, hf_hub_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    NotASafetensorsRepoError,
    SafetensorsParsingError,
)
from safetensors import SafetensorError, safe_open
from torch import Tensor

from slipstream.draft.heads.checkpoints import WEIGHT_FILES
from slipstream.errors import ModelError
from slipstream.models.linear.formats import checked_format
from slipstream.models.outline import ModelOutline


def outline_checkpoint(
    path: str, *, revision: str | None = None, weight_files: tuple[str, ...] = WEIGHT_FILES
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """As `read_checkpoint`, but the tensors have shapes only; of a head on the hub the header alone is read."""
    folder = Path(path)
    if not folder.is_dir():
        return _of_hub(path, revision)
    file = next((folder / name for name in weight_files if (folder / name).is_file()), None)
    if file is None or not (folder / "config.json").is_file():
        raise ModelError(f"{path!r} is no head: it needs config.json and one of {', '.join(weight_files)}")
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        tensors = _header(file) if file.suffix == ".safetensors" else _pickled(file)
    except (OSError, RuntimeError, ValueError, EOFError, SafetensorError, pickle.UnpicklingError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(f"cannot read the head {path!r}: {reason}") from None
    return _object(config, path), tensors


def held_bytes(tensors: Mapping[str, Tensor], target: ModelOutline, quantization: str | None) -> int:
    """Bytes of a head's floating-point tensors once it is packed for `target`; see `head_eager.pack_beside`."""
    fmt = target.weight_format
    if quantization is not None:
        fmt = checked_format(quantization, target.device, target.dtype)
    weights = [tensor for tensor in tensors.values() if tensor.is_floating_point()]
    if not target.packs:
        return sum(weight.numel() * target.dtype.itemsize for weight in weights)
    return sum(
        fmt.num_bytes(weight.numel(), len(weight)) if weight.ndim == 2 else 4 * weight.numel()
        for weight in weights
    )


def stored_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Bytes of the tensors in their file."""
    return sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors.values())


def _header(file: Path) -> dict[str, Tensor]:
    with safe_open(file, framework="pt") as opened:
        slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118, it is no mapping
        return {name: _shaped(part.get_shape(), part.get_dtype()) for name, part in slices.items()}


def _shaped(shape: Seq[int], kind: str) -> Tensor:
    return torch.empty(tuple(shape), dtype=_SAFETENSORS_TYPES.get(kind, torch.float32), device="meta")


def _pickled(file: Path) -> dict[str, Tensor]:
    tensors = torch.load(file, map_location="meta", weights_only=True)
    if not isinstance(tensors, dict) or not all(isinstance(each, Tensor) for each in tensors.values()):
        raise ValueError(f"{file.name} is not a mapping of names to tensors")
    return tensors


def _of_hub(path: str, revision: str | None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        config = json.loads(Path(hf_hub_download(path, "config.json", revision=revision)).read_text())
        found = get_safetensors_metadata(path, revision=revision)
    except (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        NotASafetensorsRepoError,
        SafetensorsParsingError,
        OSError,
        ValueError,
    ) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"{path!r} is neither a folder nor a head on the hub that can be read: {reason}"
        ) from None
    return _object(config, path), {
        name: _shaped(info.shape, info.dtype)
        for file in found.files_metadata.values()
        for name, info in file.tensors.items()
    }


def _object(config: Any, path: str) -> dict[str, Any]:
    if not isinstance(config, dict):
        raise ModelError(f"the configuration of {path!r} is not a JSON object")
    return config


_SAFETENSORS_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
