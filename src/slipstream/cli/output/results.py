"""Hands over a verb's result: files first, so that a closed pipe does not lose them, then what is printed."""

from __future__ import annotations

import json as json_
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.cli.output.console import stderr, wide_results
from slipstream.cli.output.writing import check_file, check_folder, write_text

if TYPE_CHECKING:
    from slipstream.tools.bench.report.grid import Grid


def files_in(folder: Path | None, names: Iterable[str], overwrite: bool) -> list[Path]:
    """The files of a result; none without a folder. Raises `ConfigError` before any work if one cannot be written."""
    if folder is None:
        return []
    check_folder(folder)
    files = [folder / name for name in names]
    for file in files if folder.exists() else ():
        check_file(file, overwrite)
    return files


def write_json(file: Path, value: Any) -> None:
    """Write `value` as a JSON file."""
    write_text(file, json_.dumps(value, ensure_ascii=False, indent=1) + "\n")


def print_json(value: Any) -> None:
    """Print `value` as JSON to standard output."""
    print(json_.dumps(value, indent=2, ensure_ascii=False, default=_plain))


def print_report(grids: Iterable[Grid], lines: Iterable[str]) -> None:
    """Print tables, and lines below them."""
    console = wide_results()
    for grid in grids:
        console.print(grid.rich())
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def say_written(files: Iterable[Path | None]) -> None:
    """Say on standard error where results are."""
    for file in files:
        if file is not None:
            stderr().print(f"written: {file}", markup=False)


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")
