"""The server process: it listens, serves, and on a signal drains before it exits."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from functools import partial
from types import FrameType
from typing import Any, cast

import uvicorn
from fastapi import FastAPI

from slipstream.serve.network.connection import Connection
from slipstream.serve.network.connections import Connections
from slipstream.serve.service import Service

logger = logging.getLogger(__name__)

_LAST_WRITES_S = 5
"""Time for the last bytes of aborted responses to reach their clients."""


class DrainingServer(uvicorn.Server):
    """Drains on SIGTERM and SIGINT.

    From the first signal on new requests are refused, /ready answers 503, and answers under way continue. The
    server exits when they have ended, or after `grace_period_s`, when they are aborted with an error. A second
    signal aborts them at once.
    """

    def __init__(self, app: FastAPI) -> None:
        self._service: Service = app.state.service
        config = self._service.config
        connections = Connections(config, self._service.metrics)
        super().__init__(
            uvicorn.Config(
                app,
                http=cast(Any, partial(Connection, limits=config, connections=connections)),
                ws="none",  # web sockets would bypass the limits
                backlog=connections.backlog,
                log_config=None,
                access_log=False,
                timeout_graceful_shutdown=_LAST_WRITES_S,
                lifespan="on",
            )
        )
        self._deadline_s: float | None = None
        self._announced = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and then say so: who reads that line may connect at once."""
        await super().startup(sockets)
        if not self.started:
            return
        for bound in sockets or []:
            host, port = bound.getsockname()[:2]
            logger.info("listening", extra={"fields": {"host": host, "port": port}})
            logger.info("API: %s/v1", address(host, port))
            logger.info("dashboard: %s/dashboard", address(host, port))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal: the first begins the drain, the second ends it."""
        grace_s = self._service.config.grace_period_s
        self._deadline_s = time.monotonic() + (grace_s if self._deadline_s is None else 0.0)
        self._service.admission.draining = True

    async def on_tick(self, counter: int) -> bool:
        """Called every tenth of a second; True when the server shall exit."""
        if await super().on_tick(counter):
            return True
        if self._deadline_s is None:
            return False
        num_answers = self._service.admission.num_answers
        if not self._announced:  # not in the signal's handler, which may have interrupted a line of the log
            self._announced = True
            grace_s = self._service.config.grace_period_s
            message = f"draining, {num_answers} under way, up to {grace_s:g} s"
            fields = {"num_answers": num_answers, "grace_period_s": grace_s}
            logger.info(message, extra={"fields": fields})
        if num_answers == 0:
            return True
        if time.monotonic() < self._deadline_s:
            return False
        logger.warning("answers are broken off", extra={"fields": {"num_answers": num_answers}})
        await asyncio.to_thread(self._service.engine.close)
        return True


def address(host: str, port: int) -> str:
    """The URL to open on this machine for a server that listens there; every interface is `localhost` here."""
    if host in ("0.0.0.0", "::"):
        host = "localhost"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
