"""Answers that were begun before, perhaps by another engine, and go on where they are.

An answer is a function of model, prompt, parameters and seed, so what follows its emitted tokens is too: noise is keyed
by position, and penalties, masks and stop rules go by the text. A continued sequence is what a preempted one is: its
text is there and its cache entries have to be computed.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from slipstream.core.request import EmittedTokens
from slipstream.core.sequence import Sequence
from slipstream.engine.requests import Answer
from slipstream.engine.steps import record_prediction
from slipstream.errors import RequestError
from slipstream.sampling.params import SamplingParams


def check_emitted(emitted: Seq[EmittedTokens], params: SamplingParams, vocab_size: int) -> None:
    """Raise `RequestError` unless there is one entry for each of the request's answers, as its parameters want it, and
    the seed that they were made with."""
    if len(emitted) != params.n:
        raise RequestError(
            f"emitted must have one entry for each of the {params.n} answers, got {len(emitted)}"
        )
    if params.seed is None:
        raise RequestError("a request with emitted tokens needs the seed that they were made with")
    for entry in emitted:
        for token_id in entry.token_ids:
            if not 0 <= token_id < vocab_size:
                raise RequestError(
                    f"emitted has token id {token_id}; this model's ids are 0 to {vocab_size - 1}"
                )
        wanted = len(entry.token_ids) if params.logprobs is not None else 0
        if len(entry.logprobs) != wanted:
            raise RequestError(
                f"emitted logprobs must have {wanted} entries for these parameters, got {len(entry.logprobs)}"
            )


def resume(answers: Seq[Answer], emitted: Seq[EmittedTokens]) -> None:
    """Bring new answers to where they were; text that was released with their tokens is not released again.

    An answer that its tokens complete is finished, as it was. Raises `RequestError` where all are, or where one ends
    before its tokens do.
    """
    for answer, entry in zip(answers, emitted, strict=True):
        _resume(answer, entry)
    going_on = [answer.sequence for answer in answers if not answer.sequence.finished]
    if not going_on:
        raise RequestError(
            "all answers are complete with the emitted tokens, so there is nothing to continue"
        )
    _lead(going_on)


def _resume(answer: Answer, entry: EmittedTokens) -> None:
    sequence = answer.sequence
    answer.stop.resume(entry.token_ids, entry.from_draft or [False] * len(entry.token_ids))
    answer.text.take(sequence.finished)
    sequence.text = answer.text.text
    sequence.logprobs = list(entry.logprobs) or None
    sequence.num_resumed_tokens = sequence.metrics.num_resumed_tokens = len(entry.token_ids)
    sequence.metrics.num_output_tokens = sequence.num_output_tokens
    sequence.scores_prompt = False
    if sequence.finished:  # no step ends it here
        record_prediction(sequence)


def _lead(sequences: Seq[Sequence]) -> None:
    """The first sequence computes the prompt for the others, which their own first one may not do any more."""
    first = sequences[0]
    first.scores_prompt = True
    for sequence in sequences:
        shares = sequence.leader is not None
        sequence.leader = first if shares and sequence is not first else None
