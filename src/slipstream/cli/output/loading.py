"""Says what takes long, a model's load above all, before it begins, and on a terminal for how long it has been."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from slipstream.cli.output.console import stderr
from slipstream.core.garbage import uncollected
from slipstream.core.model_path import describe


def loaded_name(model: str | None) -> str:
    """The model as `loading` names it; None is the embedded one."""
    return "the embedded pair" if model in (None, "embedded") else describe(str(model))


def say_loading(model: str | None, what: str = "loading") -> None:
    """One line on standard error: for verbs that have progress of their own, or logs."""
    stderr().print(f"{what} {loaded_name(model)}", markup=False)


def loading(model: str | None) -> AbstractContextManager[None]:
    """`waiting` for imports and the model's load."""
    return waiting(f"loading {loaded_name(model)}")


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """A block that takes its time.

    On a terminal a spinner with the seconds so far, which leaves no trace; elsewhere one plain line.
    """
    if not sys.stderr.isatty():
        stderr().print(what, markup=False)
        with uncollected():
            yield
        return
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=stderr(), transient=True) as progress:
        progress.add_task(what, total=None)
        progress.refresh()
        with uncollected():
            yield
