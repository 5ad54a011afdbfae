"""Compiles a request's structured output into a grammar over the target's tokens."""

from __future__ import annotations

import copy
import json
import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from slipstream.core.request import tenant_account
from slipstream.errors import RequestError
from slipstream.sampling.grammars.footprint import GrammarMemory, heap_bytes
from slipstream.sampling.grammars.grammar import Grammar, bits, is_dead_end
from slipstream.sampling.grammars.trial import (
    WORKER_OF_THIS_PROCESS,
    NoWorkerError,
    TooComplexError,
    TrialVocabulary,
)
from slipstream.sampling.grammars.worker import STACK_BYTES, TrialAnswer, parser_limits
from slipstream.sampling.structured import CONSTRAINTS, StructuredOutput
from slipstream.text.byte_tokens import ByteTokens
from slipstream.text.token_bytes import TokenBytes

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

logger = logging.getLogger(__name__)
T = TypeVar("T")
R = TypeVar("R")
_Key = tuple[str, StructuredOutput]
"""A tenant, and the grammar that it requests."""

MAX_COMPILED = 64
"""Compiled grammars and refusals that are cached. Beyond it the least recently used one makes room, of the account that
holds the most."""
MAX_SOURCE_BYTES = 128 * 2**10
"""The largest schema, expression, grammar or choice. The compiler's time, partly quadratic, and its recursion depth
grow with it."""
MAX_COMPILED_BYTES = 128 * 2**20
"""Total size of the cached grammars."""
MAX_FORM_BYTES = 16 * 2**20
"""The largest compiled grammar; the largest schemas that were tested take 3 MiB."""
WHITESPACE = r" |\r?\n[ \t]{0,40}"
"""Whitespace allowed between JSON's tokens: a space, or a new line and its indentation. JSON itself allows any, but
then a model may generate blank lines without end."""
MAX_ERROR_LENGTH = 300
"""Characters of a compiler's message that an error quotes."""


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A matcher that has consumed nothing, the mask of first tokens (token i as bit i), and its memory."""

    matcher: LLMatcher
    first: int
    footprint: GrammarMemory


class _NotNowError(RequestError):
    """A temporary refusal, which is not cached."""


class GrammarCompiler:
    """Compiles constraints with llguidance in a thread of its own, which starts with the first constraint.

    Each constraint is first compiled on trial in another process, and then here, under the same limits.

    Thread-safe; llguidance releases the interpreter lock. Cached results, refusals included, are returned at once, to
    the tenant that requested it before: to others the time would show what a tenant requests.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, end_token_ids: Iterable[int]) -> None:
        """`tokenizer` and `end_token_ids` are the target's; `vocab_size` is the width of its logits."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_token_ids = sorted(end_token_ids)
        self._vocabulary: LLTokenizer | None = None
        self._tried_vocabulary: TrialVocabulary | None = None
        self._compiled: _Results[_Compiled] = _Results()
        self._tried: _Results[int] = _Results()
        self._checked: _Results[bool] = _Results()
        self._lock = threading.Lock()
        self._thread: ThreadPoolExecutor | None = None

    @property
    def num_kept(self) -> int:
        """Compiled constraints and refusals that are kept."""
        return len(self._compiled)

    @property
    def kept_bytes(self) -> int:
        """Estimated size of the compiled constraints that are kept."""
        return self._compiled.num_bytes()

    def compile(
        self, structured: StructuredOutput, stop_token_ids: Iterable[int], tenant: str = ""
    ) -> Grammar:
        """The grammar of one answer that may end with `stop_token_ids`.

        Raises `RequestError` where llguidance does not support the constraint or the tokenizer.
        """
        return self.submit(structured, stop_token_ids, tenant=tenant).result()

    def submit(
        self,
        structured: StructuredOutput,
        stop_token_ids: Iterable[int],
        tried_bytes: int | None = None,
        tenant: str = "",
    ) -> Future[Grammar]:
        """`compile` as a future; cancelling it before it has begun saves the work.

        `tried_bytes` is what `try_` has found, perhaps in another process; then it is not tried here.
        """
        stop = frozenset(stop_token_ids)
        return self._run(
            self._compiled,
            (tenant, structured),
            lambda key: self._compile(key, tried_bytes),
            lambda compiled: self._grammar(structured, compiled, stop),
        )

    def try_(self, structured: StructuredOutput, tenant: str = "") -> Future[int]:
        """Compile on trial alone: the bytes that the grammar takes, -1 where nothing could be tried.

        The future raises `RequestError` as that of `submit` does.
        """
        return self._run(self._tried, (tenant, structured), lambda key: self._try(structured), int)

    def check(self, structured: StructuredOutput, tenant: str = "") -> Future[bool]:
        """A future of True; it raises `RequestError` where llguidance does not support a constraint with any model."""

        def check(_: _Key) -> bool:
            _raise_of(structured, lambda: WORKER_OF_THIS_PROCESS.check(_source(structured)))
            check_followed(structured)
            return True

        return self._run(self._checked, (tenant, structured), check, bool)

    def _run(
        self,
        results: _Results[T],
        key: _Key,
        make: Callable[[_Key], T],
        use: Callable[[T], R],
    ) -> Future[R]:
        """`use` of the cached result, or of that of `make`, which runs in the compiling thread."""
        _, structured = key

        def work() -> R:
            result = results.find(key)
            if result is None:
                try:
                    result = make(key)
                except _NotNowError:
                    raise
                except RequestError as error:
                    result = error
                except BaseException as error:  # a panic in llguidance
                    result = RequestError(_refusal(structured, str(error) or type(error).__name__))
                results.keep(key, result)
            if isinstance(result, RequestError):
                raise RequestError(str(result))
            return use(result)

        future: Future[R] = Future()
        try:
            check_size(structured)
            known = results.find(key)
            if known is None:
                return self._submit(work)
            if isinstance(known, RequestError):
                raise RequestError(str(known))
            future.set_result(use(known))
        except RequestError as error:
            future.set_exception(error)
        return future

    def _submit(self, work: Callable[[], R]) -> Future[R]:
        with self._lock:
            if self._thread is not None:
                return self._thread.submit(work)
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="slipstream-grammars")
            before = threading.stack_size(STACK_BYTES)
            try:
                return self._thread.submit(work)  # makes the thread
            finally:
                threading.stack_size(before)

    def _grammar(
        self, structured: StructuredOutput, compiled: _Compiled, stop_token_ids: frozenset[int]
    ) -> Grammar:
        ends = stop_token_ids.union(self._end_token_ids)
        if not compiled.first & (1 << self._vocab_size) - 1 & ~bits(ends):
            raise RequestError(f"{kind(structured)} allows no text but the empty one")
        # A copy for each answer: a matcher is not thread-safe.
        return Grammar(
            compiled.matcher.deep_copy(),
            self._end_token_ids,
            stop_token_ids,
            self._vocab_size,
            compiled.footprint,
        )

    def _try(self, structured: StructuredOutput) -> int:
        WORKER_OF_THIS_PROCESS.start()
        _, tried = self.read_tokenizer()
        source = _checked_source(structured)
        trial = _raise_of(structured, lambda: WORKER_OF_THIS_PROCESS.try_(tried, source))
        if trial is None:
            return -1
        num_bytes = trial.num_bytes
        _check_form(structured, num_bytes)
        return num_bytes

    def _compile(self, key: _Key, tried_bytes: int | None) -> _Compiled:
        from llguidance import LLMatcher

        _, structured = key
        if tried_bytes is None:
            tried_bytes = self._try(structured)
        vocabulary, _ = self.read_tokenizer()
        source = _checked_source(structured)
        before = heap_bytes()
        try:
            matcher = LLMatcher(vocabulary, source, log_level=0, limits=parser_limits())
            first = int.from_bytes(matcher.compute_bitmask(), "little")  # reports what is too complex
        except ValueError as error:
            raise RequestError(_refusal(structured, str(error))) from None
        num_bytes = heap_bytes() - before if tried_bytes < 0 else tried_bytes
        _check_form(structured, num_bytes)
        if matcher.is_error():
            if not is_dead_end(matcher):
                raise RequestError(_refusal(structured, matcher.get_error()))
            first = 0
        messages = matcher.get_grammar_warnings()
        if messages:  # they quote the client's text, so they are logged for debugging only
            logger.warning("%s: %d of its keywords are not enforced", kind(structured), len(messages))
            logger.debug("llguidance says: %s", messages)
        refusal = RequestError(_refusal(structured, "it exceeds its memory limit while an answer follows it"))
        footprint = GrammarMemory(num_bytes, lambda: self._compiled.keep(key, refusal))
        return _Compiled(matcher, first, footprint)

    def read_tokenizer(self) -> tuple[LLTokenizer, TrialVocabulary]:
        """The tokens' bytes for llguidance and for the trial process, read once; raises `RequestError`."""
        if self._vocabulary is None or self._tried_vocabulary is None:
            try:
                self._vocabulary, tokens = _vocabulary(self._tokenizer, self._vocab_size, self._end_token_ids)
                self._tried_vocabulary = TrialVocabulary(tokens)
            except Exception as error:  # an unknown tokenizer may raise anything
                raise RequestError(
                    f"structured output is not possible with this model's tokenizer: {_one_line(str(error))}"
                ) from None
        return self._vocabulary, self._tried_vocabulary


