"""The local target that gives logits, for many answers at once."""

from __future__ import annotations

from functools import partial

from benchmarks.audit.faults import Answered
from slipstream.core.proposal import EMPTY_PROPOSAL
from slipstream.engine.engine import Engine
from slipstream.models.rows import tree_rows
from slipstream.sampling.params import SamplingParams
from slipstream.sampling.processors import LogitsProcessor
from slipstream.text.end_tokens import end_token_ids
from slipstream.tools.audit.scoring import score_rows
from slipstream.tools.audit.statistics.likelihood import TokenScores


class Reference:
    """Scores answers with an engine's target."""

    def __init__(self, engine: Engine, prompts: list[list[int]]) -> None:
        self._model = engine.model
        self._prompts = prompts
        self._ends = end_token_ids(engine.tokenizer, engine.model.model, engine.model.vocab_size)

    def score(self, answered: Answered) -> TokenScores:
        """The scores of one sampled answer; an answer that stopped without its end token said it."""
        prompt, answer = self._prompts[answered.prompt], list(answered.token_ids)
        if answered.finish_reason == "stop" and answer[-1] not in self._ends:
            answer.append(min(self._ends))
        text = [*prompt, *answer][:-1]
        pool, slots = self._model.trial_cache(len(text))
        group = tree_rows(slots, 0, text, EMPTY_PROPOSAL, len(prompt) - 1)
        logits = self._model.forward([group], pool).logits  # [T, V]
        return score_rows(logits, answer, answered.params, partial(self._processor, prompt))

    def _processor(self, prompt: list[int], params: SamplingParams) -> LogitsProcessor:
        return LogitsProcessor(params, prompt, self._ends, (), self._model.vocab_size)
