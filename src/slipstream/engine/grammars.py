"""From a request's structured output to a grammar over the target's tokens."""

from __future__ import annotations

import json
import logging
from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from slipstream.draft.token_bytes import TokenBytes
from slipstream.errors import RequestError
from slipstream.sampling.grammar import Grammar, is_dead_end
from slipstream.sampling.structured import CONSTRAINTS, StructuredOutput

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

logger = logging.getLogger(__name__)

MAX_COMPILED = 64
"""Compiled grammars that are kept, the ones used last."""
WHITESPACE = r" |\r?\n[ \t]{0,40}"
"""What may stand between the tokens of JSON: a space, or a new line and its indentation. Where JSON's own rule holds, a
model that has begun with blank lines may never come to an end of them."""
MAX_ERROR_LENGTH = 300
"""Characters of a compiler's message that are passed on."""


class GrammarCompiler:
    """Compiles constraints with llguidance. Costs nothing until the first one comes."""

    def __init__(self, tokenizer: Any, vocab_size: int, end_token_ids: Iterable[int]) -> None:
        """`tokenizer` and `end_token_ids` are the target's; `vocab_size` is the width of its logits."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_token_ids = sorted(end_token_ids)
        self._vocabulary: LLTokenizer | None = None
        self._compiled: OrderedDict[StructuredOutput, LLMatcher] = OrderedDict()

    def compile(self, structured: StructuredOutput, stop_token_ids: Iterable[int]) -> Grammar:
        """The grammar of one answer that may end with `stop_token_ids`.

        Raises `RequestError` where the constraint, or the tokenizer, is nothing that llguidance can follow.
        """
        matcher = self._compiled.get(structured)
        if matcher is None:
            matcher = self._compiled[structured] = self._matcher(structured)
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(structured)
        grammar = Grammar(matcher, self._end_token_ids, stop_token_ids, self._vocab_size)
        if grammar.ended(()):
            raise RequestError(f"{kind(structured)} allows no text, at most the empty one")
        return grammar

    def _matcher(self, structured: StructuredOutput) -> LLMatcher:
        from llguidance import LLMatcher

        vocabulary = self._read_tokenizer()
        try:
            source = _source(structured)
            failed, messages = LLMatcher.validate_grammar_with_warnings(source, vocabulary)
            matcher = LLMatcher(vocabulary, source, log_level=0)
            matcher.compute_bitmask()  # what is too complex from the first token on fails here
        except ValueError as error:
            raise RequestError(_refusal(structured, str(error))) from None
        if failed or (matcher.is_error() and not is_dead_end(matcher)):
            raise RequestError(_refusal(structured, messages[0] if failed else matcher.get_error()))
        if messages:  # which quote the client's text: they are for whoever debugs
            logger.warning("%s is followed but for %d of its words", kind(structured), len(messages))
            logger.debug("llguidance says: %s", messages)
        return matcher

    def _read_tokenizer(self) -> LLTokenizer:
        if self._vocabulary is None:
            try:
                self._vocabulary = _vocabulary(self._tokenizer, self._vocab_size, self._end_token_ids)
            except Exception as error:  # a tokenizer that is not known may raise anything
                raise RequestError(
                    f"structured output is not possible with this model's tokenizer: {_one_line(str(error))}"
                ) from None
        return self._vocabulary


class _ByBytes:
    """A tokenizer that llguidance does not read rightly, as it wants one: what each token says, how to say a text."""

    bos_token_id = None

    def __init__(self, said: TokenBytes, vocab_size: int, end_token_ids: list[int]) -> None:
        self.tokens = [said.ordinary.get(token, b"") for token in range(vocab_size)]
        self.special_token_ids = sorted({*said.special, *end_token_ids})
        for token in self.special_token_ids:
            self.tokens[token] = said.special.get(token, f"<|{token}|>").encode()
        self.eos_token_id = end_token_ids[0]
        self._token_of = said.by_bytes()
        self._longest = max(map(len, self._token_of))

    def __call__(self, text: bytes) -> list[int]:
        """The longest token first. The tokenizer itself would put a space in front, as before every text."""
        token_ids: list[int] = []
        while text:
            lengths = range(min(self._longest, len(text)), 0, -1)
            length = next((n for n in lengths if text[:n] in self._token_of), None)
            if length is None:
                raise ValueError(f"no token says {text[:1]!r}")
            token_ids.append(self._token_of[text[:length]])
            text = text[length:]
        return token_ids


def _vocabulary(tokenizer: Any, vocab_size: int, end_token_ids: list[int]) -> LLTokenizer:
    """The tokenizer as llguidance reads it, where that is what its tokens say; else by the bytes that they say."""
    from llguidance import LLTokenizer, TokenizerWrapper
    from llguidance.hf import from_tokenizer

    said = TokenBytes(tokenizer, "this model")
    num_tokens = max(vocab_size, len(tokenizer))
    vocabulary = from_tokenizer(tokenizer, n_vocab=num_tokens, eos_token=end_token_ids or None)
    # 0xFF, which is in no text, is how llguidance marks special tokens.
    ordinary = {token: text for token, text in said.ordinary.items() if text and b"\xff" not in text}
    if all(vocabulary.decode_bytes([token]) == text for token, text in ordinary.items()):
        return vocabulary
    ends = end_token_ids or [tokenizer.eos_token_id]
    wrapper = TokenizerWrapper(_ByBytes(said, num_tokens, ends))
    return LLTokenizer(wrapper, n_vocab=num_tokens, eos_token=ends)


def check_followed(structured: StructuredOutput) -> None:
    """Raise `RequestError` where llguidance cannot follow a constraint, whatever the model.

    What it finds too complex only with a vocabulary passes here, and is refused by the compiler.
    """
    from llguidance import LLMatcher

    try:
        failed, messages = LLMatcher.validate_grammar_with_warnings(_source(structured))
    except ValueError as error:
        raise RequestError(_refusal(structured, str(error))) from None
    if failed:
        raise RequestError(_refusal(structured, messages[0]))


def kind(structured: StructuredOutput) -> str:
    """Which constraint it is."""
    return next(name for name in CONSTRAINTS if getattr(structured, name))


def _source(structured: StructuredOutput) -> str:
    """The constraint in llguidance's own form."""
    from llguidance import LLMatcher

    if structured.choice is not None:
        return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, structured.choice)))
    if structured.regex is not None:
        return LLMatcher.grammar_from_regex(structured.regex)
    if structured.grammar is not None:
        return LLMatcher.grammar_from_lark(structured.grammar)
    schema = '{"type": "object"}' if structured.json_object else str(structured.json_schema)
    if structured.compact:
        return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False})
    return LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_pattern": WHITESPACE})


def _refusal(structured: StructuredOutput, message: str) -> str:
    return f"{kind(structured)} cannot be followed: {_one_line(message)}"


def _one_line(message: str) -> str:
    line = " ".join(message.partition("<state>")[0].split())
    return line if len(line) <= MAX_ERROR_LENGTH else line[:MAX_ERROR_LENGTH] + "…"
