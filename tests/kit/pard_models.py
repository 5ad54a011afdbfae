"""Draft models with a mask token, for the embedded target."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

from slipstream.assets import EMBEDDED_DRAFT
from tests.kit.folders import kept_folder

MASK = 7


@functools.cache
def pard_folder(mask: Any = MASK) -> str:
    """The embedded draft model with a mask token, which it was not trained to read: its drafts beyond the first are
    random."""
    folder = kept_folder()
    for file in Path(EMBEDDED_DRAFT).iterdir():
        shutil.copy(file, folder / file.name)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"pard_token": mask, "spd_type": "pard"}))
    return str(folder)