class _Results(Generic[T]):
    """A bounded cache of compiled constraints and refusals. Thread-safe.

    The least recently used one of the account that holds the most makes room: none drives out what another uses by
    requesting many.
    """

    def __init__(self) -> None:
        self._results: OrderedDict[_Key, T | RequestError] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, key: _Key) -> T | RequestError | None:
        with self._lock:
            if key not in self._results:
                return None
            self._results.move_to_end(key)
            return self._results[key]

    def keep(self, key: _Key, result: T | RequestError) -> None:
        with self._lock:
            self._results[key] = result
            self._results.move_to_end(key)
            while len(self._results) > 1 and (
                len(self._results) > MAX_COMPILED or self._num_bytes() > MAX_COMPILED_BYTES
            ):
                self._drop_one(by_bytes=len(self._results) <= MAX_COMPILED)

    def _drop_one(self, by_bytes: bool) -> None:
        held: Counter[str] = Counter()
        for (tenant, _), result in self._results.items():
            held[tenant_account(tenant)] += _num_bytes(result) if by_bytes else 1
        most = max(held, key=held.__getitem__)
        del self._results[next(key for key in self._results if tenant_account(key[0]) == most)]

    def __len__(self) -> int:
        return len(self._results)

    def num_bytes(self) -> int:
        with self._lock:
            return self._num_bytes()

    def _num_bytes(self) -> int:
        return sum(map(_num_bytes, self._results.values()))


