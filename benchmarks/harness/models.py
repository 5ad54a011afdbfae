"""Larger models to measure: the embedded target at the cost of more parameters (`recipes.cost_expanded`)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from recipes.cost_expanded.target import expand, parse_count
from slipstream.assets import EMBEDDED_TARGET


def expanded(
    folder: Path,
    parameters: int | str | None,
    *,
    source: str | Path = EMBEDDED_TARGET,
    dtype: str = "float32",
    positions: int | None = None,
) -> str:
    """`source` enlarged to so many parameters (`300M`) in `folder`, made if it is not there yet; returns its path.

    None leaves its size as it is. `positions` is what its configuration shall allow: rotary positions need no weights
    for them, but it was trained on fewer, so what it writes behind those means nothing.
    """
    if not (folder / "config.json").is_file():
        partial = folder.with_name(folder.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)  # of a run that was stopped
        folder.parent.mkdir(parents=True, exist_ok=True)
        if parameters is None:
            shutil.copytree(source, partial)
        else:
            count = parse_count(parameters) if isinstance(parameters, str) else parameters
            expand(str(source), partial, target_parameters=count, dtype=dtype)
        if positions is not None:
            file = partial / "config.json"
            config = json.loads(file.read_text()) | {"max_position_embeddings": positions}
            file.write_text(json.dumps(config, indent=2) + "\n")
        partial.rename(folder)
    return str(folder)
