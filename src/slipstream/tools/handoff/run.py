"""A hand-off from start to end: the servers, the watch over them, the probes, and the stop of all of them."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx2

from slipstream.core.meter import meter
from slipstream.errors import RemoteError, SlipstreamError
from slipstream.rpc.client import ServerAddress, find_model
from slipstream.tools.handoff.app import Job, WatchServer, create_watch_app
from slipstream.tools.handoff.canary import AlternatingCanary
from slipstream.tools.handoff.instance import InstanceProbes
from slipstream.tools.handoff.pairs import PairLog, ProbeSide
from slipstream.tools.handoff.plan import HandoffPlan, OffSide
from slipstream.tools.handoff.process import VllmProcess
from slipstream.tools.handoff.reading import parse_reading
from slipstream.tools.handoff.source import VllmSource
from slipstream.tools.handoff.watch import Watch, WatchedServer

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 0.5
"""How often it is seen whether the processes still run."""
ATTACH_TIMEOUT_S = 10.0
MAX_SHOWN = 100
"""Characters of a server's own line, while it starts."""


@contextmanager
def _starting(what: str) -> Iterator[Callable[[float, str], None]]:
    """What is called with the seconds that a start has taken, and the server's latest line."""
    with meter(what) as shown:

        def tell(passed_s: float, line: str) -> None:
            note = f"{passed_s:.0f} s" + (f", {line[-MAX_SHOWN:]}" if line else "")
            shown.show(0, None, line[-MAX_SHOWN:], f"{what}: {note}")

        yield tell


