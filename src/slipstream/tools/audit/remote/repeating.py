"""How exactly a server repeats itself: the same greedy answers alone and in a batch."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

import numpy as np

from slipstream.rpc.client import connect
from slipstream.tools.audit.records import AuditAnswer, AuditRequest, TokenTop
from slipstream.tools.audit.remote.side import ServerSide
from slipstream.tools.audit.replaying import Floats
from slipstream.tools.bench.statistics import first_difference

NUM_REPEATED = 8


@dataclass
class Repeats:
    """What two passes over the same greedy requests gave."""

    num_answers: int = 0
    num_different: int = 0
    noise: list[Floats] = field(default_factory=list)
    """Differences of the same tokens' log-probabilities behind the same text, in nats."""

    @property
    def is_exact(self) -> bool:
        """Whether nothing differed."""
        return not self.num_different and not any(np.any(part) for part in self.noise)


def measure_repeats(side: ServerSide, requests: Seq[AuditRequest]) -> Repeats:
    """Send some prompts greedily one after the other, then all at once."""
    sent = [
        replace(request, params={"temperature": 0.0}, number=-1 - number)
        for number, request in enumerate({request.prompt: request for request in requests}.values())
    ][:NUM_REPEATED]

    async def both() -> Repeats:
        found = Repeats()
        async with connect(side.address) as client:
            alone = [await side.send(client, request) for request in sent]
            together = await asyncio.gather(*(side.send(client, request) for request in sent))
        for one, other in zip(alone, together, strict=True):
            if one.error is None and other.error is None:
                found.num_answers += 1
                found.num_different += one.answers[0].text != other.answers[0].text
                found.noise.append(log_prob_differences(one.answers[0], other.answers[0]))
        return found

    return asyncio.run(both())


def log_prob_differences(first: AuditAnswer, second: AuditAnswer) -> Floats:
    """Log-probabilities of the first answer less those of the second, of the tokens up to their first difference and of
    the alternatives that both report. None of tokens that either side filled in, and none of alternatives that have the
    text of another one: llama.cpp gives tokens that are parts of characters one text."""
    tops, others = first.tops or [], second.tops or []
    places = [first_difference([top.token for top in tops], [top.token for top in others])]
    if first.token_ids is not None and second.token_ids is not None:
        places.append(first_difference(first.token_ids, second.token_ids))
    end = min((place for place in places if place is not None), default=len(tops))
    found: list[float] = []
    for one, other in zip(tops[:end], others[:end], strict=False):
        if one.is_filled_in or other.is_filled_in:
            continue
        found.append(one.logprob - other.logprob)
        mine, theirs = _unambiguous(one), _unambiguous(other)
        found += [value - theirs[token] for token, value in mine.items() if token in theirs]
    return np.array([value for value in found if np.isfinite(value)], dtype=float)


def _unambiguous(entry: TokenTop) -> dict[str, float]:
    """The log-probabilities of the alternatives whose text no other one has."""
    counts = Counter(token for token, _ in entry.top)
    return {token: value for token, value in entry.top if counts[token] == 1}
