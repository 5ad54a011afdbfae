"""The server that is asked, in a process of its own: `slipstream serve --learn` with a learner of other settings."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import psutil

from benchmarks.harness.processes import Server
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

    base: str
    """Folder of the draft model; empty for speculation off."""
    folder: str = ""
    """Where it learns; empty where it does not."""
    learn_bytes: int = 8 * 2**20
    max_num_seqs: int = 32
    worker: Mapping[str, Any] = field(default_factory=dict)
    """Values of `WorkerConfig`."""
    step_times: bool = False
    """Whether steps are timed and told at `STEPS_PATH`."""


class LearningServer(Server):
    """A running server. All that it might write outside of its folder it writes below `home`."""

    def __init__(self, options: ServerOptions, home: Path) -> None:
        """Starts it; `wait` until it takes requests unless it is killed before."""
        home.mkdir(parents=True, exist_ok=True)
        names = ("HOME", "TMPDIR", "XDG_CACHE_HOME", "XDG_STATE_HOME")
        environment = {**dict.fromkeys(names, str(home)), "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-m", "benchmarks.learn_serving.server", json.dumps(asdict(options))]
        super().__init__(command, home / "server.log", environment)

    def learner(self) -> psutil.Process | None:
        """The learner's process, None while there is none."""
        with suppress(psutil.Error):
            for child in psutil.Process(self.process.pid).children():
                if "slipstream.learn.background.learner" in child.cmdline():
                    return child
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


def main() -> None:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("options")
    parser.add_argument("--port", type=int)
    given = parser.parse_args()
    options = ServerOptions(**json.loads(given.options))
    config = ServeConfig(
        port=given.port,
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
            app.add_api_route(STEPS_PATH, times.status)
        DrainingServer(app).run(sockets=[bound])


def _speculation(options: ServerOptions) -> SpeculativeConfig:
    if not options.base:
        return SpeculativeConfig.from_mapping({"method": "off"})
    base = {"method": "draft_model", "model": options.base, "num_speculative_tokens": DEPTH}
    return SpeculativeConfig.from_mapping({"method": "versions", "drafter": base} if options.folder else base)


if __name__ == "__main__":
    main()
