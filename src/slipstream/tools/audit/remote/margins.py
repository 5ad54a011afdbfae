"""The margin of a first difference, from the log-probabilities that servers report."""

from __future__ import annotations

from slipstream.sampling.noise import Noise, gumbel
from slipstream.tools.audit.records import AuditAnswer, AuditRequest, TokenTop

_PLAIN = frozenset({"temperature", "ignore_eos", "n", "stop", "seed", "min_tokens"})
"""Parameters under which the order of two tokens is that of log-probability over temperature plus noise."""
_FILTERS = frozenset({"top_p", "top_k", "min_p"})
"""They change nothing at temperature 0. Above it rounding may let one keep a token that is far behind in that order."""


def reported_margin(
    request: AuditRequest, mine: AuditAnswer, theirs: AuditAnswer, place: int, position: int | None
) -> float | None:
    """Nats between the two choices at token `place`, as the other side sees them; None where nothing tells it.

    `position` is the absolute position of that token, where both sides are known to draw with Slipstream's noise.
    """
    plain = _PLAIN | _FILTERS if request.is_greedy else _PLAIN
    if not set(request.params) <= plain or theirs.tops is None or mine.tops is None:
        return None
    at = token_place(mine, theirs, place)
    if at is None or at >= min(len(mine.tops), len(theirs.tops)):
        return None
    own, other = theirs.tops[at], mine.tops[at]
    if own.token != other.token and len(own.top) < 2:
        return None  # without alternatives nothing tells how near the other token was
    gap = own.logprob - _logprob_of(own, other.token)
    if request.is_greedy:
        return abs(gap)
    if position is None or mine.token_ids is None or theirs.token_ids is None:
        return None
    temperature = float(request.params.get("temperature", 1.0))
    key = Noise(request.answer_seed(mine.index), position).key(position)
    tokens = theirs.token_ids[at], mine.token_ids[at]
    noise = gumbel([key], max(tokens) + 1)[0]
    return abs(gap + temperature * float(noise[tokens[0]] - noise[tokens[1]]))


def counted_margin(request: AuditRequest, margin: float | None, tie_margin: float) -> float | None:
    """The margin, or None where it is a near-tie of two draws.

    The distances of draws are not reported (see `reported_gaps`), so how many near-ties of theirs are to be expected is
    not known: they count as differences of unknown margin, of which it is.
    """
    is_near_draw = margin is not None and margin <= tie_margin and not request.is_greedy
    return None if is_near_draw else margin


def token_place(mine: AuditAnswer, theirs: AuditAnswer, place: int) -> int | None:
    """Index of the first differing token: `place` where ids were compared, else it is found by the tokens' texts."""
    if mine.token_ids is not None and theirs.token_ids is not None:
        return place
    for number, (one, other) in enumerate(zip(mine.tops or (), theirs.tops or (), strict=False)):
        if one.token != other.token:
            return number
    return None


def _logprob_of(entry: TokenTop, token: str) -> float:
    """Log-probability of `token`; at most that of the last alternative where it is not among them."""
    found = dict(entry.top)
    return found.get(token, min([entry.logprob, *found.values()]))


def reported_gaps(answer: AuditAnswer) -> list[float]:
    """The distance of the two most probable tokens at each place, where alternatives are reported."""
    return [abs(entry.top[0][1] - entry.top[1][1]) for entry in answer.tops or () if len(entry.top) > 1]
