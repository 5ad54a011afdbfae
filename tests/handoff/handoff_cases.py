"""The fake vLLM as a command, and free ports."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slipstream.tools.handoff.plan import ServeCommand
from slipstream.tools.handoff.process import VllmProcess

HERE = Path(__file__).parent
SPECULATION = ("--speculative-config", json.dumps({"method": "ngram", "num_speculative_tokens": 3}))


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


def fake_command(folder: Path) -> str:
    """A `vllm` in a folder of its own."""
    path = folder / "vllm"
    program = f"import runpy; runpy.run_path({str(HERE / 'fake_vllm.py')!r}, run_name='__main__')"
    path.write_text(f"#!{sys.executable}\n{program}\n")
    path.chmod(0o755)
    return str(path)


def serve_command(vllm: str, port: int, *extra: str, speculates: bool = True) -> list[str]:
    setting = SPECULATION if speculates else ()
    return ServeCommand(vllm, "some/model", "127.0.0.1", port, setting, extra).words()


@contextmanager
def running(command: list[str], port: int, **options: Any) -> Iterator[VllmProcess]:
    """A started and healthy fake."""
    process = VllmProcess(command, f"http://127.0.0.1:{port}", **options)
    try:
        process.start()
        process.wait_until_healthy(30, lambda passed_s, line: None)
        yield process
    finally:
        process.stop(grace_s=5)


def is_alive(pid: int) -> bool:
    """True where the process runs; one that ended and was not waited for does not."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
