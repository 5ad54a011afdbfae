"""Answers of an engine in this process, in mixed batches."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import closing
from dataclasses import dataclass, field
from itertools import chain

from slipstream.core.request import RequestOptions
from slipstream.engine.closed_loop import steps_in_turn
from slipstream.engine.engine import Engine
from slipstream.engine.outputs import RequestOutput, Update
from slipstream.sampling.params import SamplingParams
from slipstream.tools.audit.records import AuditAnswer, AuditReply, AuditRequest


@dataclass(slots=True)
class Streamed:
    """What the updates of a request added up to, by answer."""

    token_ids: dict[int, list[int]] = field(default_factory=dict)
    text: dict[int, str] = field(default_factory=dict)

    def add(self, update: Update) -> None:
        """Append an update."""
        self.token_ids.setdefault(update.index, []).extend(update.token_ids)
        self.text[update.index] = self.text.get(update.index, "") + update.text


def sampling_params(request: AuditRequest) -> SamplingParams:
    """The engine's parameters for a request; raises `RequestError`."""
    params = {**request.params, "max_tokens": request.max_tokens, "seed": request.seed}
    return SamplingParams.from_mapping(params)


def answer_params(request: AuditRequest) -> SamplingParams:
    """The same for one of its answers alone."""
    return SamplingParams.from_mapping({**request.params, "max_tokens": request.max_tokens, "n": 1})


def answer_all(
    engine: Engine,
    requests: Seq[AuditRequest],
    concurrency: int,
    on_reply: Callable[[AuditReply, RequestOutput, Streamed], None],
) -> None:
    """Answer the requests, `concurrency` at a time: when one ends, the next is added. Nothing is left behind."""
    sent = {f"audit-{request.number}": request for request in requests}
    streamed = {name: Streamed() for name in sent}
    added = (
        (name, list(one.token_ids or ()), sampling_params(one), RequestOptions(task=one.task))
        for name, one in sent.items()
    )
    with closing(steps_in_turn(engine, added, concurrency)) as steps:
        for update in chain.from_iterable(steps):
            streamed[update.request_id].add(update)
            if update.output is not None:
                reply = reply_of(sent[update.request_id], update.output)
                on_reply(reply, update.output, streamed.pop(update.request_id))


def reply_of(request: AuditRequest, output: RequestOutput) -> AuditReply:
    """An engine's output as a reply; its metrics are its `usage`."""
    answers = [
        AuditAnswer(
            index=one.index,
            text=one.text,
            token_ids=list(one.token_ids),
            finish_reason=str(one.finish_reason),
            stop_reason=one.stop_reason,
            num_tokens=len(one.token_ids),
        )
        for one in output.outputs
    ]
    counts = output.metrics
    return AuditReply(
        request=request.number,
        answers=answers,
        num_prompt_tokens=counts.num_prompt_tokens,
        num_output_tokens=counts.num_output_tokens,
        prompt_token_ids=list(output.prompt_token_ids),
        num_draft_tokens=counts.num_draft_tokens,
        num_accepted_tokens=counts.num_accepted_tokens,
    )
