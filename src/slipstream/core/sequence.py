"""One answer under way."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from slipstream.core.metrics.request import RequestMetrics
from slipstream.core.pending import PendingTail
from slipstream.core.request import (
    DEFAULT_OPTIONS,
    FinishReason,
    RequestOptions,
    TokenLogprob,
    tenant_account,
)
from slipstream.text.encoder_input import EncoderInput

if TYPE_CHECKING:
    from slipstream.sampling.grammars.grammar import Grammar
    from slipstream.sampling.params import SamplingParams
    from slipstream.text.expected import ExpectedText


@dataclass(eq=False)
class Sequence:
    """One answer in the making: the prompt, the committed tokens and how far they are computed.

    A request with n > 1 has n sequences. `num_computed` counts the committed tokens whose keys and values are in
    the target's cache; between steps of a decoding sequence it is `len(token_ids) - 1`.
    """

    id: int
    request_id: str
    index: int
    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    options: RequestOptions = DEFAULT_OPTIONS
    nonce: int = 0
    """Mixed into the random numbers of the classical verifiers. A drafter that remembers earlier requests may have seen
    an answer of the same seed, made with the same random numbers. Drafts that depend on them would bias the text."""
    leader: Sequence | None = None
    """The first sequence of the same request; the others wait for its prompt, to reuse it."""
    grammar: Grammar | None = None
    """What the answer must satisfy, as `params.structured` says; None without a constraint."""
    expected: ExpectedText | None = None
    """The options' prediction in the target's tokens."""
    encoder_input: EncoderInput | None = None
    """What the encoder reads; None for a model without one."""
    has_account: bool = True
    """False where tenants are names that clients choose: all such sequences are one account."""
    num_resumed_tokens: int = 0
    """Leading output tokens that were emitted elsewhere and came with the request."""
    scores_prompt: bool = True
    """Whether it computes the prompt's log-probabilities where they are wanted: one answer of a request does."""
    from_draft: list[bool] = field(default_factory=list)
    """One an output token: True for an accepted draft token, False for the target's own."""
    num_computed: int = 0
    length_at_admission: int = 0
    """Tokens of the text when the sequence was last admitted to the running ones."""
    awaits_draft: bool = False
    """A draft is writing its next step of thinking: the target has nothing to compute until that is whole."""
    num_step_nodes: int = 0
    """Nodes of a whole drafted step, its question included, that its next pass checks: all of them or none."""
    num_fast_tokens: int = 0
    """Leading tokens that are computed in the arithmetic of `fast_prompts`: the prompt's but its last, or none. It goes
    by the request alone, so that a preempted sequence is computed again as it was."""
    tail: PendingTail | None = None
    """What a step in flight adds to the text, while the next step is launched: `token_ids` then ends with as many
    numbers that mean nothing."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    text: str = ""
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    metrics: RequestMetrics = field(default_factory=RequestMetrics)

    @property
    def tenant(self) -> str:
        return self.options.tenant

    @property
    def account(self) -> str:
        """Among which places and steps are shared; '' is one of its own."""
        return tenant_account(self.options.tenant) if self.has_account else ""

    @property
    def task(self) -> str:
        return self.options.task

    @property
    def read_ids(self) -> list[int]:
        """All that the model reads: what its encoder does, if it has one, and the text."""
        given = self.encoder_input
        return self.token_ids if given is None else [*given.token_ids, *self.token_ids]

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens committed so far, without the prompt."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def max_output_tokens(self) -> float:
        """The most that the request allows; the context may allow less."""
        return math.inf if self.params.max_tokens is None else self.params.max_tokens

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_new_tokens(self) -> int:
        """Output tokens that were made here."""
        return self.num_output_tokens - self.num_resumed_tokens

    @property
    def num_tokens_since_admission(self) -> int:
        """Output tokens that were committed since the sequence was last admitted."""
        return len(self.token_ids) - self.length_at_admission

    @property
    def num_pending(self) -> int:
        """Committed tokens that the target has not yet computed; at least 1 while the sequence runs."""
        return len(self.token_ids) - self.num_computed

    @property
    def prefix_account(self) -> str:
        """Among which texts equal `entry_ids` are equal entries: of one tenant and, with an encoder, one input."""
        given = self.encoder_input
        return self.tenant if given is None else f"{self.tenant}\0{given.digest}"

    def entry_ids(self, begin: int = 0, end: int | None = None) -> list[int]:
        """What tells the cache entries of tokens `begin` to `end` from others: equal ids from 0 on are equal entries.

        A token's id; `~id` where `fast_prompts` computes it, which makes another entry of the same text.
        """
        end = len(self.token_ids) if end is None else end
        fast = min(self.num_fast_tokens, end)
        if fast <= begin:
            return self.token_ids[begin:end]
        return [*(~token_id for token_id in self.token_ids[begin:fast]), *self.token_ids[fast:end]]

    @property
    def wants_prompt_logprobs(self) -> bool:
        """True while some prompt token's log-probability is not computed yet."""
        if self.params.prompt_logprobs is None or not self.scores_prompt:
            return False
        return len(self.prompt_logprobs or ()) < self.num_prompt_tokens

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None