def _num_bytes(result: object) -> int:
    return result.footprint.num_bytes if isinstance(result, _Compiled) else 0


def _vocabulary(tokenizer: Any, vocab_size: int, end_token_ids: list[int]) -> tuple[LLTokenizer, ByteTokens]:
    """The tokenizer for llguidance, and its tokens' bytes. llguidance's own reading of it is used where it agrees with
    those bytes."""
    from llguidance import LLTokenizer, TokenizerWrapper

    token_bytes = TokenBytes(tokenizer, "this model")
    num_tokens = max(vocab_size, len(tokenizer))
    tokens = ByteTokens.of(token_bytes, num_tokens, end_token_ids or [tokenizer.eos_token_id])
    vocabulary = LLTokenizer(_described(tokenizer), n_vocab=num_tokens, eos_token=tokens.ends)
    # llguidance marks special tokens with the byte 0xFF, which occurs in no text.
    ordinary = {token: text for token, text in token_bytes.ordinary.items() if text and b"\xff" not in text}
    if all(vocabulary.decode_bytes([token]) == text for token, text in ordinary.items()):
        return vocabulary, tokens
    return LLTokenizer(TokenizerWrapper(tokens), n_vocab=num_tokens, eos_token=tokens.ends), tokens


def _described(tokenizer: Any) -> str:
    """The tokenizer as JSON, for llguidance. Padding and truncation are for whole prompts.

    `llguidance.hf.from_tokenizer` would import all of Transformers, and copy the tokenizer first.
    """
    backend = tokenizer.backend_tokenizer
    if backend.padding is not None or backend.truncation is not None:
        backend = copy.copy(backend)
        backend.no_padding()
        backend.no_truncation()
    described: str = backend.to_str()
    return described


