"""A request in the engine: its options, seeds, sequences and callbacks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any, TypedDict

from slipstream.core.request import DEFAULT_OPTIONS, RequestOptions
from slipstream.core.sequence import Sequence
from slipstream.engine.outputs import Update
from slipstream.engine.stopping import StopRules
from slipstream.errors import RequestError
from slipstream.reasoning.options import StepOptions
from slipstream.sampling.noise import derive_seed, draw_seed
from slipstream.sampling.params import SamplingParams
from slipstream.sampling.processors import LogitsProcessor
from slipstream.text.expected import ExpectedText
from slipstream.text.inputs import is_token_id
from slipstream.text.stream import TextStream

UpdateCallback = Callable[[Update], None]
Expectation = str | Seq[int] | Mapping[str, Any]
"""A prediction: text, token ids or OpenAI's form."""


class _Keywords(TypedDict, total=False):
    tenant: str
    max_draft_tokens: int | None
    draft_method: str | None
    learn: bool
    reasoning: StepOptions | Mapping[str, Any] | None


class RequestKeywords(_Keywords, total=False):
    """The fields of `RequestOptions` as keywords of a call for one request."""

    task: str
    prediction: Expectation | None


class BatchKeywords(_Keywords, total=False):
    """The fields of `RequestOptions` as keywords of a call for several prompts."""

    task: str | Seq[str]
    """One for all, or one for each prompt."""
    prediction: Expectation | Seq[Expectation | None] | None
    """One for all (a list of token ids is one), or one for each prompt."""


class TemplateKeywords(TypedDict, total=False):
    """How a chat template renders the conversations of a call."""

    chat_template: str | None
    add_generation_prompt: bool
    continue_final_message: bool
    tools: Seq[Mapping[str, Any]] | None
    chat_template_kwargs: Mapping[str, Any] | None


class ChatKeywords(BatchKeywords, TemplateKeywords, total=False):
    """The keywords of a call for several conversations."""

    conversations: Seq[Any] | None


def request_options(options: RequestOptions | None, **keywords: Any) -> RequestOptions:
    """`options` with the fields that `keywords` name replaced; raises `RequestError` for a bad value."""
    options = DEFAULT_OPTIONS if options is None else options
    if not isinstance(options, RequestOptions):
        raise RequestError(f"options must be RequestOptions, got {type(options).__name__}")
    return replace(options, **keywords) if keywords else options


def batch_options(
    num_prompts: int, options: RequestOptions | Seq[RequestOptions] | None, keywords: Mapping[str, Any]
) -> list[RequestOptions]:
    """The options of each prompt, with the fields that `keywords` name replaced.

    Raises `RequestError` for a bad value, and where there are not as many options or tasks as prompts.
    """
    each = list(options) if isinstance(options, Seq) else [options] * num_prompts
    if len(each) != num_prompts:
        message = f"options must be one for all or one for each of {num_prompts} prompts, got {len(each)}"
        raise RequestError(message)
    shared: dict[str, Any] = {**keywords}
    several: dict[str, Seq[Any]] = {}
    task, prediction = shared.get("task"), shared.get("prediction")
    if task is not None and not isinstance(task, str):
        several["task"] = task
        if not isinstance(task, Seq) or len(task) != num_prompts:
            raise RequestError(
                f"task must be a string, or one for each of {num_prompts} prompts, got {task!r}"
            )
    if isinstance(prediction, list | tuple) and not (prediction and all(map(is_token_id, prediction))):
        several["prediction"] = prediction
        if len(prediction) != num_prompts:
            raise RequestError(
                f"prediction must be one for all or one for each of {num_prompts} prompts, got {len(prediction)}"
            )
    return [
        request_options(one, **shared | {name: values[place] for name, values in several.items()})
        for place, one in enumerate(each)
    ]


@dataclass(slots=True)
class Answer:
    """A running sequence with its processor, text and stop rules."""

    sequence: Sequence
    processor: LogitsProcessor
    text: TextStream
    stop: StopRules


@dataclass(slots=True)
class Request:
    """A request until its last answer has ended."""

    id: str
    prompt: str | None
    sequences: list[Sequence]
    arrived_s: float
    on_update: UpdateCallback | None = None
    unfinished: int = field(init=False)

    def __post_init__(self) -> None:
        self.unfinished = len(self.sequences)


def request_seeds(seed: int | None) -> Iterator[int]:
    """Seeds for requests without one: from the operating system, or derived from the engine's own.

    Derived in two stages, so that no request gets the seed of another request's n-th answer.
    """
    if seed is None:
        while True:
            yield draw_seed()
    root = derive_seed(seed, 2**40)
    for number in itertools.count(1):
        yield derive_seed(root, number)


def make_sequences(
    request_id: str,
    prompt_token_ids: Seq[int],
    params: SamplingParams,
    seed: int,
    options: RequestOptions,
    ids: Iterator[int],
    share_prompt: bool,
    expected: ExpectedText | None = None,
) -> list[Sequence]:
    """One sequence for each answer; where prompts are shared, the later ones wait for the first one's prompt."""
    sequences: list[Sequence] = []
    for index in range(params.n):
        sequence = Sequence(
            id=next(ids),
            request_id=request_id,
            index=index,
            token_ids=list(prompt_token_ids),
            num_prompt_tokens=len(prompt_token_ids),
            params=params,
            seed=derive_seed(seed, index),
            options=options,
            leader=sequences[0] if sequences and share_prompt else None,
            scores_prompt=index == 0,
            expected=expected,
        )
        sequence.metrics.num_prompt_tokens = len(prompt_token_ids)
        sequence.metrics.seed = sequence.seed
        sequences.append(sequence)
    return sequences


def reproduces(
    verifier_reproduces: bool, drafts: bool, params: SamplingParams, options: RequestOptions = DEFAULT_OPTIONS
) -> bool:
    """Whether the same seed gives the same answer to such a request again, whatever is drafted for it.

    `drafts` says whether the engine's drafter can propose anything.
    """
    undrafted = options.max_draft_tokens == 0 or not (drafts or options.prediction is not None)
    if options.reasoning is not None:
        return False  # a step is drafted or not as memory and the batch allow
    return verifier_reproduces or params.greedy or undrafted


def deliver(updates: list[Update], callbacks: dict[str, UpdateCallback]) -> None:
    """Call back after the step: a callback may abort requests, and one that raises keeps no other from its update."""
    failure: BaseException | None = None
    for update in updates:
        if update.request_id in callbacks:
            try:
                callbacks[update.request_id](update)
            except BaseException as error:
                failure = failure or error
    if failure is not None:
        raise failure
