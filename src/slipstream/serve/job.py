"""What one HTTP request asks of the engine, checked and tokenised."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Any

from slipstream.core import DEFAULT_OPTIONS, RequestOptions
from slipstream.sampling.params import SamplingParams
from slipstream.serve.api.constraints import Constraint


@dataclass(frozen=True, slots=True)
class Echo:
    """Prompts that are given back."""

    texts: tuple[str, ...]
    """One a prompt."""
    logprobs: int | None
    """Alternatives to report for each of their tokens; None reports nothing of them."""
    with_answers: bool
    """False where `max_tokens` is 0: the token that the engine yields anyway is not shown."""


@dataclass(frozen=True, slots=True)
class Job:
    """One request: every prompt gets `params.n` answers."""

    id: str
    """As the client sees it."""
    prompts: list[list[int]]
    params: SamplingParams
    seeds: tuple[int, ...]
    """One a prompt: several prompts that share one would share their luck."""
    constraint: Constraint | None = None
    """Where the parameters' structured output is from."""
    options: RequestOptions = DEFAULT_OPTIONS
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False
    prompt_logprobs: int | None = None
    """Alternatives a token under the response's `prompt_logprobs`; None leaves it out. The engine may tell more."""
    echo: Echo | None = None
    """The prompts come back before the answers."""
    created: int = field(default_factory=lambda: int(time.time()))
    facts: dict[str, Any] = field(default_factory=dict)
    """What the log will say about the request."""

    @property
    def num_answers(self) -> int:
        return len(self.prompts) * self.params.n

    def params_of(self, prompt: int) -> SamplingParams:
        """The parameters of the `prompt`-th prompt, its own seed among them."""
        seed = self.seeds[prompt]
        return self.params if seed == self.params.seed else replace(self.params, seed=seed)
