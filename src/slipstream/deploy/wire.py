"""Requests and updates as JSON, and back: nothing is lost on the way."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, fields
from typing import Any

from slipstream.core.metrics.request import RequestMetrics
from slipstream.core.types import EmittedTokens, FinishReason, RequestOptions, TokenLogprob
from slipstream.deploy.protocol import Message
from slipstream.engine.logprobs import TokenTexts
from slipstream.engine.outputs import CompletionOutput, RequestOutput, Update
from slipstream.sampling.params import SamplingParams
from slipstream.text.stream import Piece

_NOT_SENT = ("output_kind", "extra_args", "structured_outputs")
"""Without effect, or converted."""


def request_to_json(prompt: Seq[int], params: SamplingParams, options: RequestOptions) -> Message:
    """What a replica needs to know of a request."""
    values = {field.name: getattr(params, field.name) for field in fields(params)}
    sent = {name: value for name, value in values.items() if name not in _NOT_SENT and value is not None}
    if params.structured is not None:
        structured = (
            asdict(params.structured) if not isinstance(params.structured, Mapping) else params.structured
        )
        sent["structured"] = {name: value for name, value in structured.items() if value is not None}
    return {"prompt": list(prompt), "params": sent, "options": asdict(options)}


def request_from_json(payload: Message) -> tuple[list[int], SamplingParams, RequestOptions]:
    """The request; raises `RequestError` for what no engine takes."""
    params = {"max_tokens": None} | payload["params"]
    return payload["prompt"], SamplingParams.from_mapping(params), RequestOptions(**payload["options"])


def emitted_from_json(emitted: Seq[Message]) -> list[EmittedTokens]:
    """What was passed on of each answer."""
    return [
        EmittedTokens(
            entry["token_ids"], entry.get("from_draft", ()), [_logprob(value) for value in entry["logprobs"]]
        )
        for entry in emitted
    ]


def update_to_json(update: Update) -> Message:
    """An update, with the request's output where it ends it."""
    return {
        "index": update.index,
        "tokens": update.token_ids,
        "from_draft": update.from_draft,
        "pieces": [[piece.text, piece.from_draft] for piece in update.pieces],
        "logprobs": None if update.logprobs is None else [_plain(entry) for entry in update.logprobs],
        "finish": update.finish_reason,
        "output": None if update.output is None else _output(update.output),
    }


def update_from_json(value: Message, request_id: str, output: RequestOutput | None) -> Update:
    """The update, with the `output` that was made for it."""
    return Update(
        request_id=request_id,
        index=value["index"],
        token_ids=value["tokens"],
        pieces=[Piece(text, from_draft) for text, from_draft in value["pieces"]],
        logprobs=None if value["logprobs"] is None else [_logprob(entry) for entry in value["logprobs"]],
        finish_reason=None if value["finish"] is None else FinishReason(value["finish"]),
        output=output,
        from_draft=value.get("from_draft") or [False] * len(value["tokens"]),
    )


def output_from_json(
    value: Message, request_id: str, prompt: Seq[int], answers: Seq[Message], texts: TokenTexts
) -> RequestOutput:
    """The finished request: what its last update said, and of each answer the text, tokens and log-probabilities that
    were passed on (`answers`)."""
    outputs = []
    for index, (said, passed) in enumerate(zip(value["answers"], answers, strict=True)):
        outputs.append(
            CompletionOutput(
                index=index,
                text=passed["text"],
                token_ids=passed["tokens"],
                from_draft=said["from_draft"],
                finish_reason=FinishReason(said["finish"]),
                stop_reason=said["stop"],
                seed=said["seed"],
                token_logprobs=passed["logprobs"],
                metrics=RequestMetrics(**said["metrics"]),
                texts=texts,
            )
        )
    scored = value["prompt_logprobs"]
    return RequestOutput(
        request_id=request_id,
        prompt=None,
        prompt_token_ids=list(prompt),
        outputs=outputs,
        prompt_token_logprobs=None
        if scored is None
        else [None if entry is None else _logprob(entry) for entry in scored],
        texts=texts,
    )


def _output(output: RequestOutput) -> Message:
    scored = output.prompt_token_logprobs
    return {
        "answers": [
            {
                "finish": answer.finish_reason,
                "stop": answer.stop_reason,
                "seed": answer.seed,
                "from_draft": answer.from_draft,
                "metrics": asdict(answer.metrics),
            }
            for answer in output.outputs
        ],
        "prompt_logprobs": None
        if scored is None
        else [None if entry is None else _plain(entry) for entry in scored],
    }


def _plain(entry: TokenLogprob) -> list[Any]:
    return [entry.token_id, entry.logprob, entry.rank, entry.top]


def _logprob(value: Seq[Any]) -> TokenLogprob:
    token_id, logprob, rank, top = value
    return TokenLogprob(token_id, logprob, rank, tuple((token, number) for token, number in top))
