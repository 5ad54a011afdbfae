"""The process in which grammars are tried before the engine's process compiles them.

llguidance aborts its process when memory runs out or a grammar is nested too deep; here that ends no request. Run as
`python -m slipstream.sampling.grammars.worker FD`, a `SocketChild`: it answers each `TrialRequest` with a `TrialAnswer`
and exits when the socket is closed. It imports neither torch nor Transformers.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from slipstream.core.bounded import BoundedDict
from slipstream.rpc.children import parent_socket
from slipstream.rpc.codec import Codec, WireMessage
from slipstream.rpc.sockets import next_body
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


class TrialMessage(WireMessage, frozen=True):
    """A message between the engine's process and the one in which grammars are tried."""


class TrialRequest(TrialMessage, tag="request", frozen=True):
    """What to do."""

    task: str
    """`hello`: nothing; `vocabulary`: keep `tokens`; `check`: read a grammar; `try`: compile it."""
    key: str = ""
    """Name of the vocabulary."""
    source: str = ""
    """The grammar."""
    tokens: ByteTokens | None = None


class TrialAnswer(TrialMessage, tag="answer", frozen=True):
    """What came of it."""

    error: str | None = None
    num_bytes: int = 0
    """What the compiled grammar takes."""
    is_unknown: bool = False
    """The vocabulary must be sent first."""
    ends: bool = False
    """Whether the process exits now."""


CODEC = Codec[TrialMessage](TrialRequest | TrialAnswer, max_bytes=2**30)


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

    sock, frames = parent_socket(), CODEC.frames()
    _limit_memory(MEMORY_BYTES + STACK_BYTES)
    vocabularies: BoundedDict[str, LLTokenizer] = BoundedDict(MAX_VOCABULARIES)
    baseline = heap_bytes()
    while (body := next_body(sock, frames)) is not None:
        request = CODEC.read(body)
        assert isinstance(request, TrialRequest)
        answer = TrialAnswer()
        if request.task == "vocabulary" and request.tokens is not None:
            wrapper = llguidance.TokenizerWrapper(request.tokens)
            vocabularies[request.key] = llguidance.LLTokenizer(
                wrapper, n_vocab=len(request.tokens.tokens), eos_token=request.tokens.ends
            )
            baseline = heap_bytes()
        elif request.task == "check":
            failed, messages = llguidance.LLMatcher.validate_grammar_with_warnings(
                request.source, limits=parser_limits()
            )
            answer = TrialAnswer(messages[0] if failed else None)
        elif request.task == "try" and request.key not in vocabularies:
            answer = TrialAnswer(is_unknown=True)
        elif request.task == "try":
            vocabularies.move_to_end(request.key)
            answer = _try(vocabularies[request.key], request.source)
        ends = request.task in ("check", "try") and left_over(baseline) > KEPT_BYTES
        sock.sendall(CODEC.frame(msgspec.structs.replace(answer, ends=ends)))
        if ends:
            return


def with_stack(work: Callable[[], None]) -> None:
    """Run `work` in a thread whose stack is `STACK_BYTES`."""
    before = threading.stack_size(STACK_BYTES)
    try:
        thread = threading.Thread(target=work)
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join()


def _try(vocabulary: LLTokenizer, source: str) -> TrialAnswer:
    """Compile a grammar."""
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
    return TrialAnswer(errors[0] if errors else None, max(num_bytes, heap_bytes() - before))


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
