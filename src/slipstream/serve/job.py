"""The work of one HTTP request for the engine, validated and tokenised."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any

from slipstream.core.request import DEFAULT_OPTIONS, RequestOptions
from slipstream.sampling.params import SamplingParams
from slipstream.serve.api.constraints import Constraint
from slipstream.text.prompts import Prompt


@dataclass(frozen=True, slots=True)
class Echo:
    """Prompts that are returned with the answers."""

    texts: tuple[str, ...]
    """One for each prompt."""
    logprobs: int | None
    """Alternatives to report for each of their tokens; None reports no log-probabilities."""
    with_answers: bool
    """False where `max_tokens` is 0: the token that the engine makes is not shown."""


@dataclass(frozen=True, slots=True)
class Job:
    """One request: every prompt gets `params.n` answers."""

    id: str
    """The id that the client sees."""
    prompts: list[list[int]]
    params: SamplingParams
    seeds: tuple[int, ...]
    """One for each prompt, so that the prompts of a request are sampled independently."""
    constraint: Constraint | None = None
    """The source of the parameters' structured output."""
    options: RequestOptions = DEFAULT_OPTIONS
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False
    prompt_logprobs: int | None = None
    """Alternatives a token under the response's `prompt_logprobs`; None leaves it out. The engine may report more."""
    inputs: Seq[Prompt] | None = None
    """What the engine is given in place of the prompts' tokens."""
    echo: Echo | None = None
    """The prompts that are returned before the answers."""
    created: int = field(default_factory=lambda: int(time.time()))
    log_fields: dict[str, Any] = field(default_factory=dict)
    """Fields of the request's line in the access log."""

    @property
    def num_answers(self) -> int:
        return len(self.prompts) * self.params.n

    def params_of(self, prompt: int) -> SamplingParams:
        """The parameters of the `prompt`-th prompt, its own seed among them."""
        seed = self.seeds[prompt]
        return self.params if seed == self.params.seed else replace(self.params, seed=seed)
