"""A head's checkpoint: its configuration and tensors, in a folder or on the hub, or their shapes alone for planning."""

from __future__ import annotations

import json
import pickle
import tempfile
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch
from huggingface_hub import get_safetensors_metadata, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    NotASafetensorsRepoError,
    SafetensorsParsingError,
)
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from slipstream.core.model_path import check_model_path, names_gguf
from slipstream.draft.heads.gguf_heads import read_gguf_head
from slipstream.errors import ModelError
from slipstream.models.outline import ModelOutline

WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")


def read_checkpoint(
    path: str, *, revision: str | None = None, weight_files: tuple[str, ...] = WEIGHT_FILES
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """`config.json` and the tensors of the first of `weight_files` that exists, or those of a GGUF file.

    Raises `ModelError`.
    """
    if names_gguf(path):
        return read_gguf_head(path, revision, "cpu")
    config, file = _opened(_folder(path, revision, weight_files), path, weight_files)
    return config, _tensors(file, "cpu")


def outline_checkpoint(
    path: str, *, revision: str | None = None, weight_files: tuple[str, ...] = WEIGHT_FILES
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """As `read_checkpoint`, but the tensors have shapes only; of a folder on the hub the header alone is read."""
    if names_gguf(path):
        return read_gguf_head(path, revision, "meta")
    if not Path(path).is_dir():
        return _outline_of_hub(path, revision)
    config, file = _opened(Path(path), path, weight_files)
    return config, _tensors(file, "meta")


def head_configuration(path: str, revision: str | None) -> dict[str, Any]:
    """`config.json` of a folder or hub id, empty for a GGUF file; raises `ModelError`."""
    return {} if names_gguf(path) else _configuration(_folder(path, revision, ()), path)


def _opened(folder: Path, path: str, weight_files: tuple[str, ...]) -> tuple[dict[str, Any], Path]:
    """The configuration in a folder, and its file with weights."""
    config = _configuration(folder, path)
    file = next((folder / name for name in weight_files if (folder / name).is_file()), None)
    if file is None:
        raise ModelError(f"{path!r} has no weights: none of {', '.join(weight_files)}")
    return config, file


def _configuration(folder: Path, path: str) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(
            f"{path!r} has no config.json; a head is a folder with config.json and weights"
        ) from None
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read the configuration of {path!r}: {error}") from None
    return _object(config, path)


def _tensors(file: Path, device: str) -> dict[str, Tensor]:
    """The tensors of a file; on the device `meta` their shapes, of a safetensors file from its header alone."""
    try:
        if file.suffix != ".safetensors":
            tensors = torch.load(file, map_location=device, weights_only=True)
        elif device == "meta":
            with safe_open(file, framework="pt") as opened:
                parts = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118, it is no mapping
                tensors = {name: _shaped(part.get_shape(), part.get_dtype()) for name, part in parts.items()}
        else:
            tensors = load_file(file)
    except (OSError, RuntimeError, SafetensorError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise ModelError(f"cannot read {str(file)!r}: {_reason(error)}") from None
    if not isinstance(tensors, dict) or not all(isinstance(each, Tensor) for each in tensors.values()):
        raise ModelError(f"{str(file)!r} is not a mapping of names to tensors")
    return tensors


def _reason(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


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


def held_bytes(tensors: Mapping[str, Tensor], target: ModelOutline, quantization: str | None) -> int:
    """Bytes of a head's floating-point tensors once it is packed for `target`; see `head_executor.pack_head`."""
    fmt = target.head_format(quantization)
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
    check_model_path(path)
    try:
        return Path(snapshot_download(path, revision=revision, allow_patterns=["config.json", *weight_files]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelError(f"{path!r} is neither a folder nor a head on the hub: {reason}") from None


def _shaped(shape: Seq[int], kind: str) -> Tensor:
    return torch.empty(tuple(shape), dtype=_SAFETENSORS_TYPES.get(kind, torch.float32), device="meta")


def _outline_of_hub(path: str, revision: str | None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    check_model_path(path)
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
        raise ModelError(
            f"{path!r} is neither a folder nor a head on the hub that can be read: {_reason(error)}"
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


class TargetSizes(Protocol):
    """A target's sizes; a target that is only planned has them too."""

    @property
    def hidden_size(self) -> int:
        """Width of a hidden state."""

    @property
    def vocab_size(self) -> int:
        """Width of its logits."""

    @property
    def num_layers(self) -> int:
        """Number of layers; hidden state `num_layers` is the last one."""

    @property
    def context_length(self) -> int:
        """The most positions that it supports."""


class TargetShape(TargetSizes, Protocol):
    """A target's sizes and embedding; the engine's target and the trainer's both implement it."""

    def embed(self, token_ids: Tensor, /) -> Tensor:
        """int64 [...] -> [..., hidden]"""


def check_fits(path: str, hidden_size: int, vocab_size: int, target: TargetSizes) -> None:
    """Raise `ModelError` unless heads of these sizes match `target`."""
    if (hidden_size, vocab_size) != (target.hidden_size, target.vocab_size):
        raise ModelError(
            f"the heads {path!r} are for a target of hidden size {hidden_size} and {vocab_size} tokens; this one has "
            f"{target.hidden_size} and {target.vocab_size}: use heads that were trained for it"
        )
