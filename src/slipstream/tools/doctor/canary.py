"""Measures a draft's acceptance on a few prompts.

A head with wrong layer numbers or norm flags loads without an error and has a low acceptance. So the canary is also run
with variations of the configuration, and a much better variation indicates the error.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from slipstream.assets import sample_prompts
from slipstream.config import SpeculativeConfig
from slipstream.core.metrics.request import RequestMetrics
from slipstream.engine.engine import Engine
from slipstream.engine.factory import create_engine
from slipstream.errors import RequestError
from slipstream.sampling.params import SamplingParams
from slipstream.text.prompts import encode_conversation

NUM_PROMPTS, MAX_TOKENS = 14, 32
POOR = 0.15
"""Conditional acceptance at the first position below which a draft is reported as a fault."""
BETTER, CLEARLY = 1.1, 0.05
"""Ratio and difference by which a variation must have more draft tokens accepted in a pass to be reported."""


@dataclass(frozen=True)
class Canary:
    """A draft's acceptance."""

    first: float
    """Conditional acceptance at the first position."""
    length: float
    """τ"""
    num_failures: int

    def is_better(self, other: Canary) -> bool:
        """Whether clearly more draft tokens are accepted in a pass; those behind the first count too, since what a head
        reads of its own output shows there alone."""
        mine, its = self.length - 1, other.length - 1
        return mine > max(BETTER * its, its + CLEARLY)


def run_canary(target: Engine, speculative: SpeculativeConfig) -> Canary:
    """Greedy answers to a few bundled prompts with this draft, on the target's weights."""
    engine = create_engine(target.config, speculative, like=target)
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    for number, row in enumerate(sample_prompts()[:NUM_PROMPTS]):
        try:
            prompt = encode_conversation(engine.tokenizer, row["messages"])
        except RequestError:  # the template refuses it
            prompt = encode_conversation(engine.tokenizer, row["messages"], raw=True)
        with contextlib.suppress(RequestError):  # longer than the model's context
            engine.add_request(str(number), prompt, params)
    outputs = []
    while engine.has_unfinished:
        outputs += [update.output for update in engine.step() if update.output is not None]
    merged = RequestMetrics.merged([output.metrics for output in outputs])
    conditional = merged.conditional_acceptance
    return Canary(
        conditional[0] if conditional else 0.0, merged.acceptance_length, engine.stats().num_draft_failures
    )
