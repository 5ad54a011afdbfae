"""Sampled tokens against the distributions that a reference says they came from, by likelihood-ratio betting.

There is a wealth for each alternative (another temperature, filters left out, rows left unprocessed, too many most
probable tokens). It is multiplied by q(x)/p(x) for each token x, where p is what the server claims and q is the
alternative. Under p the expectation of that is at most 1, so each wealth, and their mean, is an e-process: see
`wealth`. The largest says what the fault looks like.

What is claimed may be a small set of distributions: at the edge of a nucleus rounding decides. A token then counts by
the p that gives it the most, so the bet is safe under each of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

from slipstream.stats.betting import BettingTest, log_mean
from slipstream.tools.audit.statistics.samples import Floats, Integers

TEMPERATURES = (0.5, 0.7, 0.85, 0.94, 0.98, 1.02, 1.06, 1.18, 1.5, 2.0)
"""The alternative temperatures, over the claimed one."""
SHARES = (0.01, 0.1)
"""The alternative shares of tokens that come from elsewhere."""
UNPROCESSED = "rows unprocessed"
NUM_EXACT = 256
"""Tokens of a row that are looked at one by one when it is brought to another temperature."""


@dataclass(frozen=True, slots=True)
class TokenScores:
    """One answer's tokens under what is claimed and under the alternatives."""

    log_probs: Floats
    """[T]: log-probability under the most favourable claim; minus infinity for a token that none of them allows."""
    expected: Floats
    """[T]: the mean of the log-probability under the (last) claim: minus its entropy."""
    variance: Floats
    """[T]: its variance."""
    alternatives: dict[str, Floats] = field(default_factory=dict)
    """[T] each: log-probabilities under distributions that would be faults."""
    favour: float = 0.0
    """Nats that all tokens together have more under the most favourable claim than under the one that the alternatives
    are made of: so much a bet must win before it wins anything."""

    @property
    def impossible(self) -> list[int]:
        """The tokens that no claim allows."""
        return np.flatnonzero(np.isneginf(self.log_probs)).tolist()


def score_tokens(claimed: Seq[Floats], raw: Floats, token_ids: Seq[int] | Integers) -> TokenScores:
    """Score an answer of T tokens.

    `claimed` are the processed rows, log-probabilities [T, V] each: one, or several where rounding may decide a
    filter. The alternatives are made of the last one, which should allow every token that any of them allows. `raw` is
    the log-softmax of the unprocessed logits.
    """
    tokens = np.asarray(token_ids, dtype=np.int64)[:, None]  # [T, 1]
    rows = np.asarray(claimed[-1], dtype=float)  # [T, V]
    unprocessed = _at(np.asarray(raw, dtype=float), tokens)
    log_probs = np.max([_at(np.asarray(claim, dtype=float), tokens) for claim in claimed], axis=0)
    probs = np.exp(rows)
    finite = np.where(np.isneginf(rows), 0.0, rows)
    expected = (probs * finite).sum(-1)
    own, is_best = _at(rows, tokens), tokens[:, 0] == rows.argmax(-1)
    tails = _Tails(rows, probs)
    alternatives = {
        f"temperature × {factor:g}": own / factor - np.log(tails.sum(1 / factor)) for factor in TEMPERATURES
    }
    for share in SHARES:
        kept = math.log1p(-share) + own
        elsewhere = math.log(share)
        alternatives[f"{share:.0%} of tokens unprocessed"] = np.logaddexp(kept, elsewhere + unprocessed)
        alternatives[f"{share:.0%} of tokens greedy"] = np.where(is_best, np.logaddexp(kept, elsewhere), kept)
        alternatives[f"{share:.0%} of tokens at random"] = np.logaddexp(
            kept, elsewhere - math.log(rows.shape[1])
        )
    alternatives[UNPROCESSED] = unprocessed
    variance = (probs * finite**2).sum(-1) - expected**2
    possible = ~np.isneginf(log_probs)
    favour = float((log_probs[possible] - own[possible]).sum())
    return TokenScores(log_probs, expected, np.maximum(variance, 0.0), alternatives, favour)


