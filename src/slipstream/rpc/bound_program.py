"""Becomes another program that ends with the process that started it: `python -I -S bound_program.py PARENT PROGRAM…`.

`subprocess` could make the one call between its fork and the program's start (`preexec_fn`), but has to copy the whole
process for it, which the system may refuse to one that has mapped much of the memory. Imports nothing of the package.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def end_with_parent(number: int = signal.SIGKILL) -> None:
    """In a child: have the system send it this signal when the thread that started it ends, however it ends, even while
    the child is stopped. Only Linux can."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def _become(parent: int, program: list[str]) -> None:
    end_with_parent(signal.SIGTERM)
    if os.getppid() != parent:  # it ended before the call
        raise SystemExit(1)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and a program inherits that
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(program[0], program)
    except OSError as error:
        raise SystemExit(f"cannot run {program[0]}: {error.strerror}") from None


if __name__ == "__main__":
    _become(int(sys.argv[1]), sys.argv[2:])
