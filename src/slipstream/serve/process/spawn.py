"""Starts the engine's process, before anything heavy is imported here: both processes then import side by side."""

from __future__ import annotations

import socket
import subprocess
from dataclasses import dataclass

from slipstream.rpc.children import child_environment, module_command

WORKER = "slipstream.serve.process.worker"


@dataclass(frozen=True, slots=True)
class SpawnedEngine:
    """A process that waits to be told what to load, and the server's end of the stream to it."""

    socket: socket.socket
    process: subprocess.Popen[bytes]

    def kill(self) -> None:
        """End it at once."""
        self.socket.close()
        self.process.kill()
        self.process.wait()


def spawn_engine() -> SpawnedEngine:
    """A new process for an engine."""
    mine, other = socket.socketpair()
    with other:
        process = subprocess.Popen(
            module_command(WORKER, str(other.fileno())),
            pass_fds=[other.fileno()],
            stdin=subprocess.DEVNULL,
            env=child_environment(),
        )
    return SpawnedEngine(mine, process)
