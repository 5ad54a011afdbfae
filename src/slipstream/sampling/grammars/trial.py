"""Compiles a grammar on trial in another process, because llguidance may abort it."""

from __future__ import annotations

import atexit
import contextlib
import errno
import hashlib
import logging
import os
import threading
from collections.abc import Sequence as Seq

from slipstream.rpc.children import SocketChild, module_command
from slipstream.rpc.sockets import next_body
from slipstream.sampling.grammars.worker import CODEC, MEMORY_BYTES, TrialAnswer, TrialRequest
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
        self._child: SocketChild | None = None
        self._frames = CODEC.frames()
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
        """Return the id of the process as it was last started; None where none was, or it has been ended."""
        return None if self._child is None else self._child.process.pid

    def start(self) -> None:
        """Start the process without waiting for it."""
        with self._lock, contextlib.suppress(NoWorkerError):
            self._running()

    def check(self, source: str) -> TrialAnswer | None:
        """What is wrong with a grammar without a vocabulary; None where no worker can be started.

        Raises `TooComplexError` and `NoWorkerError`.
        """
        with self._lock:
            return self._call(TrialRequest("check", source=source)) if self._is_ready() else None

    def try_(self, vocabulary: TrialVocabulary, source: str) -> TrialAnswer | None:
        """What comes of compiling a grammar over the vocabulary; otherwise as `check`."""
        with self._lock:
            for _ in range(2):  # it may have exited since, or dropped the vocabulary
                if not self._is_ready(vocabulary):
                    return None
                answer = self._call(TrialRequest("try", vocabulary.key, source))
                if not answer.is_unknown:
                    return answer
                self._known.discard(vocabulary.key)
            return None

    def close(self) -> None:
        """End the process."""
        child, self._child = self._child, None
        self._known.clear()
        self._has_answered = False
        if child is not None and self._owner == os.getpid():
            child.kill()

    def _running(self) -> SocketChild | None:
        """The process, started if need be; None where processes cannot be started."""
        if self._owner != os.getpid():  # after a fork the worker is the parent's
            self._child, self._owner = None, os.getpid()
            self._known.clear()
        if self._child is not None and self._child.process.poll() is None:
            return self._child
        self.close()
        if self._cannot_start:
            return None
        try:
            command = self.command or module_command(WORKER)
            self._child = SocketChild.start(command, is_silent=True, MALLOC_ARENA_MAX="1")
            self._frames = CODEC.frames()
        except OSError as error:
            if self._proven or error.errno in _PASSING:
                raise NoWorkerError(str(error)) from None
            self._do_without(str(error))
        return self._child

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
                self._call(TrialRequest("hello"), START_S)
                self._has_answered = True
                self._proven.add(key)
            if vocabulary is not None and vocabulary.key not in self._known:
                key = vocabulary.key
                self._call(TrialRequest("vocabulary", key, tokens=vocabulary.tokens), START_S)
                self._known.add(key)
                self._proven.add(key)
        except TooComplexError:
            reason = "it ended, or did not answer, before its first grammar"
            if key in self._proven:
                raise NoWorkerError(reason) from None
            self._do_without(reason)
            return False
        return True

    def _call(self, request: TrialRequest, deadline_s: float | None = None) -> TrialAnswer:
        deadline_s = DEADLINE_S if deadline_s is None else deadline_s
        assert self._child is not None
        sock, body, is_late = self._child.socket, None, False
        try:
            sock.settimeout(deadline_s)
            sock.sendall(CODEC.frame(request))
            body = next_body(sock, self._frames)
        except TimeoutError:
            is_late = True
        except OSError:  # it has died
            pass
        answer = None if body is None else CODEC.read(body)
        if (
            not isinstance(answer, TrialAnswer) or answer.ends
        ):  # it exits now: the next call must start another one
            self.close()
        if isinstance(answer, TrialAnswer):
            return answer
        if is_late:
            raise TooComplexError(f"compiling takes more than {deadline_s:g} s")
        raise TooComplexError(
            f"compiling takes more than {MEMORY_BYTES >> 20:,} MiB, or it is nested too deep for the compiler"
        )


class TrialVocabulary:
    """A vocabulary and its hash as a key."""

    def __init__(self, tokens: ByteTokens) -> None:
        self.tokens = tokens
        self.key = hashlib.sha256(CODEC.frame(TrialRequest("vocabulary", tokens=tokens))).hexdigest()


WORKER_OF_THIS_PROCESS = TrialProcess()
