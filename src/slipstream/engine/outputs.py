"""What callers get back."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from slipstream.core.metrics.request import RequestMetrics
from slipstream.core.request import FinishReason, TokenLogprob
from slipstream.core.sequence import Sequence
from slipstream.engine.logprobs import Logprob, TokenTexts, by_token
from slipstream.text.stream import Piece


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One answer. `token_ids` include the end or stop token; `text` does not."""

    index: int
    text: str
    token_ids: list[int]
    from_draft: list[bool]
    """One a token: True for an accepted draft token, False for the target's own."""
    finish_reason: FinishReason
    stop_reason: int | str | None
    """The stop token id or stop string that ended the answer; None at the model's own end token."""
    seed: int
    """With this seed and n = 1 the same answer comes again, if it is `reproducible`."""
    token_logprobs: list[TokenLogprob] | None
    """One a token, where `SamplingParams.logprobs` is set."""
    metrics: RequestMetrics
    texts: TokenTexts = field(repr=False, compare=False)

    @property
    def logprobs(self) -> list[dict[int, Logprob]] | None:
        """The same in vLLM's shape: one a token, token id to log-probability, rank and text. Made when it is read."""
        if self.token_logprobs is None:
            return None
        return [by_token(entry, self.texts) for entry in self.token_logprobs]

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum over the answer's tokens; None unless `SamplingParams.logprobs` is set."""
        return None if self.token_logprobs is None else sum(entry.logprob for entry in self.token_logprobs)

    def finished(self) -> bool:
        """Always True; vLLM's outputs have it too."""
        return True

    @property
    def reproducible(self) -> bool:
        """False for what was sampled and drafted for under `rejection` or `block`: there no seed repeats an answer."""
        return self.metrics.reproducible


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A finished request: its prompt and its `n` answers."""

    request_id: str
    prompt: str | None
    """None when the prompt was given as token ids."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_token_logprobs: list[TokenLogprob | None] | None
    """One a token of the prompt, None for its first, where `SamplingParams.prompt_logprobs` is set."""
    texts: TokenTexts = field(repr=False, compare=False)

    @property
    def finished(self) -> bool:
        """Always True; vLLM's outputs have it too."""
        return True

    @property
    def prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        """The prompt's log-probabilities in vLLM's shape."""
        if self.prompt_token_logprobs is None:
            return None
        return [
            None if entry is None else by_token(entry, self.texts) for entry in self.prompt_token_logprobs
        ]

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens whose keys and values were reused, in the first answer."""
        return self.outputs[0].metrics.num_cached_tokens

    @property
    def metrics(self) -> RequestMetrics:
        """The counters of all answers together."""
        return RequestMetrics.merged([output.metrics for output in self.outputs])


@dataclass(frozen=True, slots=True)
class Update:
    """What a step, or some steps, added to one answer."""

    request_id: str
    index: int
    token_ids: list[int]
    pieces: list[Piece]
    """Text that was released; it may lag behind the tokens."""
    logprobs: list[TokenLogprob] | None
    finish_reason: FinishReason | None
    output: RequestOutput | None
    """Set with the update that ends the request's last answer."""
    from_draft: list[bool] = field(default_factory=list)
    """One a token of `token_ids`, as in `CompletionOutput`."""

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    def joined(self, later: Update) -> Update:
        """This one and the same answer's next one as one."""
        return replace(
            later,
            token_ids=self.token_ids + later.token_ids,
            from_draft=self.from_draft + later.from_draft,
            pieces=self.pieces + later.pieces,
            logprobs=None if later.logprobs is None else (self.logprobs or []) + later.logprobs,
        )


def completion(sequence: Sequence, texts: TokenTexts) -> CompletionOutput:
    """The finished `sequence` as its caller sees it."""
    assert sequence.finish_reason is not None
    return CompletionOutput(
        index=sequence.index,
        text=sequence.text,
        token_ids=sequence.output_token_ids,
        from_draft=sequence.from_draft,
        finish_reason=sequence.finish_reason,
        stop_reason=sequence.stop_reason,
        seed=sequence.seed,
        token_logprobs=sequence.logprobs,
        metrics=sequence.metrics,
        texts=texts,
    )
