"""Python's collector of garbage at a start."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from slipstream.core.garbage import uncollected


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    was_enabled = gc.isenabled()
    yield
    (gc.enable if was_enabled else gc.disable)()


@pytest.mark.parametrize("enabled", [True, False])
def test_it_rests_within_and_is_as_before_afterwards(enabled: bool) -> None:
    (gc.enable if enabled else gc.disable)()
    with uncollected():
        assert not gc.isenabled()
        with uncollected():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled() == enabled


def test_an_error_does_not_leave_it_off() -> None:
    gc.enable()
    with pytest.raises(ZeroDivisionError), uncollected():
        raise ZeroDivisionError
    assert gc.isenabled()
