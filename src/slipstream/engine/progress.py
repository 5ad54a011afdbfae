"""How far a batch is, on standard error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tqdm.auto import tqdm

UseTqdm = bool | Callable[..., Any] | None

QUIET_S = 1.0
"""A batch that is done by then shows no bar unless `use_tqdm` is True."""


@contextmanager
def progress(use_tqdm: UseTqdm, num_prompts: int, by_default: bool) -> Iterator[Callable[[], object]]:
    """What to call when a prompt is answered.

    `use_tqdm` True shows a bar, False none, and a callable makes it as `tqdm` does. None shows one on a terminal where
    several prompts take longer than `QUIET_S`, if that is wanted `by_default`.
    """
    if use_tqdm is False or (use_tqdm is None and not (by_default and num_prompts > 1)):
        yield lambda: None
        return
    options: dict[str, Any] = {"total": num_prompts, "desc": "Processed prompts", "dynamic_ncols": True}
    if use_tqdm is None:
        options |= {"disable": None, "delay": QUIET_S, "leave": False}
    make = use_tqdm if callable(use_tqdm) else tqdm
    with make(**options) as bar:
        yield bar.update
