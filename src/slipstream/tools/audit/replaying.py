"""The target's own view of a given answer: the distribution behind every token, and what it would have chosen."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.core.proposal import EMPTY_PROPOSAL
from slipstream.engine.engine import Engine
from slipstream.errors import ConfigError
from slipstream.models.rows import tree_rows
from slipstream.sampling.noise import Noise
from slipstream.sampling.params import SamplingParams
from slipstream.sampling.processors import LogitsProcessor
from slipstream.text.end_tokens import end_token_ids
from slipstream.text.prompts import encode_bad_words
from slipstream.tools.audit.scoring import score_rows
from slipstream.tools.audit.statistics.likelihood import TokenScores

BLOCK_ROWS = 256
"""Rows of a pass, which bounds its memory."""
LARGEST_MARGIN = 100.0
"""Nats. A difference that takes more is one at any margin."""
_BISECTIONS = 30
NOISE_ROWS, NOISE_TOPS = 16, 8
"""Tokens of a text, and log-probabilities of each, by which rounding is measured."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ReplayedAnswer:
    """What the target makes of an answer of T tokens, in one pass."""

    chosen: list[int]
    """[T]: the token that the target chooses behind the answer's own beginning, with the answer's noise."""
    gaps: Floats
    """[T]: nats by which the logit of the second choice is behind that of the first."""
    raw_log_probs: Floats
    """[T]: the log-probability of the answer's own token before any processing."""


