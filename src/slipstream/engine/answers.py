"""The requests under way: what each step adds to their answers, until the last one has ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq

from slipstream.core.request import FinishReason
from slipstream.core.sequence import Sequence
from slipstream.core.step import StepItem
from slipstream.engine.logprobs import TokenTexts, record_logprobs
from slipstream.engine.outputs import RequestOutput, Update, completion
from slipstream.engine.requests import Answer, Request, UpdateCallback
from slipstream.engine.steps import record_acceptance, record_prediction
from slipstream.errors import RequestError


class Answers:
    """Requests by their ids, and their unfinished answers."""

    def __init__(self, texts: TokenTexts, free: Callable[[Sequence], None]) -> None:
        """`free` is called for each sequence that has ended, before its output is made."""
        self._texts = texts
        self._free = free
        self._requests: dict[str, Request] = {}
        self._answers: dict[int, Answer] = {}
        self._calls: list[tuple[UpdateCallback, Update]] = []
        """What the step has to deliver."""
        self._aborted: list[Update] | None = None
        """While callbacks run: the updates of the requests that they abort."""

    def __len__(self) -> int:
        """Unfinished answers."""
        return len(self._answers)

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def check_unused(self, request_id: str) -> None:
        """Raise `RequestError` for an id that is in use."""
        if request_id in self._requests:
            raise RequestError(f"request id {request_id!r} is in use; ids are unique among running requests")

    def add(self, request: Request, answers: Seq[Answer]) -> None:
        """A request begins with these answers, those of its own that have not ended."""
        self._requests[request.id] = request
        self._answers.update((answer.sequence.id, answer) for answer in answers)

    def of(self, sequence: Sequence) -> Answer:
        """An unfinished sequence's answer."""
        return self._answers[sequence.id]

    def arrived_s(self, sequence: Sequence) -> float:
        """Return when its request came, by `perf_counter`."""
        return self._requests[sequence.request_id].arrived_s

    def unfinished(self, request_id: str) -> list[Sequence]:
        """The sequences of a request that have not ended; none of an unknown one."""
        request = self._requests.get(request_id)
        return [] if request is None else [s for s in request.sequences if s.id in self._answers]

    def abort(self, request_id: str) -> list[Update]:
        """End a request; returns its last updates, which `deliver` returns too where callbacks abort it."""
        answers = [self._answers[sequence.id] for sequence in self.unfinished(request_id)]
        for answer in answers:
            answer.sequence.finish_reason = answer.sequence.finish_reason or FinishReason.ABORT
        updates = [self._update(answer, 0) for answer in answers]
        if self._aborted is not None:
            self._aborted += updates
        return updates

    # --- a step -----------------------------------------------------------------------------------------------

    def append(self, item: StepItem) -> None:
        """Append the verdict's tokens until a stop rule ends the answer, and count them."""
        stop = self._answers[item.sequence.id].stop
        for number, token_id in enumerate(item.verdict.token_ids(item.proposal)):
            if stop.append(token_id, from_draft=number < len(item.verdict.accepted)):
                break
        item.record_emitted(len(item.sequence.token_ids) - item.length_before)
        record_logprobs(item)
        record_acceptance(item)

    def emit(self, items: Seq[StepItem]) -> list[Update]:
        """What the step has added to each answer, whose callers are to be called back; frees what has ended."""
        updates: list[Update] = []
        for item in items:
            on_update = self._requests[item.sequence.request_id].on_update
            updates.append(self._update(self._answers[item.sequence.id], item.num_emitted))
            if on_update is not None:
                self._calls.append((on_update, updates[-1]))
        return updates

    def deliver(self) -> list[Update]:
        """Call back after the step; returns the last updates of the requests that callbacks abort.

        A callback that raises keeps no other from its update.
        """
        calls, self._calls = self._calls, []
        aborted: list[Update] = []
        self._aborted = aborted
        failure: BaseException | None = None
        for on_update, update in calls:
            try:
                on_update(update)
            except BaseException as error:
                failure = failure or error
        self._aborted = None
        if failure is not None:
            raise failure
        return aborted

    def _update(self, answer: Answer, num_new: int) -> Update:
        """What a sequence has gained; when it is finished, what it holds is freed."""
        sequence = answer.sequence
        request = self._requests[sequence.request_id]
        metrics = sequence.metrics
        metrics.num_output_tokens = sequence.num_output_tokens
        metrics.total_s = time.perf_counter() - request.arrived_s
        metrics.other_s = metrics.total_s - metrics.queue_s - metrics.draft_s - metrics.verify_s
        if num_new and sequence.num_new_tokens == num_new:
            metrics.time_to_first_token_s = metrics.total_s
        pieces = answer.text.take(sequence.finished)
        sequence.text = answer.text.text
        output = self._finish(request, sequence) if sequence.finished else None
        new = len(sequence.token_ids) - num_new
        return Update(
            request_id=request.id,
            index=sequence.index,
            token_ids=sequence.token_ids[new:],
            pieces=pieces,
            logprobs=None
            if sequence.logprobs is None
            else sequence.logprobs[len(sequence.logprobs) - num_new :],
            finish_reason=sequence.finish_reason,
            output=output,
            from_draft=sequence.from_draft[len(sequence.from_draft) - num_new :],
        )

    def _finish(self, request: Request, sequence: Sequence) -> RequestOutput | None:
        """Free what a finished sequence holds; the request's output when it was the last one."""
        record_prediction(sequence)
        self._free(sequence)
        del self._answers[sequence.id]
        request.unfinished -= 1
        if request.unfinished:
            return None
        del self._requests[request.id]
        first = request.sequences[0]
        return RequestOutput(
            request_id=request.id,
            prompt=request.prompt,
            prompt_token_ids=first.token_ids[: first.num_prompt_tokens],
            outputs=[completion(s, self._texts) for s in request.sequences],
            prompt_token_logprobs=next(s.prompt_logprobs for s in request.sequences if s.scores_prompt),
            texts=self._texts,
        )
