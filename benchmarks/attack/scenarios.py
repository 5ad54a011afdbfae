"""The attacks. Each is bounded in what it sends and stops when its time is over."""

from __future__ import annotations

import random
import socket
import string
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from urllib.parse import quote

from benchmarks.attack.target import Target

FORGED = "2026-01-01 00:00:00,000 INFO forged by a client"
"""A line that a client would like to see in the log."""
KEYS = ("the-first-key", "the-second-key")
MAX_DESCRIPTORS = 256
_MIB = 2**20
_VOCAB_SIZE = 4096
"""Vocabulary size of the embedded pair."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is done, and to a server that was started how."""

    what: str
    attack: Callable[[Target], None]
    arguments: tuple[str, ...] = ()
    """Arguments of `slipstream serve`."""
    max_descriptors: int | None = None
    key: str | None = None
    """With which the well-behaved clients ask."""


def _grammars(target: Target) -> None:
    letters = (string.ascii_letters + string.digits)[: target.num(40)]
    for letter in letters:
        if not target.has_time:
            return
        regex = f"({letter}{{1000}}){{1000}}"
        target.post("/v1/completions", {"prompt": "a", "structured_outputs": {"regex": regex}})


def _large_prompts(target: Target) -> None:
    bodies = [{"prompt": "a " * 2_000_000} for _ in range(target.num(6))]
    target.post_at_once("/v1/completions", bodies)


def _large_tokenize(target: Target) -> None:
    target.post_at_once("/tokenize", [{"prompt": "a " * 2_000_000} for _ in range(target.num(6))])


def _endless_header(target: Target) -> None:
    most = target.num(114) * _MIB
    num_bytes = 0
    with target.connect() as connection:
        try:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\nX: ")
            while num_bytes < most and target.has_time:
                connection.sendall(b"a" * _MIB)
                num_bytes += _MIB
            target.count("nothing said")
        except OSError:
            target.count("broken off")
    target.extra["header_mib_taken"] = num_bytes // _MIB


def _silent(target: Target) -> None:
    """Silent, half a head, half a body, and idle after an answer; held until the time is over."""
    begun = (
        b"",
        b"GET /health HTTP/1.1\r\nHost: a\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{",
        b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n",
    )
    num = target.num(400)
    with ExitStack() as stack:
        held: list[socket.socket] = []
        for number in range(num):
            try:
                connection = stack.enter_context(target.connect())
                connection.sendall(begun[number % len(begun)])
                held.append(connection)
            except OSError:
                target.count("no connection")
        time.sleep(min(40.0, target.left_s))
        num_open = sum(not _is_closed(connection) for connection in held)
    target.extra |= {"num_connections": len(held), "still_open_after_40_s": num_open}


def _is_closed(connection: socket.socket) -> bool:
    """Reads what was answered; nothing more means that it is open."""
    connection.setblocking(False)
    with suppress(BlockingIOError):
        try:
            while connection.recv(65536):
                pass
        except ConnectionError:
            pass
        return True
    return False


def _log_injection(target: Target) -> None:
    for ending in ("\n", "\r\n", "\u0085", "\u2028", "\x1b[2K\r"):
        target.get("/v1/x" + quote(ending + FORGED))
        target.post("/v1/completions", {"prompt": "a", "max_tokens": 1, "task": "t" + ending + FORGED})
        target.post("/v1/completions", {"prompt": "a", "max_tokens": 1, "model": "m" + ending + FORGED})
        target.post("/v1/completions", {"prompt": "a", "x" + ending + FORGED: 1})


def _stops(target: Target) -> None:
    """Stop strings, forbidden words and stop tokens as long as a body may hold."""
    rng = random.Random(0)

    def word(length: int) -> str:
        return "".join(rng.choices(string.ascii_lowercase, k=length))

    small = {"prompt": "Once", "max_tokens": 32, "ignore_eos": True}
    for _ in range(target.num(3)):
        bodies = [
            small | {"bad_words": [word(16_000) for _ in range(128)]},
            small | {"stop": [word(8_000) for _ in range(64)]},
            small | {"stop_token_ids": list(range(_VOCAB_SIZE)), "min_tokens": 31},
        ]
        if target.has_time:
            target.post_at_once("/v1/completions", bodies)


def _other_tenant(target: Target) -> None:
    """A prompt of one key's holder, asked for with another key."""
    prompt = [17 + number % 200 for number in range(601)]
    body = {"prompt": prompt, "max_tokens": 1, "user": "somebody"}
    target.post("/v1/completions", body, KEYS[0])
    said = target.post("/v1/completions", body, KEYS[1])
    details = said.get("usage", {}).get("prompt_tokens_details") or {}
    target.extra["cached_tokens_of_another_key"] = details.get("cached_tokens", 0)


SCENARIOS = {
    "grammars": Scenario("40 regular expressions (a{1000}){1000} of different letters", _grammars),
    "large_prompts": Scenario("6 completions of 'a ' times 2,000,000 at once", _large_prompts),
    "large_tokenize": Scenario("the same 6 texts to /tokenize", _large_tokenize),
    "endless_header": Scenario("one header of 114 MiB", _endless_header),
    "silent_connections": Scenario(
        f"400 silent, half-sent and idle connections to a server with {MAX_DESCRIPTORS} descriptors",
        _silent,
        max_descriptors=MAX_DESCRIPTORS,
    ),
    "other_tenant": Scenario(
        "a prompt of 601 tokens, asked for again with another key",
        _other_tenant,
        arguments=tuple(word for key in KEYS for word in ("--api-key", key)),
        key=KEYS[1],
    ),
    "log_injection": Scenario(
        "line ends and escape sequences in paths, tasks, models and names, the log as text",
        _log_injection,
        arguments=("--log-format", "text"),
    ),
    "stops": Scenario(
        "bad_words of 128 x 16 kB, 64 stop strings of 8 kB, a vocabulary of stop_token_ids, 3 of each", _stops
    ),
}
