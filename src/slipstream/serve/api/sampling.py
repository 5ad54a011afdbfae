"""From a request's body to sampling parameters and options. The only place where that happens."""

from __future__ import annotations

import re
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any

from slipstream.core.request import RequestOptions
from slipstream.errors import RequestError
from slipstream.reasoning.options import parse_step_options
from slipstream.sampling.noise import draw_seed
from slipstream.sampling.params import MAX_SEED, SamplingParams
from slipstream.serve.api.constraints import Constraint
from slipstream.serve.api.errors import ApiError, context_exceeded, invalid
from slipstream.serve.api.schema import ChatBody, CompletionBody, GenerationBody
from slipstream.serve.config import ServeConfig

COMPLETION_TOKENS = 16
"""The default length of a completion, as at OpenAI. A chat may fill the context."""

_SAME_NAME = (
    *("n", "temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "min_tokens", "ignore_eos"),
    *("include_stop_str_in_output", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("logit_bias", "allowed_token_ids", "bad_words", "prompt_logprobs", "skip_special_tokens"),
)
"""Parameters that mean the same in a body and in `SamplingParams`."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of the model and the server."""

    max_model_len: int
    vocab_size: int
    config: ServeConfig
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Sampling parameters that the checkpoint recommends, the defaults of requests."""


def check_unsupported(body: GenerationBody) -> None:
    """Raise `ApiError` 400 for parameters that are wrong by themselves, before any work."""
    if body.best_of not in (None, body.n or 1):  # as many as are returned, so there is nothing to choose
        message = "best_of is not supported: ask for n answers with logprobs and choose among them"
        raise ApiError(400, message, param="best_of", code="unsupported_parameter")
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options is for streams; set stream to true or leave it out", "stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise invalid("prompt_logprobs cannot be streamed; set stream to false", "prompt_logprobs")
    if isinstance(body, CompletionBody):
        if body.suffix:
            message = "suffix is not supported by this server"
            raise ApiError(400, message, param="suffix", code="unsupported_parameter")
        if body.echo and body.logprobs is not None and body.stream:
            raise invalid("the log-probabilities of an echo cannot be streamed; set stream to false", "echo")
    if isinstance(body, ChatBody) and body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs needs logprobs to be true", "top_logprobs")


def sampling_params(
    body: GenerationBody,
    prompt_lengths: Seq[int],
    seed: int,
    limits: Limits,
    constraint: Constraint | None = None,
) -> SamplingParams:
    """The engine's parameters for all prompts of a request; raises `ApiError` 400 for values that are not
    supported.

    `prompt_lengths` are in tokens; `seed` is the first prompt's of `seeds_of`.
    """
    given = {name: value for name in _SAME_NAME if (value := getattr(body, name)) is not None}
    values: dict[str, Any] = {**limits.defaults, **given}
    values["max_tokens"] = _max_tokens(body, max(prompt_lengths), limits)
    values["logprobs"] = _logprobs(body)
    if (echoed := echoed_logprobs(body)) is not None:
        values["prompt_logprobs"] = max(echoed, body.prompt_logprobs or 0)
    values |= constraint.sampling if constraint is not None else {}
    values["seed"] = seed
    for name in ("logprobs", "prompt_logprobs"):
        if not 0 <= (values.get(name) or 0) <= limits.config.max_logprobs:
            message = (
                f"{name} must be at least 0 and at most {limits.config.max_logprobs}, got {values[name]}"
            )
            raise invalid(message, name)
    for name in ("allowed_token_ids", "stop_token_ids"):  # before each of them is looked at
        if len(values.get(name) or ()) > limits.vocab_size:
            message = f"{name} holds {len(values[name])} ids, but the model has {limits.vocab_size} tokens"
            raise invalid(message, name)
    try:
        params = SamplingParams.from_mapping(values)
        params.check_vocabulary(limits.vocab_size)
    except RequestError as error:
        raise invalid(str(error), _parameter(str(error))) from None
    return params


def seeds_of(body: GenerationBody, num_prompts: int) -> tuple[int, ...]:
    """A seed for every prompt: the given one, else one drawn for each prompt, so that the response can name it. -1
    draws one, as in vLLM. Any other negative seed is raised by 2**63, since the engine's seeds are not negative.
    """
    if body.seed is not None and body.seed != -1:
        if not -MAX_SEED - 1 <= body.seed <= MAX_SEED:
            message = f"seed must be at least {-MAX_SEED - 1} and at most {MAX_SEED}, got {body.seed}"
            raise invalid(message, "seed")
        return (body.seed & MAX_SEED,) * num_prompts
    return tuple(draw_seed() for _ in range(num_prompts))


def request_options(body: GenerationBody, tenant: str, methods: Seq[str]) -> RequestOptions:
    """What the body sets for the request in addition to its sampling parameters.

    `methods` are the drafters that the engine has. Raises `ApiError` 400 where another is named, or where the bound
    on draft tokens is negative, `PredictionError` for an empty prediction, and `ReasoningError` for settings of
    step-level speculation that cannot be.
    """
    expected = None if body.prediction is None else body.prediction.model_dump()
    options = RequestOptions(
        tenant=tenant,
        task=body.task or "",
        prediction=expected,  # type: ignore[arg-type]
        learn=body.learn is not False,
    )
    speculation = body.speculation
    if speculation is None:
        return options
    if speculation.reasoning not in (None, False):
        options = replace(options, reasoning=parse_step_options(speculation.reasoning))
    if speculation.max_tokens is not None and speculation.max_tokens < 0:
        message = f"speculation.max_tokens must be at least 0, got {speculation.max_tokens}"
        raise invalid(message, "speculation.max_tokens")
    if speculation.method not in (None, "off", *methods):
        choice = " or ".join(map(repr, dict.fromkeys([*methods, "off"])))
        message = f"this server does not draft by {speculation.method!r}; speculation.method may be {choice}"
        raise invalid(message, "speculation.method")
    if speculation.enabled is False or speculation.method == "off":
        return replace(options, max_draft_tokens=0)
    return replace(options, max_draft_tokens=speculation.max_tokens, draft_method=speculation.method)


def scores_only(body: GenerationBody) -> bool:
    """Whether the request wants the prompt echoed and no answer."""
    return (
        isinstance(body, CompletionBody)
        and bool(body.echo)
        and (body.max_tokens, body.max_completion_tokens)
        in (
            (0, None),
            (None, 0),
            (0, 0),
        )
    )


def echoed_logprobs(body: GenerationBody) -> int | None:
    """Alternatives to report for each token of an echoed prompt; None reports no log-probabilities."""
    return body.logprobs if isinstance(body, CompletionBody) and body.echo else None


def _max_tokens(body: GenerationBody, longest_prompt: int, limits: Limits) -> int:
    """The most tokens of an answer: the requested number, or without one what is left of the context."""
    requested = body.max_tokens
    name = "max_tokens"
    if body.max_completion_tokens is not None:
        if requested not in (None, body.max_completion_tokens):
            raise invalid("max_tokens and max_completion_tokens say different things; give one of them", name)
        requested, name = body.max_completion_tokens, "max_completion_tokens"
    room = limits.max_model_len - longest_prompt
    most = limits.config.max_output_tokens
    if requested is None:
        default = room if isinstance(body, ChatBody) else COMPLETION_TOKENS
        default = int(limits.defaults.get("max_tokens", default))
        default = max(default, body.min_tokens or 0)
        return max(1, min(default, room, most or room))
    if scores_only(body):
        return 1  # the engine's step makes a token in any case; it is not shown
    if requested < 1:
        also = "; only with echo it may be 0" if requested == 0 and isinstance(body, CompletionBody) else ""
        raise invalid(f"{name} must be at least 1, got {requested}{also}", name)
    if most is not None and requested > most:
        raise invalid(f"{name} must be at most {most} on this server, got {requested}", name)
    if requested > room:
        however = (
            f"you requested {longest_prompt + requested} tokens ({longest_prompt} in the prompt, "
            f"{requested} in {name}); shorten one of them"
        )
        raise context_exceeded(name, limits.max_model_len, however)
    return requested


def _logprobs(body: GenerationBody) -> int | None:
    """Alternatives to report for each token; None reports no log-probabilities."""
    if isinstance(body, ChatBody):
        return (body.top_logprobs or 0) if body.logprobs else None
    assert isinstance(body, CompletionBody)
    return body.logprobs


def _parameter(message: str) -> str | None:
    """The parameter that a message of `SamplingParams` begins with, if it does."""
    found = re.match(r"(?:each of |an? )?(\w+)", message)
    return found[1] if found and found[1] in (*_SAME_NAME, "seed", "max_tokens", "logprobs") else None
