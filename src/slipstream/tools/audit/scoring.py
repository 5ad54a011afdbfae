"""From a reference's logits to the scores that the likelihood-ratio test bets on."""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from scipy.special import logsumexp

from slipstream.sampling.params import SamplingParams
from slipstream.sampling.processors import LogitsProcessor
from slipstream.tools.audit.statistics.likelihood import TokenScores, score_tokens
from slipstream.tools.audit.statistics.samples import Floats

EDGE = 1e-3
"""Share by which a filter's threshold may lie elsewhere: engines add up probabilities in another order."""

MakeProcessor = Callable[[SamplingParams], LogitsProcessor]


def score_rows(
    logits: torch.Tensor,
    answer: Seq[int],
    params: SamplingParams,
    processor: MakeProcessor,
    rounding: float = 0.0,
) -> TokenScores:
    """Score the tokens of an answer that is claimed to be sampled under `params`, temperature above 0.

    Row t of `logits` [T, V], unprocessed, follows the prompt and the answer's first t tokens; `answer` has T tokens,
    with the end token where it ended with one. `processor` makes the processor of the answer's prompt under the
    parameters that it is given. `rounding`, in nats, is what an honest engine's difference of two logits may be off by:
    a token that a filter keeps within it is possible.
    """
    paths = [list(answer[:place]) for place in range(len(answer))]
    variants = [*_variants(params, rounding), params]
    claims = [_numbers(processor(variant).log_probs(logits, (), paths)) for variant in variants]
    widest = int(np.argmax([np.isfinite(claim).sum() for claim in claims]))
    claims.append(claims.pop(widest))  # the alternatives are made of the claim that allows the most
    if rounding:
        claims = _with_near_ties(claims, logits, answer, paths, processor(variants[widest]), rounding)
    return score_tokens(claims, _numbers(logits.float().log_softmax(-1)), answer)


def _variants(params: SamplingParams, rounding: float) -> list[SamplingParams]:
    """The same parameters with the thresholds of their filters moved a little."""
    variants = []
    for sign in (-1, 1):
        changed: dict[str, Any] = {}
        if params.top_p < 1:
            odds = params.top_p * math.exp(sign * rounding)
            moved = odds / (
                odds + 1 - params.top_p
            )  # where all that is kept, or all else, is off by `rounding`
            changed["top_p"] = min(moved * (1 + sign * EDGE), 1.0)
        if params.min_p > 0:
            changed["min_p"] = min(params.min_p * math.exp(-sign * rounding) * (1 - sign * EDGE), 1.0)
        if changed:
            variants.append(replace(params, **changed))
    return variants


def _with_near_ties(
    claims: list[Floats],
    logits: torch.Tensor,
    answer: Seq[int],
    paths: list[list[int]],
    processor: LogitsProcessor,
    rounding: float,
) -> list[Floats]:
    """The claims, with one more for tokens of the answer that none of them allows, but would if their logit were
    `rounding` higher: at the edge of a filter rounding decides which of two near tokens is kept."""
    places = [
        place for place, token in enumerate(answer) if all(np.isneginf(c[place, token]) for c in claims)
    ]
    if not places:
        return claims
    moved = logits[places].float()  # [places, V], a copy
    for row, place in zip(moved, places, strict=True):
        row[answer[place]] += rounding
    rows = _numbers(processor.log_probs(moved, (), [paths[place] for place in places]))
    near, widest = np.full_like(claims[-1], -np.inf), claims[-1].copy()
    for row, place in zip(rows, places, strict=True):
        token = answer[place]
        near[place, token] = widest[place, token] = row[token]
        widest[place] -= logsumexp(widest[place])  # the alternatives are made of a distribution
    return [near, *claims[:-1], widest]


def _numbers(rows: torch.Tensor) -> Floats:
    return rows.double().cpu().numpy()
