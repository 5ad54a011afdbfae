"""The learner's process as its server sees it: started, told to rest, listened to, started again a few times."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import IO, Any

from slipstream.learn.worker import COSTS, GO, REST

logger = logging.getLogger(__name__)

MAX_STARTS = 4
"""A learner that died that often stays dead; serving goes on without."""


class LearnerProcess:
    """Used from one thread; `messages` are put in by another one."""

    def __init__(self, config: Mapping[str, Any], module: str = "slipstream.learn.worker") -> None:
        """`config` are the values of `WorkerConfig`; `module` is what runs in the process."""
        self._argv = [sys.executable, "-m", module, json.dumps(dict(config))]
        self.messages: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.num_deaths = 0
        self.fault = ""
        """Why nothing is learned now; empty while the process lives."""
        self._rests = False
        self._costs = ""
        self._process: subprocess.Popen[str] | None = None

    @property
    def pid(self) -> int | None:
        """Of the process; None while there is none."""
        return None if self._process is None else self._process.pid

    def watch(self) -> None:
        """See whether it lives, and start it where it does not; never raises."""
        process = self._process
        if process is not None and process.poll() is None:
            return
        if process is not None:
            self.num_deaths += 1
            self._process = None
            _hang_up(process)
            self.fault = f"the learner's process died with exit code {process.returncode}"
            logger.warning("learning: %s; serving goes on", self.fault)
        if self.num_deaths >= MAX_STARTS:
            return
        try:
            self._start()
        except OSError as error:
            self.num_deaths += 1
            self.fault = f"the learner's process cannot be started: {error}"
            logger.warning("learning: %s; serving goes on", self.fault)

    def rest(self, rests: bool) -> None:
        """Have it rest, or go on."""
        if rests != self._rests:
            self._rests = rests
            self._say(REST if rests else GO)

    def tell_costs(self, floor: float, version: float) -> None:
        """Have it judge by what drafting costs a step, in passes of the target: of the floor and of its versions."""
        costs = f"{COSTS} {floor:.2g} {version:.2g}"
        if costs != self._costs:
            self._costs = costs
            self._say(costs)

    @property
    def rests(self) -> bool:
        """Whether it was told to rest."""
        return self._rests

    def close(self) -> None:
        """End it at once: what it had not kept is lost, and nothing that it had."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            _hang_up(process)

    def _start(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        process = subprocess.Popen(
            self._argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        self._process = process
        threading.Thread(
            target=self._listen, args=(process.stdout,), name="learn-messages", daemon=True
        ).start()
        if self._rests:
            self._say(REST)
        if self._costs:
            self._say(self._costs)

    def _say(self, line: str) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):  # it died; `watch` sees that
                self._process.stdin.write(line + "\n")
                self._process.stdin.flush()

    def _listen(self, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                with contextlib.suppress(ValueError):
                    message = json.loads(line)
                    if isinstance(message, dict):
                        if message.get("event") == "ready":
                            self.fault = ""
                        self.messages.put(message)


def _hang_up(process: subprocess.Popen[str]) -> None:
    """Close our end of what the process read; what it wrote is closed where it is listened to."""
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()
