"""What the engine must hold (requests, stops, seeds, memory, random histories with aborts), over passes that are
computed in the buffers of recorded ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from triton_process import run

TESTS = Path(__file__).parents[1]
FILES = (
    "engine/test_requests.py",
    "engine/test_stops.py",
    "engine/test_seeds.py",
    "engine/test_invariants.py",
    "engine/test_continuation.py",
    "engine/test_draft_limits.py",
    "engine/test_callbacks.py",
)


@pytest.mark.long
@pytest.mark.parametrize(
    ("file", "executor"),
    [
        *((file, "ComputedExecutor") for file in FILES[::2]),
        *((file, "ComputedKernels") for file in FILES[1::2]),
    ],
)
def test_the_engine_over_the_buffers_of_recorded_passes(file: str, executor: str) -> None:
    options = (
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "tests.kit.on_recorded_passes",
        "-m",
        "not long",
        "--timeout=0",
    )
    done = run("-m", "pytest", *options, str(TESTS / file), RECORDED_EXECUTOR=executor)
    assert done.returncode == 0, done.stdout
