"""What an audit sends and what it gets back, in a form that can be kept on disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from slipstream.sampling.noise import derive_seed
from slipstream.text.jsonl import Message


@dataclass(frozen=True, slots=True)
class AuditRequest:
    """One request. `token_ids`, `text` or `messages` is its prompt."""

    number: int
    prompt: int
    """Index of the prompt in the data. Answers to the same prompt form a stratum of the tests."""
    task: str
    params: Mapping[str, Any]
    """Sampling parameters under the names of `SamplingParams`, without `seed` and `max_tokens`."""
    max_tokens: int
    seed: int
    profile: str = ""
    """Name of the set of sampling parameters."""
    token_ids: tuple[int, ...] | None = None
    text: str | None = None
    messages: tuple[Message, ...] = ()

    @property
    def is_greedy(self) -> bool:
        return bool(self.params.get("temperature", 1.0) == 0)

    @property
    def num_answers(self) -> int:
        return int(self.params.get("n", 1))

    def answer_seed(self, index: int) -> int:
        """The seed of answer `index`, as `Engine` derives it."""
        return derive_seed(self.seed, index)


@dataclass(frozen=True, slots=True)
class TokenTop:
    """A token as a server reports it: its log-probability and the most probable alternatives."""

    token: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()
    """(token, log-probability), most probable first."""

    @property
    def is_filled_in(self) -> bool:
        """A zero without alternatives: llama.cpp gives one for every token that a pass with drafts yields."""
        return self.logprob == 0 and not self.top


@dataclass(slots=True)
class AuditAnswer:
    """One answer to a request."""

    index: int = 0
    """Index among the request's `n` answers."""
    text: str = ""
    token_ids: list[int] | None = None
    """With the end token, where the server reports it; None where the server gives no ids."""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    tops: list[TokenTop] | None = None
    num_tokens: int | None = None
    """Tokens of the answer, as far as anything but `usage` says: its ids, or its log-probabilities."""
    num_hidden: int = 0
    """Tokens at most that `num_tokens` may lack: log-probabilities often leave out the end token, or parts of a
    character."""


@dataclass(slots=True)
class AuditReply:
    """What a request was answered with."""

    request: int
    answers: list[AuditAnswer] = field(default_factory=list)
    num_prompt_tokens: int | None = None
    """From `usage`; None where the server does not report it."""
    num_output_tokens: int | None = None
    """From `usage`, of all answers together."""
    num_total_tokens: int | None = None
    num_draft_tokens: int = 0
    """Draft tokens of an engine in this process."""
    num_accepted_tokens: int = 0
    prompt_token_ids: list[int] | None = None
    error: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Plain values; `msgspec.convert` is the way back."""
        return asdict(self)
