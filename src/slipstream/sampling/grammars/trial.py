"""Compiles a grammar on trial in another process, because llguidance may abort it."""

from __future__ import annotations

import atexit
import contextlib
import errno
import hashlib
import json
import logging
import os
import pickle
import subprocess
import threading
from collections.abc import Sequence as Seq
from typing import Any

from slipstream.rpc.children import child_environment, module_command
from slipstream.sampling.grammars.worker import MEMORY_BYTES, write_message
from slipstream.text.byte_tokens import ByteTokens

logger = logging.getLogger(__name__)

DEADLINE_S = 10.0
"""Time limit for one grammar. A schema of 200 properties takes 0.04 s, one of 6,000 words 0.1 s."""
START_S = 60.0
"""Time limit for starting the worker, and for sending a vocabulary."""
WORKER = "slipstream.sampling.grammars.worker"
_PASSING = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN})
"""Errors of starting a process that are temporary."""


class TooComplexError(Exception):
    """The worker died of a grammar or exceeded the time limit; the message says which."""


class NoWorkerError(Exception):
    """The worker cannot be started at the moment; the message says why."""


class TrialProcess:
    """The worker process, started with the first grammar and restarted when it has died; shared by all engines.

    It runs a module of this package. Where processes cannot be started at all, that is logged once, and grammars are
    compiled without a trial. Where one cannot be started temporarily, such as without file descriptors,
    `NoWorkerError` is raised.
    """

    def __init__(self, command: Seq[str] | None = None) -> None:
        """`command` replaces this package's module, for tests."""
        self.command = command
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()
        self._has_answered = False
        self._known: set[str] = set()
        """Keys of the vocabularies that the current process has."""
        self._proven: set[str] = set()
        """Keys of vocabularies that some process has loaded; "" once some process has started."""
        self._cannot_start = False
        atexit.register(self.close)

    @property
    def process_id(self) -> int | None:
        """Of the process as it was last started; None where none was, or it has been ended."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process without waiting for it."""
        with self._lock, contextlib.suppress(NoWorkerError):
            self._running()

    def check(self, source: str) -> dict[str, Any] | None:
        """`{"error": ...}` for a grammar without a vocabulary; None where no worker can be started.

        Raises `TooComplexError` and `NoWorkerError`.
        """
        with self._lock:
            return self._ask("check", "", source) if self._is_ready() else None

    def try_(self, vocabulary: TrialVocabulary, source: str) -> dict[str, Any] | None:
        """`{"error": ..., "num_bytes": ...}` for a grammar over the vocabulary; otherwise as `check`."""
        with self._lock:
            for _ in range(2):  # it may have exited since, or dropped the vocabulary
                if not self._is_ready(vocabulary):
                    return None
                answer = self._ask("try", vocabulary.key, source)
                if "unknown" not in answer:
                    return answer
                self._known.discard(vocabulary.key)
            return None

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        self._known.clear()
        self._has_answered = False
        if process is not None and self._owner == os.getpid():
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()

    def _running(self) -> subprocess.Popen[bytes] | None:
        """The process, started if need be; None where processes cannot be started."""
        if self._owner != os.getpid():  # after a fork the worker is the parent's
            self._process, self._owner = None, os.getpid()
            self._known.clear()
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.close()
        if self._cannot_start:
            return None
        try:
            self._process = subprocess.Popen(
                self.command or module_command(WORKER),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=child_environment(MALLOC_ARENA_MAX="1"),
            )
        except OSError as error:
            if self._proven or error.errno in _PASSING:
                raise NoWorkerError(str(error)) from None
            self._do_without(str(error))
        return self._process

    def _do_without(self, reason: str) -> None:
        self._cannot_start = True
        logger.warning("grammars are compiled without a trial, because no process can be started: %s", reason)

    def _is_ready(self, vocabulary: TrialVocabulary | None = None) -> bool:
        """True where the process runs and has the vocabulary; a failure here is not caused by a grammar."""
        if self._running() is None:
            return False
        key = ""
        try:
            if not self._has_answered:
                self._ask("hello", key, "", START_S)
                self._has_answered = True
                self._proven.add(key)
            if vocabulary is not None and vocabulary.key not in self._known:
                key = vocabulary.key
                self._ask("vocabulary", key, vocabulary.tokens, START_S)
                self._known.add(key)
                self._proven.add(key)
        except TooComplexError:
            reason = "it ended, or did not answer, before its first grammar"
            if key in self._proven:
                raise NoWorkerError(reason) from None
            self._do_without(reason)
            return False
        return True

    def _ask(
        self, kind: str, key: str, content: ByteTokens | str, deadline_s: float | None = None
    ) -> dict[str, Any]:
        deadline_s = DEADLINE_S if deadline_s is None else deadline_s
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        was_late = threading.Event()

        def end() -> None:
            was_late.set()
            process.kill()

        timer = threading.Timer(deadline_s, end)
        timer.daemon = True
        timer.start()
        try:
            write_message(process.stdin, kind, key, content)
            line = process.stdout.readline()
        except OSError:  # it has died
            line = b""
        finally:
            timer.cancel()
        if line.endswith(b"\n"):
            answer: dict[str, Any] = json.loads(line)
            if answer.pop("ends", False):  # it exits now, so the next call must start another one
                self.close()
            return answer
        self.close()
        if was_late.is_set():
            raise TooComplexError(f"compiling takes more than {deadline_s:g} s")
        raise TooComplexError(
            f"compiling takes more than {MEMORY_BYTES >> 20:,} MiB, or it is nested too deep for the compiler"
        )


class TrialVocabulary:
    """A vocabulary and its hash as a key."""

    def __init__(self, tokens: ByteTokens) -> None:
        self.tokens = tokens
        self.key = hashlib.sha256(pickle.dumps(tokens)).hexdigest()


WORKER_OF_THIS_PROCESS = TrialProcess()
