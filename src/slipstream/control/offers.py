"""What each drafter can be expected to do for the requests of a step, from what is known."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np

from slipstream.control.acceptance import BUCKETS
from slipstream.control.choice import Asked
from slipstream.control.knowledge import Knowledge
from slipstream.control.plan import Guesses, Marginal, Market, Offer, Plan
from slipstream.control.step_cost import Drafted
from slipstream.draft.choice import NOBODY


class _BestGuess(NamedTuple):
    """What a lookup that is asked first is expected to do for a request."""

    lookup: int = NOBODY
    min_tokens: int = 0
    taken: float = 0.0
    """The chance that its guess is taken."""
    tokens: float = 0.0
    """Expected to stand."""
    rows: float = 0.0
    """Expected to be checked."""
    ask_s: float = 0.0


def offer(known: Knowledge, number: int, asked: Seq[Asked]) -> Offer:
    """Of the `number`-th member, by request and depth; a lookup offers nothing here but guesses that come before."""
    member, acceptance = known.members[number], known.acceptance[number]
    depth = member.max_depth if member.is_chain else 1
    tokens = np.full((len(asked), depth + 1), -np.inf)
    rows = np.zeros((len(asked), depth + 1))
    tokens[:, 0] = 0.0
    entry_s = np.zeros(len(asked))
    if member.looks_up:
        return Offer(tokens, rows, entry_s, known.draft_costs[number])
    shared: dict[str, tuple[list[float], tuple[float, float]]] = {}
    possible = [i for i, request in enumerate(asked) if _may_ask(number, request)]
    if possible and not known.draft_costs[number].is_known:  # one request finds out what it costs
        possible = [min(possible, key=lambda i: known.num_unseen(number, asked[i]))]
    for i in possible:
        request = asked[i]
        if acceptance.knows(request.sequence_id):
            worth = acceptance.worth(request.sequence_id, request.task)
        else:  # as its task
            if request.task not in shared:
                shared[request.task] = acceptance.worth(request.sequence_id, request.task)
            worth = shared[request.task]
        entry_s[i] = known.entry_s(number, request) / known.steps_left(request)
        if member.is_chain:
            most = min(depth, request.limit)
            tokens[i, 1 : most + 1] = np.cumsum(worth[0][:most])
            rows[i, 1 : most + 1] = np.arange(1, most + 1)
        else:
            accepted, checked = worth[1]
            tokens[i, 1], rows[i, 1] = min(accepted, request.limit), min(checked, request.limit)
    return Offer(tokens, rows, entry_s, known.draft_costs[number])


def guesses(known: Knowledge, asked: Seq[Asked], market: Market, plan: Plan) -> Guesses:
    """For each request the lookup that is to be asked first, and how long its guess must be to beat what the plan does
    otherwise, when a second is worth what the plan makes of it."""
    rate, costs = plan.tokens_per_s, market.marginal(plan)
    found = Guesses.none(len(asked))
    choices, taken, tokens, rows = list(found.choices), *(np.zeros(len(asked)) for _ in range(3))
    best: dict[tuple[str, float, frozenset[int] | None], _BestGuess] = {}
    ask_s = 0.0
    for i, (request, value) in enumerate(zip(asked, market.values(plan), strict=True)):
        key = request.task, value, request.members
        if key not in best:
            best[key] = _best_guess(known, request, value, rate, costs, len(asked))
        guess = best[key]
        if guess.lookup == NOBODY or request.limit < guess.min_tokens:
            continue
        choices[i] = guess.lookup, guess.min_tokens
        taken[i], tokens[i], rows[i] = guess.taken, guess.tokens, guess.rows
        ask_s += guess.ask_s
    return Guesses(choices, taken, tokens, rows, ask_s)


def _best_guess(
    known: Knowledge, request: Asked, value: float, rate: float, costs: Marginal, number: int
) -> _BestGuess:
    """Which lookup to ask for such a request, where a second is worth `rate` tokens and the draft that a guess makes
    needless gains `value`; `number` requests share the call."""
    best, best_gain = _BestGuess(), 0.0
    price, lost = rate * costs.row_s, rate * costs.drafted_s + value
    for lookup, yields in known.lookups.items():
        if not _may_ask(lookup, request):
            continue
        alone_s = known.draft_costs[lookup](Drafted(number, 1, number)) / number
        lengths = zip(
            yields.shares(request.task), yields.lengths(request.task), yields.rates(request.task), strict=True
        )
        worth = [(share, n, n * stands, n * (stands - price) - lost) for share, n, stands in lengths]
        first = next((b for b in range(1, len(BUCKETS)) if worth[b][3] > 0), len(BUCKETS))
        gain = sum(share * max(more, 0.0) for share, _, _, more in worth[first:]) - rate * alone_s
        if gain > best_gain:
            best_gain = gain
            best = _BestGuess(
                lookup,
                BUCKETS[first],
                sum(share for share, *_ in worth[first:]),
                sum(share * stand for share, _, stand, _ in worth[first:]),
                sum(share * n for share, n, *_ in worth[first:]),
                alone_s,
            )
    return best


def _may_ask(member: int, request: Asked) -> bool:
    return request.limit > 0 and (request.members is None or member in request.members)
