"""A replica as a process of its own: `python -m slipstream.deploy.process` with a description as JSON on stdin.

It prints its address as a line of JSON once it can serve, drains at SIGTERM, and ends when its stdin is closed, so that
none is left behind by a parent that was killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import threading
from dataclasses import asdict, dataclass, field
from typing import Any

from slipstream.deploy.fleet import ReplicaInfo
from slipstream.deploy.identity import fingerprint_of
from slipstream.deploy.replica import BEAT_S, ReplicaServer
from slipstream.deploy.served import engine_info
from slipstream.engine.async_engine import AsyncEngine
from slipstream.errors import ConfigError, SlipstreamError


@dataclass(frozen=True, kw_only=True)
class ReplicaDescription:
    """What a replica's process is started with."""

    id: str
    secret: str = field(repr=False)
    model: str | None = None
    speculative_config: dict[str, Any] | None = None
    engine_options: dict[str, Any] = field(default_factory=dict)
    host: str = "127.0.0.1"
    port: int = 0
    beat_s: float = BEAT_S
    drain_s: float = 30.0
    generation: str = ""
    """Generation of the settings that it was loaded by."""

    def as_json(self) -> str:
        """A line for stdin."""
        return json.dumps(asdict(self))


async def start_replica(engine: AsyncEngine, described: ReplicaDescription) -> tuple[ReplicaServer, str, int]:
    """Serve `engine` as a replica; returns the server, its host and its port."""
    inner = engine.engine
    if inner.model.encoded_shapes:
        raise ConfigError("a fleet does not serve encoder-decoders; use slipstream serve")
    info = ReplicaInfo(
        described.id, fingerprint_of(inner), inner.config.max_num_seqs, inner.memory_plan.num_slots
    )
    about = {**engine_info(inner), "generation": described.generation}
    server = ReplicaServer(engine, info, described.secret, described.beat_s, about)
    host, port = await server.start(described.host, described.port)
    return server, host, port


async def _serve(described: ReplicaDescription) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    engine = AsyncEngine(
        described.model,
        speculative_config=described.speculative_config,
        stream_interval_s=0.0,
        **described.engine_options,
    )
    server, host, port = await start_replica(engine, described)
    print(json.dumps({"host": host, "port": port}), flush=True)
    parent_left = asyncio.Event()
    watch = threading.Thread(target=_wait_for_parent, args=(loop, parent_left), daemon=True)
    watch.start()
    ends = [asyncio.create_task(event.wait()) for event in (stop, parent_left)]
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    for end in ends:
        end.cancel()
    if stop.is_set():
        await server.drain(described.drain_s)
    await server.close()
    await asyncio.to_thread(engine.close)


def _wait_for_parent(loop: asyncio.AbstractEventLoop, left: asyncio.Event) -> None:
    """Wait for the end of stdin; without Python's own lock on it, which the end of this process must not wait for."""
    while os.read(0, 4096):
        pass
    with contextlib.suppress(RuntimeError):  # the loop is closed: the process ends already
        loop.call_soon_threadsafe(left.set)


def main() -> int:
    """Serve until it is stopped; returns the exit status."""
    described = ReplicaDescription(**json.loads(sys.stdin.readline()))
    try:
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(_serve(described))
    except SlipstreamError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
