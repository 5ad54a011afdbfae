"""Configuration and tensors of a head, in a folder or on the hub."""

from __future__ import annotations

import json
import pickle
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream.errors import ModelError

WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")


def read_checkpoint(
    path: str, *, revision: str | None = None, weight_files: tuple[str, ...] = WEIGHT_FILES
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """`config.json` and the tensors of the first of `weight_files` that is there; raises `ModelError`."""
    folder = _folder(path, revision, weight_files)
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(
            f"{path!r} has no config.json; a head is a folder with config.json and weights"
        ) from None
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read the configuration of {path!r}: {error}") from None
    if not isinstance(config, dict):
        raise ModelError(f"the configuration of {path!r} is not a JSON object")
    file = next((folder / name for name in weight_files if (folder / name).is_file()), None)
    if file is None:
        raise ModelError(f"{path!r} has no weights: none of {', '.join(weight_files)}")
    try:
        if file.suffix == ".safetensors":
            tensors = load_file(file)
        else:
            tensors = torch.load(file, map_location="cpu", weights_only=True)
    except (
        OSError,
        RuntimeError,
        SafetensorError,
        ValueError,
        EOFError,
        pickle.UnpicklingError,
    ) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(f"cannot read {str(file)!r}: {reason}") from None
    if not isinstance(tensors, dict) or not all(isinstance(t, Tensor) for t in tensors.values()):
        raise ModelError(f"{str(file)!r} is not a mapping of names to tensors")
    return config, tensors


def write_checkpoint(
    folder: str | Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    weight_file: str = WEIGHT_FILES[0],
) -> None:
    """Write `config.json` and the tensors; each file appears whole or not at all."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with tempfile.TemporaryDirectory(dir=folder) as parts:
        weights, configuration = Path(parts) / weight_file, Path(parts) / "config.json"
        if weights.suffix == ".safetensors":
            save_file(contiguous, weights, metadata={"format": "pt"})
        else:
            torch.save(contiguous, weights)
        configuration.write_text(json.dumps(dict(config), indent=2, sort_keys=True) + "\n", encoding="utf-8")
        for file in (weights, configuration):
            file.replace(folder / file.name)


def _folder(path: str, revision: str | None, weight_files: tuple[str, ...]) -> Path:
    if Path(path).is_dir():
        return Path(path)
    if path.startswith((".", "/", "~")):
        raise ModelError(f"there is no folder {path!r}")
    try:
        return Path(snapshot_download(path, revision=revision, allow_patterns=["config.json", *weight_files]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelError(f"there is no folder {path!r}, and the hub has no such head: {reason}") from None
