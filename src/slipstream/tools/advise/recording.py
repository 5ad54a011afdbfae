"""One run of the target without speculation, with what every drafter would have proposed at every place."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import closing
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any

from slipstream.core.proposal import Proposal
from slipstream.core.request import RequestOptions
from slipstream.draft.combine.merging import depth_along
from slipstream.engine.closed_loop import AddedRequest, BenchJob, steps_in_turn
from slipstream.engine.engine import Engine
from slipstream.errors import RequestError
from slipstream.tools.advise.candidates import Candidate
from slipstream.tools.advise.recording_drafter import RecordedDraft, RecordingDrafter

OnProgress = Callable[[int, int], None]
"""Called with how much is done, and of how much."""

Drafted = tuple[int, int, int]
"""Nodes of a proposal, its levels, and how many of its tokens were right, top down."""
NOT_DRAFTED: Drafted = (0, 0, 0)


@dataclass(frozen=True)
class RecordedRequest:
    """A request and its answer without speculation."""

    task: str
    prompt_token_ids: list[int]
    num_cached: int
    """Prompt tokens that were reused instead of computed."""
    output_token_ids: list[int]
    max_tokens: int
    seed: int
    drafts: Mapping[str, list[Drafted]] = field(default_factory=dict)
    """By candidate: what it would have drafted after each token of the answer, before the first one first."""

    @property
    def num_output(self) -> int:
        return len(self.output_token_ids)

    @property
    def num_prompt_rows(self) -> int:
        """Prompt tokens to compute."""
        return len(self.prompt_token_ids) - self.num_cached


@dataclass(frozen=True)
class Recorded:
    """All requests of a recording, in the order in which they were sent."""

    requests: tuple[RecordedRequest, ...]
    num_asked: int
    """Requests that there were; fewer were recorded where the time was up."""
    concurrency: int

    @property
    def tasks(self) -> list[str]:
        """Return the tasks in the order of the requests."""
        return list(dict.fromkeys(request.task for request in self.requests))

    def of(self, task: str | None) -> list[int]:
        """Places of a task's requests; None for all."""
        return [place for place, request in enumerate(self.requests) if task is None or request.task == task]

    def as_json(self) -> dict[str, Any]:
        """Plain values; `msgspec.convert` is the way back."""
        return asdict(self)


def record(
    engine: Engine,
    candidates: Seq[Candidate],
    jobs: Seq[BenchJob],
    concurrency: int,
    budget_s: float,
    on_progress: OnProgress,
) -> Recorded:
    """Answer the jobs on an engine whose drafter is a `RecordingDrafter` of the candidates.

    No request is begun after `budget_s`; those under way are ended. Raises `RequestError` where a job's answer has no
    token.
    """
    drafter = engine.drafter_as(RecordingDrafter)
    drafter.replay, drafter.drafts = None, []
    answers = _answers(engine, jobs, concurrency, budget_s, on_progress)
    drafts, drafter.drafts = drafter.drafts, []
    scored = _scored(drafts, candidates, answers)
    requests = [
        RecordedRequest(
            task=job.task,
            prompt_token_ids=list(job.token_ids),
            num_cached=answers[key].metrics.num_cached_tokens,
            output_token_ids=list(answers[key].token_ids),
            max_tokens=int(job.params.max_tokens or len(answers[key].token_ids)),
            seed=int(job.params.seed or 0),
            drafts=scored[key],
        )
        for number, job in enumerate(jobs)
        if (key := str(number)) in answers
    ]
    if not any(request.num_output for request in requests):
        raise RequestError("no answer has a token; there is nothing to advise on")
    return Recorded(tuple(requests), len(jobs), concurrency)


def _answers(
    engine: Engine, jobs: Seq[BenchJob], concurrency: int, budget_s: float, on_progress: OnProgress
) -> dict[str, Any]:
    """The answers of the jobs that were begun within the budget, by the job's number; two jobs at least."""
    engine.reset_caches()
    answers: dict[str, Any] = {}
    started_s = time.perf_counter()

    def begun() -> Iterator[AddedRequest]:
        for number, job in enumerate(jobs):
            if number > 1 and time.perf_counter() - started_s > budget_s:
                return
            yield str(number), job.token_ids, job.params, RequestOptions(task=job.task)

    with closing(steps_in_turn(engine, begun(), concurrency)) as steps:
        for update in chain.from_iterable(steps):
            if update.output is not None:
                answers[update.request_id] = update.output.outputs[0]
                on_progress(len(answers), len(jobs))
    return answers


def _scored(
    drafts: Seq[RecordedDraft], candidates: Seq[Candidate], answers: Mapping[str, Any]
) -> dict[str, dict[str, list[Drafted]]]:
    """Request id to candidate to what was drafted at each place, once it is known what came."""
    names = [candidate.name for candidate in candidates if not candidate.is_lookup]
    found: dict[str, dict[str, list[Drafted]]] = {
        key: {name: [NOT_DRAFTED] * len(answer.token_ids) for name in names}
        for key, answer in answers.items()
    }
    for draft in drafts:
        answer = answers.get(draft.request_id)
        if answer is not None and draft.position < len(answer.token_ids):
            came = answer.token_ids[draft.position :]
            name = candidates[draft.member].name
            found[draft.request_id][name][draft.position] = judged(draft.proposal, came)
    return found


def judged(proposal: Proposal, came: Seq[int]) -> Drafted:
    """What a proposal was worth, given the tokens that came."""
    if not len(proposal):
        return NOT_DRAFTED
    return len(proposal), proposal.depth, depth_along(proposal, came[: proposal.depth])
