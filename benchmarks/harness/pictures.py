"""Pictures of results: SVG, so that equal results give equal files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure


@contextmanager
def drawing(file: Path, width: float, height: float, **style: Any) -> Iterator[Figure]:
    """A figure of so many inches, written to `file` at the end. `style` are matplotlib's settings, dots as `_`."""
    settings: Any = {"svg.hashsalt": "slipstream", "svg.fonttype": "none"}
    settings |= {name.replace("_", "."): value for name, value in style.items()}
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure
        figure.savefig(file, format="svg", metadata={"Date": None})
