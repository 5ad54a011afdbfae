"""All that is wrong with a command's flags, in one error."""

from __future__ import annotations

import os
from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path
from types import TracebackType
from typing import Any

from slipstream.cli.output.writing import check_folder
from slipstream.errors import ConfigError, SlipstreamError


class Faults:
    """A context that collects errors; leaving it raises one `ConfigError` with all of them."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def add(self, fault: str) -> None:
        """Add an error message."""
        self.found.append(fault)

    def made(self, make: Callable[[], Any]) -> Any:
        """The result of `make`; None where it raises a `SlipstreamError`, which is added."""
        try:
            return make()
        except SlipstreamError as error:
            self.add(str(error))
            return None

    def check_paths(self, data: Seq[Path] | None, output: Path | None, init: str | None) -> None:
        """Check that inputs exist and outputs can be written; `init` may be a hub id."""
        if not data:
            self.add("--data is missing")
        self.found += [f"there is no file {str(file)!r}" for file in data or () if not file.is_file()]
        if output is None:
            self.add("--output is missing")
        else:
            self.made(lambda: check_folder(output))
        is_path = init is not None and (init.startswith((".", "~", os.sep)) or init.count("/") > 1)
        if init is not None and is_path and not Path(init).exists():
            self.add(f"--init: there is no folder {init!r}")

    def __enter__(self) -> Faults:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None and self.found:
            raise ConfigError("; ".join(self.found))
