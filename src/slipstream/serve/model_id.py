"""The model's name for clients, from the file or folder that it was loaded from."""

from __future__ import annotations

import re
from pathlib import Path

_SHARD = re.compile(r"-\d{5}-of-\d{5}$")
_SNAPSHOT = re.compile(r"models--(.+)/snapshots/[^/]+$")


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
