"""The engine's process while it loads, and the engine that is loaded again where one has ended."""

from __future__ import annotations

import socket
import subprocess
import sys
from typing import Any

import pytest

from slipstream.config import SpeculativeConfig
from slipstream.engine import memory
from slipstream.engine.factory import make_engine
from slipstream.errors import EngineStoppedError
from slipstream.serve.config import ServeConfig
from slipstream.serve.engine_info import EngineInfo
from slipstream.serve.process.launch import as_loaded, greet
from slipstream.serve.process.start import load_message

ROOM: dict[str, Any] = {"max_num_seqs": 4, "num_threads": 1}


def test_a_process_that_is_killed_while_it_loads_is_a_line() -> None:
    """Messages that it has not read reset the stream: not even the end of it can be read."""
    mine, other = socket.socketpair()
    process = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"], stdin=subprocess.DEVNULL
    )
    load = load_message(None, SpeculativeConfig("off"), {}, ServeConfig())
    mine.sendall(b"unread")
    process.kill()
    process.wait()
    other.close()
    with mine, pytest.raises(EngineStoppedError) as error:
        greet(mine, load, process)
    assert str(error.value) == (
        "the engine's process was ended by signal 9 (SIGKILL) before the engine was loaded; is there memory for it?"
    )


@pytest.mark.parametrize("given", [{}, {"kv_memory_fraction": 0.5}, {"kv_cache_memory_bytes": 8 * 2**20}])
def test_an_engine_that_is_loaded_again_has_the_room_of_the_first(
    given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The most tokens of a request follow from the free memory, which is another one by then."""
    free = [60 * 2**20]
    monkeypatch.setattr(memory, "available_bytes", lambda device: free[0])
    off = SpeculativeConfig("off")
    load = load_message(None, off, {**ROOM, **given}, ServeConfig())
    first = EngineInfo.of(make_engine(None, off, load.engine))
    for free[0] in (40 * 2**20, 2**32):
        again = EngineInfo.of(make_engine(None, off, as_loaded(load, first).engine))
        assert first.differences(again) == ""
        assert (again.kv_bytes, again.num_slots) == (first.kv_bytes, first.num_slots)
    if not given:
        free[0] = 4 * 2**20
        assert "max_model_len" in first.differences(EngineInfo.of(make_engine(None, off, load.engine)))