class Handoff:
    """One hand-off. `start`, then `serve` until a signal, then `stop`, which is safe at any time."""

    def __init__(self, plan: HandoffPlan) -> None:
        self.plan = plan
        self._on = self._made(plan.command, plan.url, {})
        self._off = self._made(plan.off_command, plan.off_url or plan.url, plan.off_environment)
        self._current = self._on
        self._server: WatchServer | None = None
        self._failure: str | None = None
        self._troubled: VllmProcess | None = None
        self._canary: AlternatingCanary | None = None
        self._instance: InstanceProbes | None = None
        self.watch: Watch | None = None

    @property
    def pids(self) -> list[int]:
        """Return the ids of the servers' processes that were started and run."""
        processes = (self._on, self._off)
        return [each.pid for each in processes if each and each.pid is not None and each.exit_code is None]

    @property
    def last_lines(self) -> list[str]:
        """What the server printed last that did not start, or ended by itself; empty without one."""
        return [] if self._troubled is None else self._troubled.last_lines

    def start(self) -> None:
        """Start what is to be started, wait until it is healthy, and check what was attached to.

        Raises `RemoteError` with vLLM's last lines where it ends, and `ConfigError` for what cannot be run.
        """
        plan = self.plan
        with interrupted_by_sigterm():
            if plan.off_side == OffSide.CANARY:
                self._begin(self._off, "vLLM starts, without speculation first")
                self._check_attached(plan.url)
                self._watch_it()
                self._first_round()
            else:
                self._begin(self._on, "vLLM starts")
                self._check_attached(plan.url)
                if plan.off_side == OffSide.INSTANCE and plan.off_url is not None:
                    self._begin(self._off, "the instance without speculation starts")
                    self._check_attached(plan.off_url)
                self._watch_it()

    def serve(self, bound: socket.socket) -> None:
        """Watch and show until a signal comes. Raises `RemoteError` where a server that was started ends by itself."""
        assert self.watch is not None
        pairs = self.pairs
        source = VllmSource(self.watch, pairs, _OFF_WORDS[self.plan.off_side], time.time())
        jobs: list[Job] = [self.watch.run, self._supervise]
        if self._instance is not None:
            jobs.append(self._instance.run)
        if self._canary is not None:
            jobs.append(self._canary.run)
        keys = (self.plan.api_key,) if self.plan.api_key else ()
        self._server = WatchServer(create_watch_app(source, [self._guarded(job) for job in jobs], keys))
        self._server.run(sockets=[bound])
        if self._failure is not None:
            raise RemoteError(self._failure)

    @property
    def pairs(self) -> PairLog | None:
        """The paired probes; None without an off side."""
        prober = self._instance or self._canary
        return None if prober is None else prober.log

    def end(self) -> None:
        """Have `serve` return, as a signal does; from any thread."""
        if self._server is not None:
            self._server.should_exit = True

    def stop(self) -> None:
        """Stop all processes that were started, each of them whatever interrupts the stop of another."""
        with ExitStack() as stops:
            for process in (self._on, self._off):
                if process is not None:
                    stops.callback(process.stop)

    # --- parts of the start -------------------------------------------------------------------------------------

    def _made(self, command: Any, url: str, environment: Any) -> VllmProcess | None:
        if command is None:
            return None
        key = {"VLLM_API_KEY": self.plan.api_key} if self.plan.api_key else {}
        return VllmProcess(command, url, {**key, **environment}, self.plan.log)

    def _begin(self, process: VllmProcess | None, what: str) -> None:
        """Start a process and wait; nothing where the server was attached to."""
        if process is None:
            return
        process.start()
        self._troubled = process
        with _starting(what) as tell:
            seconds = process.wait_until_healthy(self.plan.start_timeout_s, tell)
        self._troubled = None
        logger.info("healthy after %.1f s: %s", seconds, process.url)

    def _check_attached(self, url: str) -> None:
        """Raise `RemoteError` unless a vLLM can be read there."""
        headers = {"Authorization": f"Bearer {self.plan.api_key}"} if self.plan.api_key else {}
        try:
            response = httpx2.get(f"{url}/metrics", headers=headers, timeout=ATTACH_TIMEOUT_S)
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise RemoteError(f"cannot reach {url}: {error or type(error).__name__}") from None
        if response.status_code != 200:
            raise RemoteError(f"{url}/metrics answers HTTP {response.status_code}, so it cannot be watched")
        try:
            parse_reading(response.text)
        except RemoteError as error:
            raise RemoteError(f"{url} cannot be watched: {error}") from None

    def _watch_it(self) -> None:
        plan = self.plan
        model = plan.served_model or find_model(f"{plan.url}/v1", plan.api_key, ATTACH_TIMEOUT_S)
        self.watch = watch = Watch(WatchedServer(plan.url, model, plan.method, plan.api_key))
        if plan.probes is None or plan.off_side == OffSide.NONE:
            return
        on = ProbeSide(self._address(plan.url, model), plan.probes)
        if plan.off_side == OffSide.CANARY:
            self._canary = AlternatingCanary(
                on, self._restart, watch, plan.probes, plan.canary_pairs, plan.canary_every_s
            )
        elif plan.off_url is not None:
            name = find_model(f"{plan.off_url}/v1", plan.api_key, ATTACH_TIMEOUT_S)
            off = ProbeSide(self._address(plan.off_url, name), plan.probes)
            self._instance = InstanceProbes(on, off, watch, plan.probes, plan.probe_every_s)

    def _address(self, url: str, model: str) -> ServerAddress:
        return ServerAddress(f"{url}/v1", model, f"{url}/metrics", self.plan.api_key)

    def _first_round(self) -> None:
        """The canary's first round: it runs without speculation already, and has no traffic yet."""
        assert self._canary is not None
        asyncio.run(self._canary.alternate(restart_off=False))

    # --- while it runs ------------------------------------------------------------------------------------------

    async def _restart(self, with_speculation: bool) -> None:
        """Stop the server and start it anew on its port, the canary's way."""
        assert self.watch is not None
        for process in (self._on, self._off):
            if process is not None:
                self.watch.pause = "restarting for paired probes"
                await asyncio.to_thread(process.stop)
        self._current = process = self._on if with_speculation else self._off
        assert process is not None
        process.start()  # in this thread, which lives as long as the process
        self._troubled = process
        with _starting(f"vLLM restarts {'with' if with_speculation else 'without'} speculation") as tell:
            try:
                await asyncio.to_thread(process.wait_until_healthy, self.plan.start_timeout_s, tell)
            except asyncio.CancelledError:
                process.abandon()
                raise
        self.watch.pause, self._troubled = None, None

    async def _supervise(self) -> None:
        """End the watch where a process that was started ends by itself."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            watched = [self._current, self._off if self._canary is None else None]
            for process in watched:
                is_paused = self.watch is not None and self.watch.pause is not None
                if process is not None and process.exit_code is not None and not is_paused:
                    self._troubled = process
                    self._fail(process.obituary("while it served"))
                    return

    def _guarded(self, job: Job) -> Job:
        """The job. An error of its server ends the watch, and is raised by `serve`. One of ours is no reason to stop
        the server: it is logged, and shown instead of `live`."""

        async def run() -> None:
            try:
                await job()
            except SlipstreamError as error:
                self._fail(str(error))
            except Exception as error:
                logger.exception("a part of the watch has ended")
                assert self.watch is not None
                self.watch.fault = f"a part of the watch has ended: {type(error).__name__}: {error}"

        return run

    def _fail(self, why: str) -> None:
        self._failure = why
        self.end()


_OFF_WORDS = {
    OffSide.NONE: "",
    OffSide.INSTANCE: "a second instance without speculation",
    OffSide.CANARY: "the same server, restarted without speculation",
}


@contextmanager
def interrupted_by_sigterm() -> Iterator[None]:
    """SIGTERM is as Ctrl-C meanwhile, so that what was started is stopped. Does nothing outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(sig: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
