"""Finished parts of an advice on disk, so that one that was stopped goes on from them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from slipstream.core.whole_files import write_whole
from slipstream.errors import ConfigError

NAME = "advice.partial.json"


class KeptParts:
    """Parts by name. They are of use only to an advice with the same settings."""

    def __init__(self, folder: Path | None, settings: Mapping[str, Any], resume: bool) -> None:
        """Without a folder nothing is kept. Raises `ConfigError` where there is nothing to resume."""
        self._file = None if folder is None else folder / NAME
        self._settings = json.loads(json.dumps(settings, default=str))
        self._parts: dict[str, Any] = {}
        if resume:
            self._parts = self._read()

    def part(self, name: str, kind: Any, make: Callable[[], Any]) -> Any:
        """What `make` returns as JSON gives it back, or what it returned before, as a value of the type `kind`."""
        if name not in self._parts:
            self._parts[name] = json.loads(json.dumps(make()))
            self._write()
        return msgspec.convert(self._parts[name], kind, str_keys=True)

    def has(self, name: str) -> bool:
        """True for a part that is finished."""
        return name in self._parts

    def _read(self) -> dict[str, Any]:
        if self._file is None:
            raise ConfigError("--resume needs the --output folder of the advice that was stopped")
        if not self._file.is_file():
            return {}  # nothing was finished
        try:
            kept = json.loads(self._file.read_text(encoding="utf-8"))
            settings, parts = dict(kept["settings"]), dict(kept["parts"])
        except (ValueError, KeyError, TypeError):
            raise ConfigError(f"{str(self._file)!r} is damaged; delete it, or omit --resume") from None
        if settings != self._settings:
            different = [name for name in self._settings if settings.get(name) != self._settings[name]]
            raise ConfigError(
                f"{str(self._file)!r} is of an advice with another {', '.join(different) or 'setting'}; "
                "give the same flags, or omit --resume"
            )
        return parts

    def _write(self) -> None:
        if self._file is None:
            return
        self._file.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"settings": self._settings, "parts": self._parts})
        write_whole(self._file, text.encode())


def has_parts(folder: Path) -> bool:
    """Whether there is something to resume."""
    return (folder / NAME).is_file()


def forget_parts(folder: Path) -> None:
    """The whole advice is written: its parts are in it."""
    (folder / NAME).unlink(missing_ok=True)
