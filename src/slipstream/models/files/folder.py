"""Checks of a checkpoint's folder, each with one clear line for what a model needs and the folder lacks."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from huggingface_hub import snapshot_download
from safetensors import safe_open

from slipstream.core.model_path import check_model_path
from slipstream.errors import ModelError
from slipstream.models.files.lora import ADAPTER_CONFIG, has_adapter
from slipstream.models.files.shards import SAFETENSORS_INDEX, mended_index, read_index, weight_files
from slipstream.models.huggingface import cached_file
from slipstream.models.quiet import one_line

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
)
_FORMAT = "give a folder in Hugging Face format"


def check_folder(path: str) -> None:
    """Raise `ModelError` where `path` is a file, or a folder without a model; a hub id passes."""
    check_model_path(path)
    folder = Path(path)
    if not folder.is_dir() or (folder / "config.json").is_file():
        return
    if has_adapter(folder):
        raise ModelError(
            f"{path!r} is an adapter, not a model; give the model that it was made for{_base_model(folder)} and "
            "--lora with this folder"
        )
    files = sorted(folder.glob("*.gguf"))
    if files:
        raise ModelError(
            f"{path!r} has no config.json, but GGUF files; give one of them, as {str(files[0])!r}"
        )
    raise ModelError(f"{path!r} has no config.json; {_FORMAT}")


def check_weight_files(path: str) -> None:
    """Raise `ModelError` for a folder without weights, or without one of the files that its index names."""
    folder = Path(path)
    if folder.is_dir() and not weight_files(folder):
        raise ModelError(f"{path!r} has no weights: neither *.safetensors nor *.bin")


def check_headers(path: str) -> None:
    """Raise `ModelError` for a folder with a `*.safetensors` that is damaged or cut short."""
    for file in weight_files(Path(path)):
        if file.suffix == ".safetensors":
            with one_line(f"cannot read the weights of {path!r}"), safe_open(file, "pt"):
                pass


def all_float32(path: str) -> bool:
    """Whether no matrix in the `*.safetensors` of a folder is of another type; True where there is none to look at."""
    for file in weight_files(Path(path)):
        if file.suffix != ".safetensors":
            return False
        with safe_open(file, "pt") as opened:
            slices = [opened.get_slice(name) for name in opened.keys()]  # noqa: SIM118 - not a mapping
            if any(len(part.get_shape()) > 1 and part.get_dtype() != "F32" for part in slices):
                return False
    return True


def check_tokenizer_files(path: str) -> None:
    """Raise `ModelError` for a folder without a tokenizer."""
    if not has_tokenizer_files(path):
        raise ModelError(
            f"{path!r} has no tokenizer; pass --tokenizer with a folder or hub id that has the model's "
            "(tokenizer= in Python)"
        )


def has_tokenizer_files(path: str) -> bool:
    """False for a folder without a tokenizer; a hub id passes."""
    folder = Path(path)
    return not folder.is_dir() or any((folder / name).is_file() for name in TOKENIZER_FILES)


def is_tokenizer_folder(path: str) -> bool:
    """True for a folder with a tokenizer and no model."""
    folder = Path(path)
    return (
        folder.is_dir() and not (folder / "config.json").is_file() and (folder / "tokenizer.json").is_file()
    )


def folder_chat_template(path: str) -> str | None:
    """The template that older checkpoints of image models keep in a file of its own."""
    file = Path(path) / "chat_template.json"
    if not file.is_file():
        return None
    try:
        template = json.loads(file.read_text())["chat_template"]
    except (OSError, ValueError, KeyError, TypeError):
        raise ModelError(f"cannot read {str(file)!r}: it must be a JSON object with chat_template") from None
    return str(template)


def _hub_shards(path: str, revision: str | None) -> Path | None:
    """The folder of a hub id with the weights that its index names, downloaded; None where it has no index."""
    index = find_file(path, SAFETENSORS_INDEX, revision)
    if index is None:
        return None
    named = read_index(Path(index))["weight_map"].values()
    patterns = ["*.json", "*.py", *(str(name) for name in named)]
    return Path(snapshot_download(path, revision=revision, allow_patterns=patterns))


def find_file(path: str, name: str, revision: str | None) -> str | None:
    """A file of a folder or of the hub; None where there is none."""
    if Path(path).is_dir():
        file = Path(path) / name
        return str(file) if file.is_file() else None
    found: str | None = cached_file(
        path,
        name,
        revision=revision,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
        _raise_exceptions_for_gated_repo=False,
    )
    return found


@contextlib.contextmanager
def as_transformers_reads(path: str, revision: str | None = None) -> Iterator[str]:
    """The folder as Transformers reads it rightly: without its adapter, and of weights only those that count.

    Transformers would merge an adapter by itself, and not report whether the model's own weights were complete. It
    would take a `model.safetensors` before shards with an index, and refuse an index without `metadata`.
    """
    folder = Path(path) if Path(path).is_dir() else _hub_shards(path, revision)
    if folder is None:
        yield path
        return
    index = mended_index(folder)
    others = set() if index is None else _not_named(folder, index.files)
    if not has_adapter(folder) and not others and (index is None or not index.is_mended):
        yield str(folder)
        return
    with tempfile.TemporaryDirectory(prefix="slipstream-") as view:
        for file in folder.iterdir():
            is_index = index is not None and file.name == index.name
            if not file.name.startswith("adapter_") and file.name not in others and not is_index:
                (Path(view) / file.name).symlink_to(file.resolve())
        if index is not None:
            (Path(view) / index.name).write_text(json.dumps(index.content), encoding="utf-8")
        yield view


def _not_named(folder: Path, names: Sequence[str]) -> set[str]:
    """Weights in a folder that its index does not name."""
    weights = {file.name for pattern in ("*.safetensors", "*.bin") for file in folder.glob(pattern)}
    return weights - set(names)


def _base_model(folder: Path) -> str:
    """' (name)' of the adapter's base model; empty where the adapter does not say it."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        name = json.loads((folder / ADAPTER_CONFIG).read_text()).get("base_model_name_or_path")
        if name:
            return f" ({name})"
    return ""
