"""The server that is asked, in a process of its own: `slipstream serve --learn` with a learner of other settings."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import IO, Any
from unittest import mock

import psutil

from benchmarks.learn_serving.steps import watched
from slipstream.config import SpeculativeConfig
from slipstream.engine.async_engine import AsyncEngine
from slipstream.engine.factory import make_engine
from slipstream.learn.session import SessionSettings
from slipstream.serve import learning, logs
from slipstream.serve.app import create_app
from slipstream.serve.config import ServeConfig
from slipstream.serve.lifecycle import DrainingServer
from slipstream.serve.network.listening import bind

OPEN_KEY, CLOSED_KEY = "key-of-the-open", "key-of-the-closed"
SILENT = "silent-tenant"
"""The `user` of whom nothing may be kept."""
DEPTH = 4
START_TIMEOUT_S = 120.0
STEPS_PATH = "/benchmark/steps"


@dataclass(frozen=True)
class ServerOptions:
    """What a server is started with."""

    floor: str
    """Folder of the draft model; empty for speculation off."""
    folder: str = ""
    """Where it learns; empty where it does not."""
    learn_bytes: int = 8 * 2**20
    max_num_seqs: int = 32
    worker: Mapping[str, Any] = field(default_factory=dict)
    """Values of `WorkerConfig`."""
    step_times: bool = False
    """Whether steps are timed and told at `STEPS_PATH`."""


class Server:
    """A running server. All that it might write outside of its folder it writes below `home`."""

    def __init__(self, options: ServerOptions, home: Path) -> None:
        """Starts it, and waits until it takes requests unless it is killed before."""
        home.mkdir(parents=True, exist_ok=True)
        names = ("HOME", "TMPDIR", "XDG_CACHE_HOME", "XDG_STATE_HOME")
        environment = {**os.environ, **dict.fromkeys(names, str(home)), "HF_HUB_OFFLINE": "1"}
        given = json.dumps(asdict(options))
        self._log: IO[bytes] = (home / "server.log").open("ab")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.learn_serving.server", given],
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
            cwd=Path(__file__).parent.parent.parent,
        )
        self.port = 0

    def wait(self) -> Server:
        """Until it takes requests; raises `RuntimeError` where it ends before."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the server ended with {self.process.wait()}; see its log")
        self.port = int(json.loads(line)["port"])
        return self

    @property
    def url(self) -> str:
        """URL of the server."""
        return f"http://127.0.0.1:{self.port}"

    def learner(self) -> psutil.Process | None:
        """The learner's process, None while there is none."""
        try:
            for child in psutil.Process(self.process.pid).children():
                if "slipstream.learn.worker" in child.cmdline():
                    return child
        except psutil.Error:
            pass
        return None

    def wait_for_learner(self, other_than: int = 0) -> psutil.Process:
        """The learner's process once it is there; raises `RuntimeError` where none comes."""
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline_s:
            found = self.learner()
            if found is not None and found.pid != other_than:
                return found
            time.sleep(0.02)
        raise RuntimeError("no learner was started")

    def kill(self) -> None:
        """SIGKILL, as a machine does that runs out of memory."""
        self.process.kill()
        self._end()

    def stop(self) -> None:
        """SIGTERM, and wait."""
        self.process.terminate()
        self._end()

    def _end(self) -> None:
        self.process.wait(60)
        if self.process.stdout is not None:
            self.process.stdout.close()
        self._log.close()

    def __enter__(self) -> Server:
        return self.wait()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.stop()


def main() -> None:
    """Serve until SIGTERM; the port is told on standard output."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("options")
    options = ServerOptions(**json.loads(parser.parse_args().options))
    config = ServeConfig(
        port=0,
        log_format="text",
        per_request_metrics=True,
        api_key=[OPEN_KEY, CLOSED_KEY],
        learn=options.folder or None,
        learn_bytes=options.learn_bytes,
        no_learn_tenant=[SILENT] if options.folder else [],
        no_learn_key=[CLOSED_KEY] if options.folder else [],
    )
    logs.configure(config)
    bound = bind(config.host, config.port)
    sizes = {"max_num_seqs": options.max_num_seqs, "kv_cache_bytes": 64 * 2**20, "max_model_len": 512}
    engine = make_engine(None, _speculation(options), sizes)
    settings = partial(SessionSettings, worker=dict(options.worker))
    with ExitStack() as stack:
        times = stack.enter_context(watched(engine)) if options.step_times else None
        with mock.patch.object(learning, "SessionSettings", settings):
            app = create_app(AsyncEngine(engine=engine), config, "embedded-pair")
        if times is not None:
            app.add_api_route(STEPS_PATH, times.facts)
        print(json.dumps({"port": bound.getsockname()[1]}), flush=True)
        DrainingServer(app).run(sockets=[bound])


def _speculation(options: ServerOptions) -> SpeculativeConfig:
    if not options.floor:
        return SpeculativeConfig.from_mapping({"method": "off"})
    floor = {"method": "draft_model", "model": options.floor, "num_speculative_tokens": DEPTH}
    return SpeculativeConfig.from_mapping(
        {"method": "versions", "drafter": floor} if options.folder else floor
    )


if __name__ == "__main__":
    main()
