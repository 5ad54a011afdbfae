"""What a drafter drafts at a place of a recorded answer, and how much of it is right."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any, Protocol

import torch

from slipstream.config import EngineConfig
from slipstream.core.request import FinishReason
from slipstream.core.sequence import Sequence
from slipstream.draft.base import DraftContext
from slipstream.draft.registry import create_drafter
from slipstream.sampling.params import SamplingParams
from slipstream.tools.advise.candidates import Candidate
from slipstream.tools.advise.recording import NOT_DRAFTED, Drafted, Recorded, judged
from slipstream.verify.registry import VERIFIERS


class DraftScores(Protocol):
    """One candidate's drafts on a recording."""

    def begin(self) -> None:
        """A new run from empty caches."""

    def draft(self, run: int, request: int, position: int, limit: int) -> Drafted:
        """What it drafts after `position` tokens of a request's answer, with at most `limit` tokens on a path.

        `run` tells several runs of the same recorded request apart.
        """

    def finish(self, run: int, request: int) -> None:
        """The run's answer is complete."""


class RecordedScores:
    """Scores of a drafter that drafted during the recording. A chain's first levels are the shorter chain."""

    def __init__(self, candidate: Candidate, recorded: Recorded) -> None:
        self._drafts = [request.drafts[candidate.name] for request in recorded.requests]
        self._is_chain = candidate.depths != (0,)

    def begin(self) -> None:
        return

    def draft(self, run: int, request: int, position: int, limit: int) -> Drafted:
        nodes, levels, right = self._drafts[request][position]
        if limit <= 0:
            return NOT_DRAFTED
        if not self._is_chain or levels <= limit:
            return nodes, levels, right
        return limit, limit, min(right, limit)

    def finish(self, run: int, request: int) -> None:
        return


class AskedScores:
    """Scores of a lookup, which is called again: what it has seen depends on which answers are over by then."""

    def __init__(self, candidate: Candidate, recorded: Recorded, vocab_size: int, max_model_len: int) -> None:
        context = DraftContext(
            engine_config=EngineConfig("recorded"),
            tokenizer=None,
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            device=torch.device("cpu"),
            dtype=torch.float32,
            verifier=VERIFIERS.load("coupled").traits(),
        )
        self._drafter = create_drafter(candidate.speculative, context)
        self._recorded = recorded
        self._open: dict[int, Sequence] = {}

    def begin(self) -> None:
        for sequence in self._open.values():
            self._drafter.release(sequence)
        self._open = {}
        self._drafter.reset()

    def draft(self, run: int, request: int, position: int, limit: int) -> Drafted:
        if limit <= 0:
            return NOT_DRAFTED
        sequence = self._sequence(run, request, position)
        [proposal] = self._drafter.propose([sequence], [min(limit, self._drafter.traits.max_nodes)])
        return judged(proposal, self._recorded.requests[request].output_token_ids[position:])

    def finish(self, run: int, request: int) -> None:
        sequence = self._sequence(run, request, self._recorded.requests[request].num_output)
        sequence.finish_reason = FinishReason.LENGTH
        self._drafter.release(sequence)
        del self._open[run]

    def _sequence(self, run: int, request: int, position: int) -> Sequence:
        """The request's text with `position` tokens of its answer."""
        known = self._recorded.requests[request]
        sequence = self._open.get(run)
        if sequence is None:
            prompt = list(known.prompt_token_ids)
            sequence = Sequence(run, str(run), 0, prompt, len(prompt), SamplingParams(), known.seed)
            self._open[run] = sequence
        done = sequence.num_output_tokens
        sequence.token_ids += known.output_token_ids[done:position]
        return sequence


def scores_of(
    candidates: Seq[Candidate], recorded: Recorded, vocab_size: int, max_model_len: int
) -> list[DraftScores]:
    """One a candidate, in order."""
    made: list[Any] = [
        AskedScores(candidate, recorded, vocab_size, max_model_len)
        if candidate.is_lookup
        else RecordedScores(candidate, recorded)
        for candidate in candidates
    ]
    return made
