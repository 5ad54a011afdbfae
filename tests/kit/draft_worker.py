"""Draft workers in threads of the process, over real sockets, for tests."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from slipstream.config import EngineConfig, SpeculativeConfig
from slipstream.draft.remote.address import Address
from slipstream.draft.remote.options import ServedOptions
from slipstream.draft.remote.serving import serve_drafter
from slipstream.draft.remote.worker import DraftWorker


@contextmanager
def running_worker(
    target: str,
    draft: Mapping[str, Any],
    listen: str = "127.0.0.1:0",
    key: bytes = b"",
    **options: Any,
) -> Iterator[Address]:
    """Serves the drafter of the `speculative_config` `draft` for a target while the body runs; yields its address."""
    served = serve_drafter(
        EngineConfig(target), SpeculativeConfig.from_mapping(draft), ServedOptions(**options)
    )
    worker = DraftWorker(served, Address.parse(listen), key)
    found: list[Address] = []
    ready = threading.Event()

    def announce(address: Address) -> None:
        found.append(address)
        ready.set()

    thread = threading.Thread(target=worker.run, args=(announce,), daemon=True)
    thread.start()
    if not ready.wait(30):
        raise TimeoutError("the draft worker did not begin to listen")
    try:
        yield found[0]
    finally:
        worker.stop()
        thread.join(30)
