"""How a run's progress is said."""

from __future__ import annotations

import math


def format_rate(num_tokens: int, seconds: float) -> str:
    """'1,234 tokens/s', '0.4 tokens/s'; empty where nothing was computed yet."""
    if num_tokens <= 0 or seconds <= 0:
        return ""
    rate = num_tokens / seconds
    if rate < 0.1:
        return "under 0.1 tokens/s"
    if rate < 10:
        return f"{rate:.1f} tokens/s"
    return f"{rate:,.0f} tokens/s"


def about_loss(summed: str, who: str, vocab_size: int) -> str:
    """What the log of a head's training means; `summed` says what its loss is a sum of."""
    return (
        f"in the log: loss is the weighted sum of {summed}. nats_1 is of the first draft token alone, in nats a token "
        f"above the target's own entropy: 0 is perfect, about ln {vocab_size:,} = {math.log(vocab_size):.1f} is "
        f"chance, and a fresh head may begin above it. agrees_1 is how often {who}'s first choice is the target's "
        "token: 0.5 is half of them"
    )


def too_few_tokens(num_answer: int, num_tokens: int, max_tokens: int | None, num_weights: int) -> str:
    """A warning where fewer answer tokens are learned from than there are weights; empty where they are enough.

    `num_answer` of the data's `num_tokens` are answers; a run reads `max_tokens` of all, None: as its time allows.
    """
    share = num_answer / max(num_tokens, 1)
    read = num_tokens if max_tokens is None else min(max_tokens, num_tokens)
    learned = round(read * share)
    if learned >= num_weights:
        return ""
    budget = "" if read == num_tokens else f" (of {num_answer:,}; --max-tokens ends the run before)"
    return (
        f"warning: {learned:,} answer tokens{budget} are too few for {num_weights:,} trainable weights: on other text "
        f"the result will seldom say the target's token. Enough would be {num_weights:,} answer tokens or more, one a "
        "weight; published heads saw 50 to 1,000 times as many. Regenerate more prompts, train fewer weights "
        "(a smaller vocabulary, MLP or shape), or continue from a trained one (--init)"
    )
