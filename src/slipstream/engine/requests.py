"""A request while the engine works on it: checked, seeded, split into its answers, called back."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from slipstream.core import Sequence
from slipstream.engine.outputs import Update
from slipstream.engine.stopping import StopRules
from slipstream.errors import RequestError
from slipstream.sampling.noise import derive_seed, draw_seed
from slipstream.sampling.params import SamplingParams
from slipstream.sampling.processors import LogitsProcessor
from slipstream.text.characters import check_characters
from slipstream.text.stream import TextStream

UpdateCallback = Callable[[Update], None]


@dataclass(slots=True)
class Answer:
    """What the engine keeps beside a running sequence."""

    sequence: Sequence
    processor: LogitsProcessor
    text: TextStream
    stop: StopRules


@dataclass(slots=True)
class Request:
    """What the engine keeps of a request until its last answer has ended."""

    id: str
    prompt: str | None
    sequences: list[Sequence]
    arrived_s: float
    on_update: UpdateCallback | None
    unfinished: int = field(init=False)

    def __post_init__(self) -> None:
        self.unfinished = len(self.sequences)


def check_arguments(params: SamplingParams, tenant: str, task: str, max_draft_tokens: int | None) -> None:
    """Raise `RequestError` for what would otherwise fail in a step, among other people's requests."""
    if not isinstance(params, SamplingParams):
        raise RequestError(f"sampling parameters must be a SamplingParams, got {type(params).__name__}")
    if not isinstance(tenant, str):
        raise RequestError(f"tenant must be a string, got {tenant!r}")
    if not isinstance(task, str):
        raise RequestError(f"task must be a string, got {task!r}")
    check_characters("tenant", tenant)
    check_characters("task", task)
    whole = isinstance(max_draft_tokens, int) and not isinstance(max_draft_tokens, bool)
    if max_draft_tokens is not None and (not whole or max_draft_tokens < 0):
        raise RequestError(f"max_draft_tokens must be a whole number of at least 0, got {max_draft_tokens!r}")


def request_seeds(seed: int | None) -> Iterator[int]:
    """The seeds of requests that bring none: from the operating system, or derived from the engine's own.

    Derived in two stages, so that no request meets a seed that some request's n-th answer has.
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
    tenant: str,
    task: str,
    max_draft_tokens: int | None,
    ids: Iterator[int],
    share_prompt: bool,
) -> list[Sequence]:
    """One sequence an answer; where prompts are shared, the later ones wait for the first one's."""
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
            tenant=tenant,
            task=task,
            max_draft_tokens=max_draft_tokens,
            leader=sequences[0] if sequences and share_prompt else None,
        )
        sequence.metrics.num_prompt_tokens = len(prompt_token_ids)
        sequence.metrics.seed = sequence.seed
        sequences.append(sequence)
    return sequences


def deliver(updates: list[Update], callbacks: dict[str, UpdateCallback]) -> None:
    """Call back when the books are closed: a callback may abort requests, and one that raises harms no other."""
    failure: BaseException | None = None
    for update in updates:
        if update.request_id in callbacks:
            try:
                callbacks[update.request_id](update)
            except BaseException as error:
                failure = failure or error
    if failure is not None:
        raise failure
