"""Counts on a CPU what would make a GPU's host wait: numbers read back, and uploads from memory that is not pinned.

A CPU tensor has no device to wait for, so what is counted is each call that would wait: reading a number, a list or an
array of a tensor, a result whose size depends on numbers, and a tensor made of Python's or numpy's numbers. What lies
on the host in any case, such as a batch's buffer, must be made with `numpy` and reach the device by `kv.upload`, which
does not wait: these are `copies`.
"""

from __future__ import annotations

import contextlib
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import slipstream

WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal")
UPLOADS = ("lift_fresh",)
COPIES = "kv/upload.py"
PACKAGE = f"{Path(slipstream.__file__).parent}/"


class WaitAudit(TorchDispatchMode):
    """Within `with`, counts waits and uploads by the lines of the package that cause them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.waits: Counter[str] = Counter()
        self.uploads: Counter[str] = Counter()
        self.copies: Counter[str] = Counter()
        self._inside = 0
        self._patches = contextlib.ExitStack()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if not self._inside:
            if name in WAITS:
                self.waits[f"{_line()} {name}"] += 1
            if name in UPLOADS and not (line := _line()).startswith(COPIES):
                self.uploads[f"{line} {name}"] += 1
        return func(*args, **(kwargs or {}))

    def __enter__(self) -> Any:
        for name in ("tolist", "numpy", "cpu"):
            self._patches.enter_context(
                mock.patch.object(Tensor, name, self._reading(getattr(Tensor, name), name))
            )
        self._patches.enter_context(mock.patch.object(torch, "from_numpy", self._uploading(torch.from_numpy)))
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._patches.close()

    def _reading(self, method: Callable[..., Any], name: str) -> Callable[..., Any]:
        def read(tensor: Tensor, *arguments: Any) -> Any:
            self.waits[f"{_line()} {name}"] += not self._inside
            with self._once():
                return method(tensor, *arguments)

        return read

    def _uploading(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def upload(*arguments: Any) -> Any:
            line = _line()
            is_copy = line.startswith(COPIES)
            (self.copies if is_copy else self.uploads)[f"{line} from_numpy"] += not self._inside
            return function(*arguments)

        return upload

    @contextlib.contextmanager
    def _once(self) -> Iterator[None]:
        """What is done inside is part of one read."""
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1


def _line() -> str:
    """The innermost line of the package that is not this file's."""
    for frame in reversed(traceback.extract_stack()):
        if frame.filename.startswith(PACKAGE) and not frame.filename.endswith(
            ("wait_audit.py", "recorded_graph.py")
        ):
            return f"{frame.filename.removeprefix(PACKAGE)}:{frame.lineno}"
    return "elsewhere"
