"""The answers of a routed request, put together as they come from one replica after another."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from slipstream.core.metrics.request import RequestMetrics
from slipstream.core.types import FinishReason
from slipstream.deploy.protocol import Message
from slipstream.engine.logprobs import TokenTexts
from slipstream.engine.outputs import CompletionOutput, RequestOutput, Update
from slipstream.sampling.noise import derive_seed
from slipstream.sampling.params import SamplingParams


@dataclass(slots=True)
class Assembly:
    """The answers of a request as they come."""

    prompt: Seq[int]
    seed: int
    texts: list[str]
    tokens: list[list[int]]
    from_draft: list[list[bool]]
    finished: list[FinishReason | None]
    logprobs: list[list[Any] | None]
    lossy: bool = False
    """Whether the request asked for step-level speculation."""

    @classmethod
    def of(cls, prompt: Seq[int], params: SamplingParams, seed: int, lossy: bool = False) -> Assembly:
        """Nothing yet."""
        num = range(params.n)
        logprobs: list[list[Any] | None] = [None if params.logprobs is None else [] for _ in num]
        return cls(
            prompt,
            seed,
            ["" for _ in num],
            [[] for _ in num],
            [[] for _ in num],
            [None for _ in num],
            logprobs,
            lossy,
        )

    def add(self, update: Update) -> None:
        """Count an update."""
        self.texts[update.index] += update.text
        self.tokens[update.index] += update.token_ids
        self.from_draft[update.index] += update.from_draft
        self.finished[update.index] = update.finish_reason
        held = self.logprobs[update.index]
        if held is not None:
            held += update.logprobs or []

    def answers(self) -> list[Message]:
        """For `output_from_json`."""
        each = zip(self.texts, self.tokens, self.logprobs, strict=True)
        return [{"text": text, "tokens": tokens, "logprobs": logprobs} for text, tokens, logprobs in each]

    def aborted(self, request_id: str, texts: TokenTexts) -> list[Update]:
        """The last updates of a request that is aborted: what was passed on is all of its answers. Steps and times are
        with the replica, and are not counted."""
        outputs = [
            CompletionOutput(
                index=index,
                text=self.texts[index],
                token_ids=tokens,
                from_draft=self.from_draft[index],
                finish_reason=self.finished[index] or FinishReason.ABORT,
                stop_reason=None,
                seed=derive_seed(self.seed, index),
                token_logprobs=self.logprobs[index],
                metrics=RequestMetrics(
                    num_prompt_tokens=len(self.prompt),
                    num_output_tokens=len(tokens),
                    seed=derive_seed(self.seed, index),
                    lossy=self.lossy,
                ),
                texts=texts,
            )
            for index, tokens in enumerate(self.tokens)
        ]
        output = RequestOutput(request_id, None, list(self.prompt), outputs, None, texts)
        going_on = [index for index, reason in enumerate(self.finished) if reason is None]
        return [
            Update(
                request_id,
                index,
                [],
                [],
                None if self.logprobs[index] is None else [],
                FinishReason.ABORT,
                output if index == going_on[-1] else None,
            )
            for index in going_on
        ]
