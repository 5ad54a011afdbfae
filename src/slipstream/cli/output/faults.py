"""All that is wrong with a command, told at once instead of one thing a try."""

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
    """Collects faults; leaving it raises one `ConfigError` that names them all."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def add(self, fault: str) -> None:
        """One more."""
        self.found.append(fault)

    def made(self, make: Callable[[], Any]) -> Any:
        """What `make` returns; None where it raises what a user can mend."""
        try:
            return make()
        except SlipstreamError as error:
            self.add(str(error))
            return None

    def check_paths(self, data: Seq[Path] | None, output: Path | None, init: str | None) -> None:
        """What is read must be there, and what is written must have a place. `init` may be a hub id."""
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