class Replayer:
    """Scores answers with an engine's target. The engine itself is not stepped and its cache not used."""

    def __init__(self, engine: Engine) -> None:
        """Raises `ConfigError` for an encoder-decoder."""
        if engine.model.encoded_shapes:
            raise ConfigError(
                "an audit scores answers by their tokens alone, and those of an encoder-decoder depend on its input too"
            )
        self._engine = engine
        self._model = engine.model
        self._eos = end_token_ids(engine.tokenizer, engine.model.model, engine.model.vocab_size)

    @property
    def engine(self) -> Engine:
        return self._engine

    @property
    def end_tokens(self) -> frozenset[int]:
        """The model's own end tokens."""
        return self._eos

    def logits(
        self, token_ids: Seq[int], first: int, alone: int | None = None, num_prompt_tokens: int = 0
    ) -> torch.Tensor:
        """[len(token_ids) - first, vocab]: the raw logits behind tokens `first`, `first` + 1 and so on. From token
        `alone` on each has a pass of its own. The first `num_prompt_tokens` are computed as a prompt's.
        """
        fast = self._model.num_fast_tokens(num_prompt_tokens)
        pool, slots = self._model.trial_cache(len(token_ids))
        end = len(token_ids) if alone is None else alone
        starts = [*range(0, end, BLOCK_ROWS), *range(end, len(token_ids))]
        parts = []
        for past, until in zip(starts, [*starts[1:], len(token_ids)], strict=True):
            wanted = min(max(first, past), until) - past
            group = tree_rows(slots, past, token_ids[past:until], EMPTY_PROPOSAL, wanted, fast)
            logits = self._model.forward([group], pool).logits
            if past + wanted < until:
                parts.append(logits.float().clone())
        return torch.cat(parts)

    def _behind(self, prompt: Seq[int], answer: Seq[int]) -> torch.Tensor:
        """[T, V]: the raw logits that the T tokens of `answer` were chosen from."""
        text, num_prompt = [*prompt, *answer][:-1], len(prompt)
        return self.logits(text, num_prompt - 1, num_prompt_tokens=num_prompt)

    def replay(self, prompt: Seq[int], answer: Seq[int], params: SamplingParams, seed: int) -> ReplayedAnswer:
        """Choose again at each token of `answer`, behind the answer's own tokens before it. An empty one has none."""
        if not answer:
            return ReplayedAnswer([], np.zeros(0), np.zeros(0))
        logits = self._behind(prompt, answer)
        scores = self._scores(prompt, params, seed, logits, _beginnings(answer))  # [T, V]
        own = torch.tensor(answer, device=logits.device)[:, None]  # [T, 1]
        return ReplayedAnswer(
            chosen=scores.argmax(-1).tolist(),
            gaps=_numbers(_gaps(scores) * (params.temperature or 1.0)),
            raw_log_probs=_numbers(logits.double().log_softmax(-1).gather(1, own)[:, 0]),
        )

    def scores(
        self, prompt: Seq[int], answer: Seq[int], params: SamplingParams, rounding: float = 0.0
    ) -> TokenScores:
        """Score the tokens of an `answer` that is not empty by the distributions behind them, as `score_rows`."""
        logits = self._behind(prompt, answer)
        return score_rows(logits, answer, params, lambda variant: self._processor(prompt, variant), rounding)

    def margin(
        self, prompt: Seq[int], before: Seq[int], first: int, second: int, params: SamplingParams, seed: int
    ) -> float:
        """How near the target is to choosing `second` instead of `first` behind `prompt` + `before`, in nats.

        The smallest change of the two tokens' raw logits, half of it each way, after which the target chooses
        `second` or another token than `first`. It accounts for the noise, and for filters that exclude one of them.
        """
        last = len(prompt) + len(before) - 1
        row = self.logits([*prompt, *before], last, num_prompt_tokens=len(prompt))  # [1, V]
        path = [list(before)]

        def still_first(change: float) -> bool:
            moved = row.clone()
            moved[0, first] -= change / 2
            moved[0, second] += change / 2
            return int(self._scores(prompt, params, seed, moved, path).argmax(-1)) == first

        if not still_first(0.0):
            return 0.0
        if still_first(LARGEST_MARGIN):
            return math.inf
        low, high = -8 * math.log(10), math.log(LARGEST_MARGIN)
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            low, high = (middle, high) if still_first(math.exp(middle)) else (low, middle)
        return math.exp(high)

    def row_noise(self, token_ids: Seq[int]) -> Floats:
        """How a row's logits depend on the others of its pass, [rows * tops]: log-probabilities at the end of a text,
        computed in one pass less those computed token by token. Zeros where a row does not depend on others."""
        first = max(0, len(token_ids) - NOISE_ROWS)
        together = self.logits(token_ids, first).double().log_softmax(-1)
        alone = self.logits(token_ids, first, alone=first).double().log_softmax(-1)
        top = together.topk(min(NOISE_TOPS, together.shape[-1]), dim=-1).indices
        return _numbers((together.gather(1, top) - alone.gather(1, top)).flatten())

    def _processor(self, prompt: Seq[int], params: SamplingParams) -> LogitsProcessor:
        engine = self._engine
        stops = (frozenset() if params.ignore_eos else self._eos) | set(params.stop_token_ids)
        compiled = engine.intake.compile_grammar(params)
        grammar = None if compiled is None else compiled.result()
        words = encode_bad_words(engine.tokenizer, params.bad_words)
        return LogitsProcessor(params, list(prompt), stops, words, self._model.vocab_size, grammar)

    def _scores(
        self, prompt: Seq[int], params: SamplingParams, seed: int, logits: torch.Tensor, paths: Seq[Seq[int]]
    ) -> torch.Tensor:
        """[T, V]: what the target takes the largest of: processed log-probabilities plus noise, at temperature 0
        without the one-hot, so that there is a second choice."""
        ordered = params
        if params.greedy:
            ordered = replace(params, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
        rows = self._processor(prompt, ordered).log_probs(logits, (), paths)
        positions = [len(prompt) + len(path) for path in paths]
        return Noise(seed, positions[0], params.greedy).perturb(rows, positions)


def _beginnings(answer: Seq[int]) -> list[list[int]]:
    """What is before each token."""
    return [list(answer[:place]) for place in range(len(answer))]


def _gaps(scores: torch.Tensor) -> torch.Tensor:
    """[T]: the largest of each row minus the second largest; infinite where there is no second."""
    if scores.shape[-1] < 2:
        return torch.full((len(scores),), math.inf)
    top = scores.double().topk(2, dim=-1).values
    return top[:, 0] - top[:, 1]


def _numbers(values: torch.Tensor) -> Floats:
    return values.double().cpu().numpy()