class ReferenceTest(BettingTest):
    """The bets on all alternatives together; looked at after each answer, anytime valid."""

    def __init__(self, confidence: float) -> None:
        """A false alarm has at most the probability 1 - `confidence`."""
        super().__init__(confidence)
        self._log_wealths: dict[str, float] = {}
        self.num_tokens = 0
        self.num_impossible = 0
        self._excess = 0.0
        self._variance = 0.0
        self.favour = 0.0
        """Summed, of all answers; see `TokenScores`."""

    @property
    def best(self) -> str | None:
        """The alternative that fits best; None before the first answer."""
        return max(self._log_wealths, key=self._log_wealths.__getitem__, default=None)

    @property
    def num_alternatives(self) -> int:
        """How many alternatives share the first wealth of 1; 0 before the first answer."""
        return len(self._log_wealths)

    @property
    def score_z(self) -> float:
        """Mean log-probability less its expectation, in standard errors: below 0 where tokens are too improbable."""
        return self._excess / math.sqrt(self._variance) if self._variance else 0.0

    @property
    def information(self) -> float:
        """The summed variance of the log-probabilities: what shows a temperature, in squared nats."""
        return self._variance

    def add(self, scores: TokenScores, extra: Mapping[str, Floats] | None = None) -> None:
        """Bet on the tokens of one answer.

        `extra` are log-probabilities [T] under alternatives of the caller's own, of the same names in every call.
        """
        alternatives = {**scores.alternatives, **(extra or {})}
        if not self._log_wealths:
            self._log_wealths = dict.fromkeys(alternatives, 0.0)
        possible = ~np.isneginf(scores.log_probs)
        for name, log_probs in alternatives.items():
            ratios = log_probs[possible] - scores.log_probs[possible]
            self._log_wealths[name] += float(ratios.sum())
        self.num_tokens += len(scores.log_probs)
        self.num_impossible += len(scores.impossible)
        self._excess += float((scores.log_probs - scores.expected)[possible].sum())
        self._variance += float(scores.variance[possible].sum())
        self.favour += scores.favour
        self.wealth.move_to(math.inf if self.num_impossible else log_mean(self._log_wealths.values()))


class _Tails:
    """Rows of probabilities, of which only the largest are looked at one by one: vocabularies are wide."""

    def __init__(self, rows: Floats, probs: Floats) -> None:
        """`probs` [T, V] are the exponentials of `rows`."""
        width = rows.shape[1]
        kept = min(NUM_EXACT, width)
        best = np.argpartition(probs, width - kept, axis=-1)[:, width - kept :]  # [T, kept]
        self._rows = np.take_along_axis(rows, best, axis=-1)
        largest = np.take_along_axis(probs, best, axis=-1)
        self._num_rest = np.maximum((probs > 0).sum(-1) - kept, 0)
        self._rest = np.where(self._num_rest > 0, np.maximum(probs.sum(-1) - largest.sum(-1), 0.0), 0.0)
        self._smallest = largest.min(-1)

    def sum(self, power: float) -> Floats:
        """At least the sum of p**power over each row, [T]. Exact where all that is not 0 was kept.

        What is left out is bounded: by Jensen's inequality for powers below 1, by the largest of it for others. Too
        large a sum makes a bet a little smaller, and never unfair.
        """
        if power < 1:
            rest = np.float_power(self._num_rest, 1 - power) * self._rest**power
        else:
            rest = self._rest * self._smallest ** (power - 1)
        return np.asarray(np.exp(self._rows * power).sum(-1) + rest)


def _at(rows: Floats, tokens: Integers) -> Floats:
    """The entries of rows [T, V] at tokens [T, 1]: [T]."""
    return np.asarray(np.take_along_axis(rows, tokens, axis=-1)[:, 0])
