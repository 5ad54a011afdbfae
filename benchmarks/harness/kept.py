"""Cells of a long measurement: each is said on standard error, kept on disk as it ends, and not measured again.

A run that is stopped leaves `NAME.partial.json` beside its result. The same command goes on from it, with the same
options and code; any others begin anew.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from slipstream.profiling.provenance import provenance

Page = Callable[[Any], str]
Draw = Callable[[Any, Path], None]


class Kept:
    """The cells of one result file."""

    def __init__(
        self, result: Path, settings: Mapping[str, Any], *, merge: bool = False, **about: Any
    ) -> None:
        """`settings` are all that the cells depend on; they must be plain values. `about` goes into the provenance.

        With `merge` nothing is measured: cells that were kept, at whatever commit, count, and others are None.
        """
        self.result = result
        self.partial = result.with_suffix(".partial.json")
        self.origin = {**provenance(), **about}
        self._merge = merge
        self._settings = json.loads(json.dumps({**settings, "commit": self.origin["commit"]}, default=str))
        self._cells: dict[str, Any] = {}
        if self.partial.exists():
            before = json.loads(self.partial.read_text())
            if merge:
                self.origin["commit"] = before["settings"]["commit"]
            if merge or before["settings"] == self._settings:
                self._cells = before["cells"]
                say(f"goes on from {len(self._cells)} cells in {self.partial.name}")

    def cell(self, name: str, measure: Callable[[], Any]) -> Any:
        """What `measure` returns, as JSON gives it back; or what it returned before the run was stopped."""
        if self._merge or name in self._cells:
            say(f"{name}: {'kept' if name in self._cells else 'not measured'}")
            return self._cells.get(name)
        say(f"{name} …")
        started_s = time.monotonic()
        value = self.put(name, measure())
        say(f"{name}: {time.monotonic() - started_s:.0f} s")
        return value

    def has(self, name: str) -> bool:
        """True for a cell that a run before has ended."""
        return name in self._cells

    def get(self, name: str) -> Any:
        """A cell that is there."""
        return self._cells[name]

    def put(self, name: str, value: Any) -> Any:
        """Keep a cell that was measured elsewhere; returns it as JSON gives it back."""
        self._cells[name] = json.loads(json.dumps(value))
        write_result(self.partial, {"settings": self._settings, "cells": self._cells})
        return self._cells[name]

    def finish(self, result: Mapping[str, Any], page: Page | None = None, draw: Draw | None = None) -> None:
        """Write the whole result and its provenance; the cells are in it and need not be kept any more."""
        write_result(self.result, {"provenance": self.origin, **result}, page, draw)
        self.partial.unlink(missing_ok=True)
        say(f"wrote {self.result.name}")


def say(line: str) -> None:
    """With a terminal and without."""
    print(line, file=sys.stderr, flush=True)


def write_result(
    file: Path, value: Mapping[str, Any], page: Page | None = None, draw: Draw | None = None
) -> None:
    """In one move: a run that is killed leaves the file before or the file after.

    What `page` and `draw` make of it, as JSON gives it back, is written beside it: Markdown and a picture.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f"{file.name}.writing")
    text = json.dumps(value, indent=1, ensure_ascii=False) + "\n"
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(file)
    if page is not None:
        file.with_suffix(".md").write_text(page(json.loads(text)), encoding="utf-8")
    if draw is not None:
        draw(json.loads(text), file.with_suffix(".svg"))
