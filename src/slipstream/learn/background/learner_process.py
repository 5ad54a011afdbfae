"""The learner's process as its server sees it: started, stopped and let go on, listened to, started again a few times.

It tells that it is alive between two steps of its work. Where it should work and nothing is heard of it for long, it
hangs: an alarm says so, and in the end it is killed and started again as one that died.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from slipstream.core.whole_files import write_whole
from slipstream.errors import ProtocolError
from slipstream.learn.background.learner import BEGUN
from slipstream.learn.background.messages import CODEC, DraftingCosts, LearnEvent, LearnMessage, LeaveToKeep
from slipstream.rpc.children import SocketChild, module_command
from slipstream.rpc.sockets import Outbox, next_body

logger = logging.getLogger(__name__)

MAX_STARTS = 4
"""A learner that died that often stays dead; serving goes on without."""
SILENT_S = 300.0
"""Without a word while it is not stopped, after which it is said to hang. It has the lowest priority: on a busy machine
a step may take long."""
KILL_S = 1800.0
"""The same, after which it is killed."""
_LONGEST_LOOK_S = 10.0
"""Between two calls of `watch` no more is counted as silence: this process itself may have been stopped."""
MAX_LOG_BYTES = 2**20
"""Bytes of the file that keeps what it writes on its standard error; beyond it the older half is dropped."""
_MAX_LINE = 4096


class LearnerProcess:
    """Used from one thread, but for `pause` and `resume`; `messages` are put in by another one."""

    def __init__(
        self,
        config: Mapping[str, Any],
        module: str = "slipstream.learn.background.learner",
        log: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`config` are the values of `WorkerConfig`; `module` is what runs in the process. Its standard error goes into
        the file `log`, where one is given."""
        self._log = None if log is None else LearnerLog(log)
        self._clock = clock
        self._watched_s = clock()
        self._silent_s = 0.0
        """While it was not stopped, since anything was heard of it."""
        self._lock = threading.Lock()
        """What was heard is of the process that runs."""
        self.argv = module_command(module, json.dumps(dict(config)))
        self.messages: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.num_deaths = 0
        self.fault = ""
        """Why nothing is learned now; empty while the process lives and is heard of."""
        self._costs: DraftingCosts | None = None
        self._said_costs: DraftingCosts | None = None
        """What the process that runs is to know and was sent so far: what it could not take is sent again."""
        self._signals = threading.Lock()
        self._has_begun = False
        self._paused_at_s: float | None = None
        self._rested_s = self._counted_rest_s = 0.0
        self._child: SocketChild | None = None
        self._outbox: Outbox | None = None

    @property
    def pid(self) -> int | None:
        """Return the process id; None while there is no process."""
        return None if self._child is None else self._child.process.pid

    def watch(self) -> None:
        """See whether it lives, and start it where it does not; never raises."""
        child = self._child
        if child is not None and child.process.poll() is None and not self._hangs(child.process):
            self._say_what_is_new()
            return
        if child is not None:
            self.num_deaths += 1
            with self._lock:
                self._child = None
            if self._silent_s < KILL_S:
                self._raise(f"the learner's process died with exit code {child.process.returncode}")
        if self.num_deaths >= MAX_STARTS:
            return
        try:
            self._start()
        except OSError as error:
            self.num_deaths += 1
            self._raise(f"the learner's process cannot be started: {error}")

    def _hangs(self, process: subprocess.Popen[bytes]) -> bool:
        """Count how long nothing was heard; True where it was so long that the process has been killed."""
        now_s, rested_s = self._clock(), self.rested_s
        ran_s = now_s - self._watched_s - (rested_s - self._counted_rest_s)
        self._silent_s += min(max(ran_s, 0.0), _LONGEST_LOOK_S)
        self._watched_s, self._counted_rest_s = now_s, rested_s
        if self._silent_s >= SILENT_S and not self.fault:
            self._raise(f"the learner's process hangs: nothing was heard of it for {SILENT_S:.0f} s")
        if self._silent_s < KILL_S:
            return False
        process.kill()
        process.wait()
        return True

    def _raise(self, fault: str) -> None:
        where = "" if self._log is None else f"; what it wrote is in {str(self._log.file)!r}"
        self.fault = fault + where
        logger.warning("learning: %s; serving goes on", self.fault)

    def pause(self) -> None:
        """Stop it where it is; from any thread. One that has not said that it has begun goes on: until then it might
        outlive this process."""
        with self._signals:
            if self._paused_at_s is None and self._has_begun and self._signal(signal.SIGSTOP):
                self._paused_at_s = self._clock()

    def resume(self) -> None:
        """Let it go on; from any thread."""
        with self._signals:
            if self._paused_at_s is not None and self._signal(signal.SIGCONT):
                self._count_rest()

    def let_keep(self) -> None:
        """Give it leave to write a version down; it was requested and is waited for a while."""
        self._say(LeaveToKeep())

    def _signal(self, number: signal.Signals) -> bool:
        child = self._child
        if child is None:
            return False
        child.process.send_signal(number)  # nothing, where it has ended
        return True

    def _count_rest(self) -> None:
        if self._paused_at_s is not None:
            self._rested_s += self._clock() - self._paused_at_s
        self._paused_at_s = None

    def tell_costs(self, base: float, version: float) -> None:
        """Have it judge by what drafting costs a step, in passes of the target: of the base drafter and of its
        versions."""
        self._costs = DraftingCosts(*(float(f"{cost:.2g}") for cost in (base, version)))
        self._say_what_is_new()

    @property
    def rests(self) -> bool:
        """Whether it is stopped."""
        return self._paused_at_s is not None

    @property
    def rested_s(self) -> float:
        """How long it was stopped so far, all processes together."""
        since_s = self._paused_at_s
        return self._rested_s + (0.0 if since_s is None else self._clock() - since_s)

    def close(self) -> None:
        """End it at once: what it had not kept is lost, and nothing that it had."""
        child, self._child = self._child, None
        if child is not None:
            child.process.kill()
            child.process.wait()

    def _start(self) -> None:
        child = SocketChild.start(
            self.argv,
            is_silent=True,
            read_errors=None if self._log is None else self._log.follow,
            # In a group of its own: a stopped one does not outlive a server that was killed. Linux ends it by what it
            # requested (`end_with_parent`); others hang up a stopped group whose last link to the session dies.
            process_group=0,
            OMP_NUM_THREADS="1",
            MKL_NUM_THREADS="1",
        )
        with self._signals:
            self._count_rest()
            self._child, self._has_begun = child, False
        self._outbox, self._said_costs = Outbox(child.socket, max_bytes=1), None
        self._silent_s, self._watched_s, self._counted_rest_s = 0.0, self._clock(), self.rested_s
        threading.Thread(target=self._listen, args=(child,), name="learn-messages", daemon=True).start()
        self._say_what_is_new()

    def _say_what_is_new(self) -> None:
        if self._costs is not None and self._costs != self._said_costs and self._say(self._costs):
            self._said_costs = self._costs

    def _say(self, message: LearnMessage) -> bool:
        """Send a message without waiting; False where it was not taken. Of one that hangs, one message waits."""
        if self._outbox is None:
            return False
        try:
            self._outbox.flush()
            if self._outbox.is_full:
                return False
            self._outbox.put(CODEC.frame(message))
        except OSError:  # it died: `watch` sees it
            return False
        return True

    def _listen(self, child: SocketChild) -> None:
        """Put what a process says into the queue until it ends, then close our end of the stream."""
        frames = CODEC.frames()
        with child.socket, contextlib.suppress(OSError, ProtocolError):
            while (body := next_body(child.socket, frames)) is not None:
                message = CODEC.read(body)
                if isinstance(message, LearnEvent):
                    self._heard(child, message)
                    self.messages.put({"event": message.event, **message.status})

    def _heard(self, child: SocketChild, message: LearnEvent) -> None:
        with self._lock:
            if child is self._child:  # no last words of one that died
                self._has_begun |= message.event == BEGUN
                self._silent_s = 0.0
                self.fault = ""


class LearnerLog:
    """`learner.log`, for its owner alone: why a learner died is read there.

    What cannot be written is lost, since nothing waits for it.
    """

    def __init__(self, file: Path, max_bytes: int = MAX_LOG_BYTES) -> None:
        self.file = file
        self._max_bytes = max_bytes

    def follow(self, stream: IO[str]) -> None:
        """Keep what comes until the stream ends; it is always read to its end, so that no writer ever waits."""
        with stream:
            while text := stream.readline(_MAX_LINE):
                try:
                    self.add(text)
                except OSError:
                    continue

    def add(self, text: str) -> None:
        """Append a text; raises `OSError`."""
        handle = os.open(self.file, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        with os.fdopen(handle, "ab") as stream:
            stream.write(text.encode("utf-8", "backslashreplace"))
            size = stream.tell()
        if size > self._max_bytes:
            data = self.file.read_bytes()
            half = len(data) - self._max_bytes // 2
            write_whole(self.file, data[data.find(b"\n", half) + 1 or half :], sync=True)
