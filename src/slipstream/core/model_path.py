"""Where a model's name leads, as far as the name and the disk tell: checked before anything heavy is imported."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from slipstream.assets.embedded import EMBEDDED, OWN_DRAFTERS
from slipstream.errors import ModelError

HUB_FILE = re.compile(r"([\w.-]+/[\w.-]+):(.+)")
"""`REPO:FILE.gguf`, a file of the hub."""
_BARE_IDS = re.compile(r"(distil)?gpt2(-medium|-large|-xl)?|openai-gpt")
"""The decoders among the hub's ids of its first years, which have no owner; it gives out no more of these."""
_RIGHT = "a checkpoint folder, a .gguf file or a hub id (owner/name)"
_SHARD = re.compile(r"-\d{5}-of-\d{5}$")
_PART = re.compile(r"-(\d{5})-of-(\d{5})(\.gguf)$", re.IGNORECASE)
_SNAPSHOT = re.compile(r"models--(.+)/snapshots/[^/]+$")


def names_gguf(path: str) -> bool:
    """Whether the name is that of a GGUF file, on disk or of the hub."""
    return path.lower().endswith(".gguf")


def gguf_parts(path: str) -> list[str]:
    """The names of all parts of the model that a GGUF file is one part of, as llama.cpp names them; of any other file
    its own name."""
    found = _PART.search(path)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        return [path]
    begin, count, ending = path[: found.start()], found[2], found[3]
    return [f"{begin}-{number:05}-of-{count}{ending}" for number in range(1, int(count) + 1)]


def check_model_path(path: str) -> None:
    """Raise `ModelError` where a name can only be a path and nothing lies there, and for a name that is none.

    A hub id passes; so does one without an owner that is in the hub's cache, or among the few that the hub has.
    """
    if names_gguf(path):
        if not Path(path).is_file() and HUB_FILE.fullmatch(path) is None:
            raise ModelError(f"there is no file {path!r}; a file of the hub is REPO:FILE.gguf")
        return
    folder = Path(path)
    looks_local = folder.is_absolute() or path.startswith((".", "~")) or path.count("/") > 1
    if folder.is_file() or (looks_local and not folder.is_dir()):
        raise ModelError(f"{path!r} is not a folder; give a checkpoint folder, a .gguf file or a hub id")
    is_flag = path.startswith("-")  # the command has its own error for it
    if not is_flag and "/" not in path and not folder.is_dir():
        _check_bare_name(path)


def _check_bare_name(name: str) -> None:
    """Raise `ModelError` unless the hub has, or had, a model of this name without an owner.

    Asking the hub would take half a minute where it cannot be reached.
    """
    if name in OWN_DRAFTERS:
        own = " and ".join(OWN_DRAFTERS[name])
        raise ModelError(
            f"{name!r} can be a target, or its own drafter with {own}, but not this; give {_RIGHT}"
        )
    if _BARE_IDS.fullmatch(name) or _in_hub_cache(name):
        return
    near = get_close_matches(name.lower(), OWN_DRAFTERS, n=1)
    meant = f"; did you mean {near[0]!r}? Give" if near else "; give"
    named = ", ".join(each for each in OWN_DRAFTERS if each != EMBEDDED)
    raise ModelError(
        f"there is no model {name!r}{meant} {_RIGHT}, or the name of a target: {EMBEDDED}, {named}"
    )


def _in_hub_cache(name: str) -> bool:
    from huggingface_hub.constants import HF_HUB_CACHE

    return (Path(HF_HUB_CACHE) / f"models--{name}").is_dir()


def models_in(options: object) -> Iterator[str]:
    """The values of `model` in a drafter's options and in those of the drafters inside it."""
    if isinstance(options, Mapping):
        for key, value in options.items():
            if key == "model" and isinstance(value, str):
                yield value
            else:
                yield from models_in(value)
    elif isinstance(options, list):
        for each in options:
            yield from models_in(each)


def describe(path: str) -> str:
    """The name as messages of progress have it, with the size of what is on disk: 'x.gguf (94 MiB)'."""
    place = Path(path)
    if not place.exists():
        return f"{path} (no file or folder here, so looked for on the hub)"
    endings = ("*.safetensors", "*.bin", "*.gguf")
    files: list[Any] = [each for ending in endings for each in place.glob(ending)]
    if place.is_file():
        files = [each for each in map(Path, gguf_parts(path)) if each.is_file()]
    num_bytes = sum(file.stat().st_size for file in files)
    return f"{path} ({num_bytes / 2**20:,.0f} MiB)" if num_bytes else path


def model_id(model: str) -> str:
    """A name for a model that was given as `model`, without the folders around it.

    `SmolLM2-135M-Instruct.Q4_1` for `/a/b/SmolLM2-135M-Instruct.Q4_1.gguf`, the folder's own name for a folder, and
    `org/name` for a snapshot in the hub's cache. A name of the hub stays as it is.
    """
    if model.endswith(".gguf"):  # of a file, or of a file in a repository of the hub: REPO:FILE.gguf
        return _SHARD.sub("", Path(model.rsplit(":", 1)[-1]).stem)
    path = Path(model)
    if not path.is_absolute() and not path.exists():
        return model
    folder = path.resolve()
    snapshot = _SNAPSHOT.search(folder.as_posix())
    return snapshot[1].replace("--", "/") if snapshot else folder.name or model
