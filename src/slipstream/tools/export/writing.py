"""Writes an exported setting into a folder: the engine's files, its command, and the neutral record."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from slipstream.tools.export.contract import ExportedSetting

COMMAND = "command.sh"
RECORD = "record.json"


def file_names(setting: ExportedSetting) -> list[str]:
    """Names of the files that `write_setting` makes."""
    command = [COMMAND] if setting.argv else []
    return [*(file.name for file in setting.files), *command, RECORD]


def write_setting(setting: ExportedSetting, folder: Path) -> list[Path]:
    """Write the files of a setting into `folder`, which is made where it is missing; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {file.name: file.text for file in setting.files}
    if setting.argv:
        texts[COMMAND] = f"#!/bin/sh\n# {setting.engine} {setting.version}\n{command_line(setting, folder)}\n"
    texts[RECORD] = json.dumps(setting.record.to_mapping(), indent=2) + "\n"
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in texts]


def command_line(setting: ExportedSetting, folder: Path | None = None) -> str:
    """The command as a user types it; files of the setting are named in `folder`, where it is given."""
    names = {file.name for file in setting.files}
    words = [str(folder / word) if folder is not None and word in names else word for word in setting.argv]
    return shlex.join(words)