def check_followed(structured: StructuredOutput) -> None:
    """Raise `RequestError` where llguidance does not support a constraint with any model.

    A constraint that is too complex only with a vocabulary passes here and is refused by the compiler.
    """
    from llguidance import LLMatcher

    try:
        failed, messages = LLMatcher.validate_grammar_with_warnings(
            _source(structured), limits=parser_limits()
        )
    except ValueError as error:
        raise RequestError(_refusal(structured, str(error))) from None
    if failed:
        raise RequestError(_refusal(structured, messages[0]))


def _raise_of(structured: StructuredOutput, call: Callable[[], TrialAnswer | None]) -> TrialAnswer | None:
    """The worker's result for a constraint; raises `RequestError` for a refusal, or if the worker died."""
    try:
        answer = call()
    except NoWorkerError as error:
        raise _NotNowError(
            f"{kind(structured)} cannot be compiled at the moment, since no process can be started for it: {error}; "
            "retry later"
        ) from None
    except (TooComplexError, ValueError) as error:
        raise RequestError(_refusal(structured, str(error))) from None
    if answer is not None and answer.error:
        raise RequestError(_refusal(structured, answer.error))
    return answer


def _check_form(structured: StructuredOutput, num_bytes: int) -> None:
    """Raise `RequestError` where a compiled grammar is too large."""
    if num_bytes > MAX_FORM_BYTES:
        raise RequestError(
            _refusal(
                structured,
                f"compiled it takes {num_bytes >> 20} MiB; at most {MAX_FORM_BYTES >> 20} are allowed",
            )
        )


def check_size(structured: StructuredOutput, max_bytes: int = MAX_SOURCE_BYTES) -> None:
    """Raise `RequestError` where a constraint's text is longer than `max_bytes`."""
    value = getattr(structured, kind(structured))
    num_bytes = sum(len(str(text).encode()) for text in (value if isinstance(value, tuple) else (value,)))
    if num_bytes > max_bytes:
        raise RequestError(f"{kind(structured)} has {num_bytes:,} bytes; at most {max_bytes:,} are allowed")


def kind(structured: StructuredOutput) -> str:
    """Name of the constraint's field."""
    return next(name for name in CONSTRAINTS if getattr(structured, name))


def _source(structured: StructuredOutput) -> str:
    """The constraint as llguidance's source."""
    from llguidance import LLMatcher

    if structured.choice is not None:
        # One terminal for all choices: llguidance compares terminals with one another.
        return LLMatcher.grammar_from_lark(
            "start: TEXT\nTEXT: " + " | ".join(map(json.dumps, structured.choice))
        )
    if structured.regex is not None:
        return LLMatcher.grammar_from_regex(structured.regex)
    if structured.grammar is not None:
        return LLMatcher.grammar_from_lark(structured.grammar)
    schema = '{"type": "object"}' if structured.json_object else str(structured.json_schema)
    if structured.compact:
        return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False})
    return LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_pattern": WHITESPACE})


def _checked_source(structured: StructuredOutput) -> str:
    """`_source`; raises `RequestError` where llguidance cannot read the constraint."""
    try:
        return _source(structured)
    except ValueError as error:
        raise RequestError(_refusal(structured, str(error))) from None


def _refusal(structured: StructuredOutput, message: str) -> str:
    return f"{kind(structured)} cannot be used: {_one_line(message)}"


def _one_line(message: str) -> str:
    line = " ".join(message.partition("<state>")[0].split())
    return line if len(line) <= MAX_ERROR_LENGTH else line[:MAX_ERROR_LENGTH] + "…"
