"""Says what is being loaded, before anything heavy is imported, and on a terminal for how long it has been."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from slipstream.cli.output.console import notes
from slipstream.model_path import describe


def loaded_name(model: str | None) -> str:
    """The model as `loading` names it; None is the embedded one."""
    return "the embedded pair" if model in (None, "embedded") else describe(str(model))


def say_loading(model: str | None, what: str = "loading") -> None:
    """One line on standard error: for verbs that have progress of their own, or logs."""
    notes().print(f"{what} {loaded_name(model)}", markup=False)


@contextmanager
def loading(model: str | None) -> Iterator[None]:
    """A block in which imports and the model's load take their time.

    On a terminal a spinner with the seconds so far, which leaves no trace; elsewhere one plain line.
    """
    if not sys.stderr.isatty():
        say_loading(model)
        yield
        return
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=notes(), transient=True) as progress:
        progress.add_task(f"loading {loaded_name(model)}", total=None)
        progress.refresh()
        yield
