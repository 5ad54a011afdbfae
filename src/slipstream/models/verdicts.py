"""Models that have passed the checks at load, so that the next start need not compare them again.

A verdict is one small file in the cache folder, named by everything that the checks depend on: the checkpoint's files,
how they are loaded, the CPU kernels, Slipstream's own sources, and the versions of PyTorch and Transformers. Of each
of the checkpoint's files that is the name, the size, the time of the last change, and the contents: whole where they
are at most 16 MiB or JSON, else sixteen places of one MiB, the first and the last among them (`files.digest`). So a
file that was replaced or written to is another one; only bytes that were changed between those places, at the same
size and with the file's time put back, go unseen.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache

from slipstream.config import cache_folder
from slipstream.core.version import __version__
from slipstream.core.whole_files import write_whole
from slipstream.models.files.digest import digest_of_files, files_of

log = logging.getLogger(__name__)

FORMAT = 1
"""Raised when a file of another version could be misread."""
_VERSIONED = ("slipstream.", "transformers.")
"""Packages whose classes a verdict names: their versions are part of it."""


@dataclass(frozen=True, slots=True)
class LoadVerdict:
    """What has to be the same for a model to be taken for one that has passed."""

    fields: Mapping[str, Any]
    """Plain JSON values."""

    @property
    def path(self) -> Path:
        """Return its file, whether there is one or not."""
        return cache_folder() / "verdicts" / f"{_digest(self.fields)}.json"

    def digest(self, settings: Sequence[str], **others: Any) -> str:
        """A name for what depends on these settings alone, and on `others`, plain JSON values too."""
        of_all = self.fields["settings"]
        return _digest({**self.fields, "settings": {name: of_all[name] for name in settings} | others})

    def is_kept(self) -> bool:
        """Whether the model has passed before. A file that cannot be read, or says something else, is none."""
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False
        return bool(found == {"format": FORMAT, "passed": dict(self.fields)})

    def keep(self) -> None:
        """Write the file; a reader sees the whole of it or none. Without room for it the next start checks again."""
        text = json.dumps({"format": FORMAT, "passed": dict(self.fields)}, indent=1, sort_keys=True)
        folder = self.path.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(self.path, text.encode())
        except OSError as error:
            log.info("that the model passed its checks cannot be kept in %s (%s)", folder, error.strerror)


def _digest(fields: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(fields, sort_keys=True).encode(), digest_size=16).hexdigest()


def verdict_of(
    path: str,
    revision: str | None,
    adapter: str | None,
    settings: Mapping[str, Any],
    kernels: str,
    classes: Sequence[type],
) -> LoadVerdict | None:
    """The verdict on a checkpoint that is loaded with these settings (plain JSON values), whether it is kept or not.

    `kernels` identifies those that compute, and `classes` are what the model is loaded and run by. None where that
    is not known: of a checkpoint that is not on this machine yet, and of classes that are neither Slipstream's nor
    Transformers' own, whose code may change under the same name.
    """
    places = [_place(path, revision), *([] if adapter is None else [_place(adapter, None)])]
    if None in places or any(not each.__module__.startswith(_VERSIONED) for each in classes):
        return None
    return LoadVerdict(
        {
            "files": [_state(place) for place in places if place is not None],
            "settings": dict(settings),
            "kernels": kernels,
            "classes": [f"{each.__module__}:{each.__qualname__}" for each in classes],
            "slipstream": [__version__, _sources()],
            "torch": torch.__version__,
            "transformers": version("transformers"),
        }
    )


def _place(path: str, revision: str | None) -> Path | None:
    """The file or the folder that a name leads to, of the hub's in its cache; None where it is not there."""
    if Path(path).exists():
        return Path(path)
    with contextlib.suppress(Exception):  # it is no name of the hub
        found = try_to_load_from_cache(path, "config.json", revision=revision)
        return Path(found).parent if isinstance(found, str) else None
    return None


def _state(place: Path) -> list[Any]:
    """Return the state of a file, or of a folder's files: see this module's description."""
    times = [[each.name, each.stat().st_size, each.stat().st_mtime_ns] for each in files_of(place)]
    return [digest_of_files(str(place)), times]


@functools.cache
def _sources() -> str:
    """Return a digest of the files that load, check and run models."""
    package = Path(__file__).parents[1]
    state = hashlib.blake2b(digest_size=16)
    for file in sorted(each for room in ("kv", "models") for each in (package / room).rglob("*.py")):
        state.update(file.read_bytes())
    return state.hexdigest()
