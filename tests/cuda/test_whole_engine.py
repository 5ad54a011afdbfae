"""What the engine must hold (requests, stops, seeds, memory, limits of drafts), over passes that are computed in the
buffers of recorded ones. Random histories with aborts over them are in tests/engine/test_overlapped_steps.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from triton_process import run

TESTS = Path(__file__).parents[1]


@pytest.mark.long
@pytest.mark.parametrize(
    ("file", "executor"),
    [
        ("engine/test_requests.py", "ComputedExecutor"),
        ("engine/test_stops.py", "ComputedKernels"),
        ("engine/test_seeds.py", "ComputedExecutor"),
        ("engine/test_draft_limits.py", "ComputedKernels"),
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
