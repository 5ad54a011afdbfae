"""The process in which grammars are tried before the engine's process compiles them.

llguidance aborts its process when memory runs out or a grammar is nested too deep; here that ends no request. Run as
`python -m slipstream.sampling.grammars.worker`: it reads pickled messages from its standard input, answers each with a
line of JSON, and exits at the end of its input. It imports neither torch nor Transformers.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pickle
import random
import signal
import struct
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from slipstream.core.bounded import BoundedDict
from slipstream.sampling.grammars.footprint import heap_bytes
from slipstream.text.byte_tokens import ByteTokens

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MEMORY_BYTES = 1 << 30
"""Address space for compiling, beyond what the process uses at its start; `STACK_BYTES` is added."""
STACK_BYTES = 256 * 2**20
"""Stack of the compiling thread; memory is used only as needed. llguidance recurses for every rule in a chain of rules:
a few thousand rules overflow the usual 8 MiB, which aborts the process."""
WALK_TOKENS = 8
"""Tokens generated after compiling: some grammars exceed a limit only after their first tokens."""
MAX_VOCABULARIES = 4
KEPT_BYTES = 64 * 2**20
"""A worker with more memory left allocated after a grammar exits, and a new one is started."""
_NOT_TOO_COMPLEX = ("NoExtension", "Parser Error: token")
"""Prefixes of llguidance's errors that do not mean that a limit was exceeded."""


def parser_limits() -> LLParserLimits:
    """llguidance's limits for compiling a grammar and for each token.

    The unit of fuel is an expression of about 200 bytes: 100,000 are 19 MiB and 0.3 s, 25,000 are 4 MiB and 0.1 s.
    Schemas of 200 properties, 6,000 words or 10 formats, over 4,000 tokens or 128,000, take less than a fifth.
    """
    from llguidance import LLParserLimits

    return LLParserLimits(initial_lexer_fuel=100_000, step_lexer_fuel=25_000, max_lexer_states=50_000)


def main() -> None:
    """Answer messages until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the engine's process, which closes the input
    import llguidance

    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    _limit_memory(MEMORY_BYTES + STACK_BYTES)
    vocabularies: BoundedDict[str, LLTokenizer] = BoundedDict(MAX_VOCABULARIES)
    settled = heap_bytes()
    while (message := read_message(sys.stdin.buffer)) is not None:
        answer: dict[str, Any] = {}
        kind, key, content = message
        if kind == "hello":
            pass
        elif kind == "vocabulary":
            wrapper = llguidance.TokenizerWrapper(content)
            vocabularies[key] = llguidance.LLTokenizer(
                wrapper, n_vocab=len(content.tokens), eos_token=content.ends
            )
            settled = heap_bytes()
        elif kind == "check":
            failed, messages = llguidance.LLMatcher.validate_grammar_with_warnings(
                content, limits=parser_limits()
            )
            answer = {"error": messages[0] if failed else None}
        elif key not in vocabularies:
            answer = {"unknown": key}
        else:
            vocabularies.move_to_end(key)
            answer = _try(vocabularies[key], content)
        answer["ends"] = kind in ("check", "try") and left_over(settled) > KEPT_BYTES
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()
        if answer["ends"]:
            return


def read_message(stream: IO[bytes]) -> tuple[str, str, Any] | None:
    """The next message: (kind, vocabulary's key, `ByteTokens` or grammar); None at the end of the input."""
    head = stream.read(8)
    if len(head) < 8:
        return None
    message: tuple[str, str, Any] = pickle.loads(stream.read(struct.unpack("<Q", head)[0]))
    return message


def write_message(stream: IO[bytes], kind: str, key: str, content: ByteTokens | str) -> None:
    """Write a message for `read_message`."""
    data = pickle.dumps((kind, key, content))
    stream.write(struct.pack("<Q", len(data)) + data)
    stream.flush()


def with_stack(work: Callable[[], None]) -> None:
    """Run `work` in a thread whose stack is `STACK_BYTES`."""
    before = threading.stack_size(STACK_BYTES)
    try:
        thread = threading.Thread(target=work)
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join()


def _try(vocabulary: LLTokenizer, source: str) -> dict[str, Any]:
    """Compile a grammar: `{"error": message or None, "num_bytes": size of the compiled grammar}`."""
    from llguidance import LLMatcher

    made: list[LLMatcher] = []
    errors: list[str] = []
    before = heap_bytes()

    def compile_() -> None:
        try:
            matcher = LLMatcher(vocabulary, source, log_level=0, limits=parser_limits())
            matcher.compute_bitmask()
            made.append(matcher)
        except BaseException as error:
            errors.append(str(error) or type(error).__name__)

    with_stack(compile_)
    num_bytes = heap_bytes() - before
    if made:
        if not made[0].is_error():
            _walk(made[0])
        error = made[0].get_error()
        if error and not error.startswith(_NOT_TOO_COMPLEX):
            errors.append(error)
    return {"error": errors[0] if errors else None, "num_bytes": max(num_bytes, heap_bytes() - before)}


def _walk(matcher: LLMatcher) -> None:
    """Generate a short text at random, with a fixed seed."""
    rng = random.Random(0)
    for _ in range(WALK_TOKENS):
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        if matcher.is_error() or matcher.is_stopped() or not mask:
            return
        at = rng.randrange(mask.bit_length())
        above = mask >> at
        token = at + (above & -above).bit_length() - 1
        if not matcher.consume_token(token):
            return


def _limit_memory(num_bytes: int) -> None:
    """Limit the process to that much more address space, where the system supports it."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        wanted = used + num_bytes if most == resource.RLIM_INFINITY else min(used + num_bytes, most)
        resource.setrlimit(resource.RLIMIT_AS, (wanted, most))


def left_over(before: int) -> int:
    """Bytes allocated beyond `before`, after returning free memory to the system."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    return heap_bytes() - before


if __name__ == "__main__":
    main()
