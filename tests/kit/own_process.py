"""A test that needs a young process: the system may refuse to fork one that has mapped much of the memory, and Ray
forks."""

from __future__ import annotations

import functools
import inspect
import os
import subprocess
import sys
from collections.abc import Callable

_INSIDE = "TEST_IN_OWN_PROCESS"


def in_own_process(test: Callable[[], None]) -> Callable[[], None]:
    """Run the test in a pytest of its own, and show what that printed where it fails."""

    @functools.wraps(test)
    def run() -> None:
        if _INSIDE in os.environ:
            test()
            return
        name = f"{inspect.getfile(test)}::{test.__name__}"
        environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-m", "", "-p", "no:cacheprovider", "--timeout=0", name],
            env=environment | {_INSIDE: "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=1150,
            check=False,
        )
        assert done.returncode == 0, done.stdout

    return run
