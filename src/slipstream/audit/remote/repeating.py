"""How exactly a server repeats itself: the same greedy answers alone and in a batch."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

import numpy as np

from slipstream.audit.records import AuditAnswer, AuditRequest
from slipstream.audit.remote.side import ServerSide
from slipstream.audit.replaying import Floats
from slipstream.bench.statistics import first_difference
from slipstream.client import connect

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
    """Ask some prompts greedily one after the other, then all at once."""
    asked = [
        replace(request, params={"temperature": 0.0}, number=-1 - number)
        for number, request in enumerate({request.prompt: request for request in requests}.values())
    ][:NUM_REPEATED]

    async def both() -> Repeats:
        found = Repeats()
        async with connect(side.address) as client:
            alone = [await side.ask(client, request) for request in asked]
            together = await asyncio.gather(*(side.ask(client, request) for request in asked))
        for one, other in zip(alone, together, strict=True):
            if one.error is None and other.error is None:
                found.num_answers += 1
                found.num_different += one.answers[0].text != other.answers[0].text
                found.noise.append(log_prob_differences(one.answers[0], other.answers[0]))
        return found

    return asyncio.run(both())


def log_prob_differences(first: AuditAnswer, second: AuditAnswer) -> Floats:
    """Log-probabilities of the first answer less those of the second, of the tokens up to their first difference and of
    the alternatives that both report; none of tokens that either side filled in."""
    tops, others = first.tops or [], second.tops or []
    end = first_difference([top.token for top in tops], [top.token for top in others])
    found: list[float] = []
    for one, other in zip(tops[:end], others[:end], strict=False):
        if one.is_filled_in or other.is_filled_in:
            continue
        found.append(one.logprob - other.logprob)
        alternatives = dict(other.top)
        found += [value - alternatives[token] for token, value in one.top if token in alternatives]
    return np.array([value for value in found if np.isfinite(value)], dtype=float)
