"""When an answer ends. The rules are applied token by token, so they hold inside an accepted block."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from slipstream.core.request import FinishReason
from slipstream.core.sequence import Sequence
from slipstream.errors import RequestError
from slipstream.sampling.grammars.grammar import Grammar
from slipstream.sampling.processors import LogitsProcessor
from slipstream.text.stream import TextStream


class StopRules:
    """End tokens, stop tokens, stop strings, the grammar's end, `max_tokens` and the context limit of one sequence."""

    def __init__(
        self,
        sequence: Sequence,
        text: TextStream,
        processor: LogitsProcessor,
        eos_token_ids: frozenset[int],
        num_tokens_limit: int,
    ) -> None:
        params = sequence.params
        self._sequence = sequence
        self._text = text
        self._processor = processor
        self._eos_token_ids = frozenset() if params.ignore_eos else eos_token_ids
        self._stop_token_ids = frozenset(params.stop_token_ids or ())
        self._num_tokens_limit = num_tokens_limit

    def append(self, token_id: int, from_draft: bool) -> bool:
        """Commit one token to the sequence and its text; True when the answer ends with it, or before it.

        It ends before a forbidden token: the masks left no other.
        """
        sequence = self._sequence
        if self._processor.masks and not self._ends(token_id):
            output = sequence.output_token_ids
            if not self._processor.permits(output, token_id):
                return self._finish_form(sequence.grammar, output)
        return self._commit(token_id, from_draft, sequence.grammar)

    def resume(self, token_ids: Seq[int], from_draft: Seq[bool]) -> bool:
        """Commit tokens that these rules have let pass before; True where the answer ends with the last of them.

        Only the last token is held to the grammar, for which the whole text is read once: a mask for each would hold
        up all other requests. Raises `RequestError` where the answer ends before the last token.
        """
        for number, (token_id, drafted) in enumerate(zip(token_ids, from_draft, strict=True), start=1):
            is_last = number == len(token_ids)
            if self._commit(token_id, drafted, self._sequence.grammar if is_last else None) and not is_last:
                message = f"the answer ends with emitted token {number}, but {len(token_ids)} were given"
                raise RequestError(message)
        return self._sequence.finished

    def _ends(self, token_id: int) -> bool:
        return token_id in self._eos_token_ids or token_id in self._stop_token_ids

    def _commit(self, token_id: int, from_draft: bool, grammar: Grammar | None) -> bool:
        sequence, params = self._sequence, self._sequence.params
        output = [] if grammar is None else sequence.output_token_ids
        sequence.token_ids.append(token_id)
        sequence.from_draft.append(from_draft)
        ends = self._ends(token_id)
        if ends and grammar is not None and not grammar.mask(output) >> token_id & 1:
            return self._finish_form(grammar, output)  # the masks left only the end token
        if ends:
            if params.include_stop_str_in_output:
                self._text.push(token_id, from_draft, check_stop=False)
            is_eos = token_id in self._eos_token_ids
            return self._finish(FinishReason.STOP, None if is_eos else token_id)
        check_stop = sequence.num_output_tokens > params.min_tokens
        stop = self._text.push(token_id, from_draft, check_stop)
        if stop is not None:
            return self._finish(FinishReason.STOP, stop)
        if grammar is not None and grammar.ended(sequence.output_token_ids):
            return self._finish_form(grammar, sequence.output_token_ids)
        if sequence.num_output_tokens >= sequence.max_output_tokens:
            return self._finish(FinishReason.LENGTH)
        if len(sequence.token_ids) >= self._num_tokens_limit:
            return self._finish(FinishReason.LENGTH)
        return False

    def _finish_form(self, grammar: Grammar | None, output: list[int]) -> bool:
        """The answer cannot go on: STOP where the grammar accepts it as it is, else ERROR."""
        is_whole = grammar is not None and grammar.accepts(output)
        return self._finish(FinishReason.STOP if is_whole else FinishReason.ERROR)

    def _finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> bool:
        self._sequence.finish_reason = reason
        self._sequence.stop_reason = stop_reason
        if not isinstance(stop_reason, str):  # a stop string has already cut the text
            self._text.flush()
        return True
