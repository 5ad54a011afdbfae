"""What a request says of itself, and how its answers end."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from enum import StrEnum

from slipstream.errors import RequestError
from slipstream.reasoning.options import StepOptions, parse_step_options
from slipstream.text.inputs import check_characters
from slipstream.text.prediction import Prediction, parse_prediction


class FinishReason(StrEnum):
    """Why a sequence ended; the values are vLLM's, of which OpenAI clients know the first two."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    """Its masks left no token, and its text does not satisfy the whole grammar."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of a token under the target's unprocessed distribution, and the `top` alternatives."""

    token_id: int
    logprob: float
    rank: int
    """1 for the most probable token."""
    top: tuple[tuple[int, float], ...] = ()
    """(token id, log-probability), most probable first."""


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """What a caller may set for a request in addition to its sampling parameters. Nothing here changes the text, but
    `reasoning`, which is lossy and needs an engine that allows it.

    Raises `RequestError` for a value that no engine can serve.
    """

    tenant: str = ""
    """Whose request it is. Tenants share neither reused prefixes nor what drafters learn. Those whose names are equal
    up to the first slash are one account, and accounts share running places evenly."""
    task: str = ""
    """The caller's name for the kind of request; drafters and the controller may keep statistics by it."""
    max_draft_tokens: int | None = None
    """The most draft tokens a step; 0 turns speculation off for the request, None leaves the bound to the engine."""
    draft_method: str | None = None
    """The request's explicit drafter, one of `Engine.draft_methods`; None leaves the choice to the engine."""
    prediction: Prediction | None = None
    """What the answer is expected to be, text or token ids: drafted in addition to what the drafter proposes, for this
    request alone. OpenAI's form is taken too."""
    learn: bool = True
    """Whether a drafter that learns from what is served may learn from this request; False keeps nothing of it."""
    reasoning: StepOptions | None = None
    """Step-level speculation: a draft writes whole steps of thinking. May change the text. An object is taken too."""

    def __post_init__(self) -> None:
        if not isinstance(self.learn, bool):
            raise RequestError(f"learn must be true or false, got {self.learn!r}")
        for name in ("tenant", "task"):
            value = getattr(self, name)
            if not isinstance(value, str):
                raise RequestError(f"{name} must be a string, got {value!r}")
            check_characters(name, value)
        bound = self.max_draft_tokens
        is_whole = isinstance(bound, int) and not isinstance(bound, bool)
        if bound is not None and (not is_whole or bound < 0):
            raise RequestError(f"max_draft_tokens must be a whole number of at least 0, got {bound!r}")
        if not isinstance(self.draft_method, str | None):
            raise RequestError(f"draft_method must be a string, got {self.draft_method!r}")
        if self.prediction is not None:
            object.__setattr__(self, "prediction", parse_prediction(self.prediction))
        if self.reasoning is not None:
            object.__setattr__(self, "reasoning", parse_step_options(self.reasoning))


DEFAULT_OPTIONS = RequestOptions()


def tenant_account(tenant: str) -> str:
    """The account that a tenant belongs to: its name up to the first slash. What is scarce is shared by account."""
    return tenant.partition("/")[0]


@dataclass(frozen=True, slots=True)
class EmittedTokens:
    """What was emitted of one answer before, by this engine or another one; its continuation begins behind it.

    Raises `RequestError` for lists that do not belong together.
    """

    token_ids: Seq[int] = ()
    from_draft: Seq[bool] = ()
    """One a token, or empty where it is not known: then none counts as an accepted draft token."""
    logprobs: Seq[TokenLogprob] = ()
    """One a token where the request's parameters request log-probabilities, else empty."""

    def __post_init__(self) -> None:
        num = len(self.token_ids)
        for name, values in (("from_draft", self.from_draft), ("logprobs", self.logprobs)):
            if len(values) not in (0, num):
                raise RequestError(f"emitted {name} has {len(values)} entries for {num} tokens")
