"""A head's checkpoint: its configuration and tensors, in a folder or on the hub."""

from __future__ import annotations

import json
import pickle
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from slipstream.errors import ModelError

WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")


def read_checkpoint(
    path: str, *, revision: str | None = None, weight_files: tuple[str, ...] = WEIGHT_FILES
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """`config.json` and the tensors of the first of `weight_files` that exists; raises `ModelError`."""
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
    """Write `config.json` and the tensors; each file is replaced atomically."""
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


class HeadCheckpoint:
    """A checkpoint whose tensors must be exactly those of a module."""

    def __init__(self, path: str, weight_files: tuple[str, ...], revision: str | None = None) -> None:
        """Reads the first of `weight_files` that exists; raises `ModelError` where a file is missing or damaged."""
        self.path = path
        self.config, self.tensors = read_checkpoint(path, revision=revision, weight_files=weight_files)

    def size(self, *keys: str, default: int | None = None) -> int:
        """The configuration's value of the first of `keys` that it has; raises `ModelError` unless it is an int ≥ 0."""
        value = next((self.config[key] for key in keys if self.config.get(key) is not None), default)
        if type(value) is not int or value < 0:
            self.refuse(
                f"has no {keys[0]} in its config.json" if value is None else f"has {keys[0]} {value!r}"
            )
        return value

    def length(self, tensor: str) -> int:
        """Number of rows of a tensor, for sizes that a configuration omits; raises `ModelError` if it is missing."""
        if tensor not in self.tensors:
            self.refuse(f"lacks the tensor {tensor}")
        return len(self.tensors[tensor])

    def rename(self, usual: Callable[[str], str]) -> None:
        """Rename every tensor by `usual`."""
        self.tensors = {usual(name): tensor for name, tensor in self.tensors.items()}

    def load_into(self, module: nn.Module, names: Mapping[str, str]) -> None:
        """Copy the tensors into `module`; `names` maps each entry of its state to the file's name for it.

        Raises `ModelError` for tensors that are missing, unknown or of another shape, naming the first one.
        """
        state = module.state_dict()
        expected = {names[name]: tensor.shape for name, tensor in state.items()}
        present = {name: tensor.shape for name, tensor in self.tensors.items()}
        if missing := sorted(expected.keys() - present.keys()):
            self.refuse(f"lacks the tensor {_first_of(missing)}")
        if unknown := sorted(present.keys() - expected.keys()):
            self.refuse(f"has an unknown tensor: {_first_of(unknown)}")
        for name in sorted(expected):
            if expected[name] != present[name]:
                self.refuse(f"has {name} of shape {list(present[name])}, not {list(expected[name])}")
        module.load_state_dict({name: self.tensors[names[name]] for name in state})

    def refuse(self, why: str) -> NoReturn:
        """Raise `ModelError` for this checkpoint, with the reason."""
        raise ModelError(f"the heads {self.path!r}: the checkpoint {why}")


def _first_of(names: list[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _folder(path: str, revision: str | None, weight_files: tuple[str, ...]) -> Path:
    if Path(path).is_dir():
        return Path(path)
    if path.startswith((".", "/", "~")):
        raise ModelError(f"there is no folder {path!r}")
    try:
        return Path(snapshot_download(path, revision=revision, allow_patterns=["config.json", *weight_files]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelError(f"{path!r} is neither a folder nor a head on the hub: {reason}") from None
