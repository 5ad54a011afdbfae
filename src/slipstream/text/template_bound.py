"""Bounds a chat template, which is a program of the checkpoint: one that never ends must not hold up a server."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import FrameType
from typing import Any

from slipstream.errors import RequestError

MAX_STEPS = 500_000
"""Lines and calls of a template. Those that models come with take some hundreds a message."""
STEPS_PER_ITEM = 5_000
"""More of them for each message and tool."""
MAX_CPU_S = 5.0
"""CPU time of the thread, for steps that are long each."""
MAX_CHARACTERS = 2**26
"""Characters of the rendered text."""
_TEMPLATE_FILE = "<template>"
"""How Jinja names the code of a template that came as text."""
_STEPS_A_LOOK = 16
"""Between two looks at the clock."""


class _Bound:
    """Counts the steps of one rendering; used as the thread's trace function, which Python calls at each."""

    def __init__(self, num_items: int) -> None:
        self.max_steps = MAX_STEPS + STEPS_PER_ITEM * num_items
        self.num_steps = self.num_characters = 0
        self.has_begun = False
        self.end_s = time.thread_time() + MAX_CPU_S

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        is_template = frame.f_code.co_filename == _TEMPLATE_FILE
        self.has_begun |= is_template  # before that the template is compiled
        if self.has_begun:
            self.num_steps += 1
            if self.num_steps > self.max_steps:
                raise _endless(f"{self.max_steps:,} steps")
            if self.num_steps % _STEPS_A_LOOK == 0 and time.thread_time() > self.end_s:
                raise _endless(f"{MAX_CPU_S:g} s")
            if is_template and event == "return" and type(arg) is str:  # a piece of the text
                self.num_characters += len(arg)
                if self.num_characters > MAX_CHARACTERS:
                    raise _endless(f"{MAX_CHARACTERS:,} characters")
        return self if is_template else None


@contextmanager
def bounded(template: Any, num_items: int) -> Iterator[None]:
    """Run a chat template in the block: raises `RequestError` where it takes more than the bounds above.

    `template` is its text, or several by name; `num_items` is the number of messages and tools.
    """
    for text in template.values() if isinstance(template, dict) else [template]:
        if isinstance(text, str) and _has_power(text):
            raise RequestError("the chat template of this model is refused: it takes powers of numbers")
    before = sys.gettrace()
    sys.settrace(_Bound(num_items))
    try:
        yield
    finally:
        sys.settrace(before)


@lru_cache(maxsize=8)
def _has_power(template: str) -> bool:
    """Whether it has the operator `**`, by which one step may take for ever. `f(**names)` is none."""
    from jinja2 import Environment, TemplateSyntaxError

    before = ""
    try:
        for _, kind, text in Environment().lex(template):
            if kind == "operator" and text == "**" and before not in ("(", ","):
                return True
            if kind != "whitespace":
                before = text
    except TemplateSyntaxError:  # what compiles it says so
        return False
    return False


def _endless(most: str) -> RequestError:
    return RequestError(
        f"the chat template of this model was stopped after {most}: it has no end, or the conversation is too long"
    )
