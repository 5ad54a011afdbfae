"""From a reference's logits to the scores that the likelihood-ratio test bets on."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from slipstream.audit.statistics.likelihood import TokenScores, score_tokens
from slipstream.audit.statistics.samples import Floats
from slipstream.sampling.params import SamplingParams
from slipstream.sampling.processors import LogitsProcessor

EDGE = 1e-3
"""Share by which a filter's threshold may lie elsewhere: engines add up probabilities in another order."""

MakeProcessor = Callable[[SamplingParams], LogitsProcessor]


def score_rows(
    logits: torch.Tensor, answer: Seq[int], params: SamplingParams, processor: MakeProcessor
) -> TokenScores:
    """Score the tokens of an answer that is claimed to be sampled under `params`, temperature above 0.

    Row t of `logits` [T, V], unprocessed, follows the prompt and the answer's first t tokens; `answer` has T tokens,
    with the end token where it ended with one. `processor` makes the processor of the answer's prompt under the
    parameters that it is given.
    """
    paths = [list(answer[:place]) for place in range(len(answer))]
    claims = [
        _numbers(processor(claim).log_probs(logits, (), paths)) for claim in (*_variants(params), params)
    ]
    widest = int(np.argmax([np.isfinite(claim).sum() for claim in claims]))
    claims.append(claims.pop(widest))  # the alternatives are made of the claim that allows the most
    return score_tokens(claims, _numbers(logits.float().log_softmax(-1)), answer)


def _variants(params: SamplingParams) -> list[SamplingParams]:
    """The same parameters with the thresholds of their filters moved a little."""
    variants = []
    for sign in (-1, 1):
        changed: dict[str, Any] = {}
        if params.top_p < 1:
            changed["top_p"] = min(params.top_p * (1 + sign * EDGE), 1.0)
        if params.min_p > 0:
            changed["min_p"] = min(params.min_p * (1 - sign * EDGE), 1.0)
        if changed:
            variants.append(replace(params, **changed))
    return variants


def _numbers(rows: torch.Tensor) -> Floats:
    return rows.double().cpu().numpy()
