"""Starts the engine's process, before anything heavy is imported here: both processes then import side by side."""

from __future__ import annotations

from slipstream.rpc.children import SocketChild, module_command

WORKER = "slipstream.serve.process.worker"


def spawn_engine() -> SocketChild:
    """A new process, which waits for what to load."""
    return SocketChild.start(module_command(WORKER))
