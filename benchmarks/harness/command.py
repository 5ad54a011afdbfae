"""The command line that benchmarks have in common, and where their results go."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs/benchmarks"
"""Results and pages, unless the command line says otherwise."""


def command(doc: str | None, output: Path | None = None) -> argparse.ArgumentParser:
    """A parser that shows `doc` as it stands; with `output`, where the result goes unless `--output` is given."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if output is not None:
        parser.add_argument(
            "--output", "--out", "--result", type=Path, default=output, help="the result, as JSON"
        )
    return parser


def add_settings(parser: argparse.ArgumentParser, settings: Any, **helps: str) -> None:
    """A flag for each field of the dataclass `settings` that `helps` names, with its value there as the default."""
    for each in dataclasses.fields(settings):
        if each.name in helps:
            default = getattr(settings, each.name)
            kind = str if default is None else type(default)
            flag = "--" + each.name.replace("_", "-")
            parser.add_argument(flag, type=kind, default=default, help=helps[each.name])


def names(valid: Iterable[str]) -> Callable[[str], list[str]]:
    """An argument's type: some of `valid`, with commas."""

    def read(text: str) -> list[str]:
        chosen = [word.strip() for word in text.split(",")]
        if wrong := [name for name in chosen if name not in valid]:
            raise argparse.ArgumentTypeError(f"unknown {wrong[0]!r}; there are {', '.join(valid)}")
        return chosen

    return read


def numbers(text: str) -> list[int]:
    """An argument's type: whole numbers with commas, ascending."""
    return sorted({int(word) for word in text.split(",")})
