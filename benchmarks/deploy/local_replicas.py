"""Replicas as processes of this machine, kept alive without a cluster."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import signal
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from slipstream.deploy.process import ReplicaDescription
from slipstream.errors import DeployError
from slipstream.rpc.children import child_environment, module_command

logger = logging.getLogger(__name__)

MAX_BACKOFF_S = 30.0
MAX_LINE_BYTES = 2**20
_REPLICA = "slipstream.deploy.process"


@dataclass(slots=True)
class _Slot:
    """A place for a replica, filled by one process after another."""

    number: int
    process: asyncio.subprocess.Process | None = None
    address: tuple[str, int] | None = None
    replica: str = ""
    num_starts: int = 0


class LocalReplicas:
    """Starts replicas, and starts others where they end."""

    def __init__(
        self,
        num_replicas: int,
        model: str | None = None,
        *,
        speculative_config: Mapping[str, Any] | None = None,
        engine_options: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        beat_s: float = 0.25,
    ) -> None:
        """`environment` is added to this process's own."""
        self.secret = secrets.token_hex(16)
        self._described = ReplicaDescription(
            id="",
            secret=self.secret,
            model=model,
            speculative_config=None if speculative_config is None else dict(speculative_config),
            engine_options=dict(engine_options or {}),
            beat_s=beat_s,
        )
        self._environment = child_environment(**(environment or {}))
        self._slots = [_Slot(number) for number in range(num_replicas)]
        self._keepers: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start all; raises `DeployError` where the first one cannot serve, with its reason."""
        await asyncio.gather(*(self._start(slot) for slot in self._slots))
        self._keepers = [asyncio.create_task(self._keep(slot)) for slot in self._slots]

    async def discover(self) -> list[tuple[str, int]]:
        """The addresses of those that serve."""
        return [slot.address for slot in self._slots if slot.address is not None]

    def pids(self) -> dict[str, int]:
        """Replica to process id, of those that serve."""
        return {
            slot.replica: slot.process.pid
            for slot in self._slots
            if slot.process is not None and slot.address is not None
        }

    async def close(self) -> None:
        """End all processes."""
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        for slot in self._slots:
            if slot.process is not None and slot.process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    slot.process.send_signal(signal.SIGCONT)
                    slot.process.kill()
                await slot.process.wait()

    async def _start(self, slot: _Slot) -> None:
        slot.num_starts += 1
        slot.replica = f"replica-{slot.number}-{slot.num_starts}"
        described = replace(self._described, id=slot.replica)
        slot.process = await asyncio.create_subprocess_exec(
            *module_command(_REPLICA),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=self._environment,
            limit=MAX_LINE_BYTES,
        )
        assert slot.process.stdin is not None
        assert slot.process.stdout is not None
        slot.process.stdin.write(described.as_json().encode() + b"\n")
        line = await slot.process.stdout.readline()
        try:
            said = json.loads(line)
        except ValueError:
            said = {"error": f"its process ended with status {await slot.process.wait()}"}
        if "error" in said:
            raise DeployError(f"replica {slot.number} cannot serve: {said['error']}")
        slot.address = said["host"], said["port"]

    async def _keep(self, slot: _Slot) -> None:
        """Start another process whenever one has ended; later and later where they do not even begin to serve."""
        backoff_s = 0.1
        while True:
            assert slot.process is not None
            await slot.process.wait()
            slot.address = None
            logger.warning("%s has ended with status %s", slot.replica, slot.process.returncode)
            try:
                await self._start(slot)
                backoff_s = 0.1
            except DeployError as error:
                logger.warning("%s", error)
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)
