"""The shared vocabulary: what a request is, what a drafter proposes, what a verifier decides, what a step runs.

Nothing here imports torch, so that scheduling, accounting and control can be read, tested and reasoned about alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING

from slipstream.core.metrics.request import RequestMetrics
from slipstream.errors import RequestError
from slipstream.reasoning.options import StepOptions, parse_step_options
from slipstream.text.characters import check_characters
from slipstream.text.prediction import Prediction, parse_prediction

if TYPE_CHECKING:
    import torch

    from slipstream.sampling.grammars.grammar import Grammar
    from slipstream.sampling.params import SamplingParams
    from slipstream.text.expected import ExpectedText

ROOT = -1
"""The parent of a node that hangs directly below the last committed token."""


class ProposalKind(StrEnum):
    """How the draft tokens came about; the verifier must know, or the output distribution changes."""

    ONE_HOT = "one_hot"
    """Chosen deterministically (look-up, greedy, top-k): they come from no distribution."""
    SAMPLED_IID = "sampled_iid"
    """Each node was drawn from its row of `draft_probs`, independently of its siblings."""
    SAMPLED_WITHOUT_REPLACEMENT = "sampled_without_replacement"
    """Siblings were drawn in order from the same row of `draft_probs`, renormalised without the earlier ones."""
    COUPLED = "coupled"
    """Drawn with the target's own position-keyed noise; only a verifier that accepts them may judge them."""


@dataclass(frozen=True)
class Proposal:
    """A tree of draft tokens below the last committed token. The empty proposal is ordinary decoding.

    `token_ids[i]` is node i's token and `parents[i]` its parent's index (`ROOT` below the committed text); parents
    come before children. `draft_probs`, where the kind needs it, has shape [n, vocab]: row i is the full
    distribution node i was drawn from, before any sibling was removed (siblings share equal rows).
    """

    token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    kind: ProposalKind = ProposalKind.ONE_HOT
    draft_probs: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.parents):
            raise ValueError(f"{len(self.token_ids)} draft tokens have {len(self.parents)} parents")
        if any(not ROOT <= parent < node for node, parent in enumerate(self.parents)):
            raise ValueError(f"parents must come before their children, got {self.parents}")
        sampled = self.kind in (ProposalKind.SAMPLED_IID, ProposalKind.SAMPLED_WITHOUT_REPLACEMENT)
        if sampled and len(self) and (self.draft_probs is None or len(self.draft_probs) != len(self)):
            raise ValueError(f"a {self.kind} proposal needs one row of draft_probs a node")

    @classmethod
    def chain(
        cls,
        token_ids: Seq[int],
        kind: ProposalKind = ProposalKind.ONE_HOT,
        draft_probs: torch.Tensor | None = None,
    ) -> Proposal:
        """A proposal in which every token follows the one before it."""
        return cls(tuple(token_ids), tuple(range(-1, len(token_ids) - 1)), kind, draft_probs)

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def is_chain(self) -> bool:
        """True when no node has a sibling (the empty proposal included)."""
        return all(parent == node - 1 for node, parent in enumerate(self.parents))

    @cached_property
    def children(self) -> dict[int, list[int]]:
        """Node (or `ROOT`) to its children, in the order in which they were proposed; leaves are absent."""
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parents):
            children.setdefault(parent, []).append(node)
        return children

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Depth of each node; 1 directly below the committed text."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return tuple(depths)

    @property
    def depth(self) -> int:
        """Levels of the tree; 0 for the empty proposal."""
        return max(self.depths, default=0)

    def path(self, node: int) -> list[int]:
        """Nodes from the top of the tree down to `node`, itself included; `ROOT` has the empty path."""
        path: list[int] = []
        while node != ROOT:
            path.append(node)
            node = self.parents[node]
        return path[::-1]


EMPTY_PROPOSAL = Proposal()


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the target made of a proposal: the accepted nodes, top down, and the target's own next token.

    `next_token` is the *recovered* token when a draft token was rejected and the *bonus* token when a whole path
    was accepted.
    """

    accepted: tuple[int, ...]
    next_token: int

    def token_ids(self, proposal: Proposal) -> list[int]:
        """The tokens that this verdict commits, in order."""
        return [*(proposal.token_ids[node] for node in self.accepted), self.next_token]


@dataclass(frozen=True, slots=True)
class VerifierTraits:
    """What a verifier can do. Drafters and the engine go by this, never by a verifier's name."""

    name: str
    """For messages only."""
    kinds: frozenset[ProposalKind]
    """The proposal kinds that it judges exactly."""
    needs_distributions: bool
    """False where it only looks at the argmax of a greedy row."""
    reproducible: bool
    """True where a seed gives the same text whatever was drafted."""

    @property
    def accepts_coupled(self) -> bool:
        """True where drafters may draw with the target's own position-keyed noise."""
        return ProposalKind.COUPLED in self.kinds


class FinishReason(StrEnum):
    """Why a sequence ended; the values are vLLM's, of which OpenAI clients know the first two."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    """Its masks left no token, and its text does not satisfy the whole grammar."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of a token under the target's unprocessed distribution, and the `top` alternatives."""

    token_id: int
    logprob: float
    rank: int
    """1 for the most probable token."""
    top: tuple[tuple[int, float], ...] = ()
    """(token id, log-probability), most probable first."""


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """What a caller may set for a request beside its sampling parameters. Nothing here changes the text, but
    `reasoning`, which is lossy and needs an engine that allows it.

    Raises `RequestError` for a value that no engine can serve.
    """

    tenant: str = ""
    """Whose request it is. Tenants share neither reused prefixes nor what drafters learn. Those whose names are equal
    up to the first slash are one account, and accounts share running places evenly."""
    task: str = ""
    """The caller's name for the kind of request; drafters and the controller may keep statistics by it."""
    max_draft_tokens: int | None = None
    """The most draft tokens a step; 0 turns speculation off for the request, None leaves the bound to the engine."""
    draft_method: str | None = None
    """The request's explicit drafter, one of `Engine.draft_methods`; None leaves the choice to the engine."""
    prediction: Prediction | None = None
    """What the answer is expected to be, text or token ids: drafted beside whatever drafter runs, for this request
    alone. OpenAI's form is taken too."""
    learn: bool = True
    """Whether a drafter that learns from what is served may learn from this request; False keeps nothing of it."""
    reasoning: StepOptions | None = None
    """Step-level speculation: a draft writes whole steps of thinking. May change the text. An object is taken too."""

    def __post_init__(self) -> None:
        if not isinstance(self.learn, bool):
            raise RequestError(f"learn must be true or false, got {self.learn!r}")
        for name in ("tenant", "task"):
            value = getattr(self, name)
            if not isinstance(value, str):
                raise RequestError(f"{name} must be a string, got {value!r}")
            check_characters(name, value)
        bound = self.max_draft_tokens
        is_whole = isinstance(bound, int) and not isinstance(bound, bool)
        if bound is not None and (not is_whole or bound < 0):
            raise RequestError(f"max_draft_tokens must be a whole number of at least 0, got {bound!r}")
        if not isinstance(self.draft_method, str | None):
            raise RequestError(f"draft_method must be a string, got {self.draft_method!r}")
        if self.prediction is not None:
            object.__setattr__(self, "prediction", parse_prediction(self.prediction))
        if self.reasoning is not None:
            object.__setattr__(self, "reasoning", parse_step_options(self.reasoning))


DEFAULT_OPTIONS = RequestOptions()


def tenant_account(tenant: str) -> str:
    """The account that a tenant belongs to: its name up to the first slash. What is scarce is shared by account."""
    return tenant.partition("/")[0]


@dataclass(frozen=True, slots=True)
class EmittedTokens:
    """What was emitted of one answer before, by this engine or another one; its continuation begins behind it.

    Raises `RequestError` for lists that do not belong together.
    """

    token_ids: Seq[int] = ()
    from_draft: Seq[bool] = ()
    """One a token, or empty where it is not known: then none counts as an accepted draft token."""
    logprobs: Seq[TokenLogprob] = ()
    """One a token where the request's parameters ask for log-probabilities, else empty."""

    def __post_init__(self) -> None:
        num = len(self.token_ids)
        for name, values in (("from_draft", self.from_draft), ("logprobs", self.logprobs)):
            if len(values) not in (0, num):
                raise RequestError(f"emitted {name} has {len(values)} entries for {num} tokens")


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


@dataclass(slots=True, eq=False)
class StepItem:
    """All that one step knows of one sequence. Each phase of the step fills in its part.

    The scheduler makes it; from then on `sequence.token_ids` stays as it is until the verdict's tokens are appended.
    """

    sequence: Sequence
    num_rows: int
    """Pending tokens whose keys and values the step computes."""
    max_draft_tokens: int = 0
    """The most draft tokens that may be checked."""

    decodes: bool = field(init=False)
    """True when the rows reach the last committed token, so that this step yields at least one token."""
    length_before: int = field(init=False)
    """Tokens of the text when the step began."""

    # proposed
    proposal: Proposal = EMPTY_PROPOSAL
    method: str = ""
    """The drafter that was asked, by name; `off` where `auto` asked none."""
    is_forced: bool = False
    """All draft tokens are those that the grammar forces: no drafter proposed any."""

    # computed
    rows: torch.Tensor = field(init=False, repr=False)
    """[computed rows that matter, vocab]: the target's raw logits; see `ModelRunner.forward`."""
    logits: torch.Tensor = field(init=False, repr=False)
    """[1 + n, vocab], the last of `rows`: row 0 follows the text as it was, row i + 1 follows node i of the proposal.
    Only of a sequence that decodes."""

    # judged
    num_given: int = 0
    """Leading nodes of the proposal, a chain, that are taken as they are: a lossy judge has kept them."""
    num_dropped_nodes: int = 0
    """Nodes that the pass computed beside the proposal: the question to a judge."""

    # verified
    verdict: Verdict = field(init=False, repr=False)
    """Only of a sequence that decodes."""

    # emitted: a stop rule may cut what was accepted
    num_emitted: int = 0
    """Tokens that were appended to the text."""
    kept_nodes: tuple[int, ...] = ()
    """Accepted nodes whose tokens were emitted, top down."""
    reached: int = 0
    """How many positions of the proposal were judged: the accepted ones, and the one at which nothing was accepted
    though something was proposed."""

    def __post_init__(self) -> None:
        self.decodes = self.num_rows == self.sequence.num_pending
        self.length_before = len(self.sequence.token_ids)

    def record_emitted(self, num_emitted: int) -> None:
        """The first `num_emitted` tokens of the verdict were appended; a stop rule has cut off the others."""
        self.num_emitted = num_emitted
        self.kept_nodes = self.verdict.accepted[:num_emitted]
        self.reached = len(self.kept_nodes)
        if (
            not self.was_cut
        ):  # the target's own token decided the next position, if there was a proposal for it
            last = self.kept_nodes[-1] if self.kept_nodes else ROOT
            self.reached += last in self.proposal.children

    @property
    def num_accepted(self) -> int:
        """Accepted draft tokens that were emitted."""
        return len(self.kept_nodes)

    @property
    def was_cut(self) -> bool:
        """True where the target's own token was not emitted: the answer ended at an accepted draft token, or before a
        token that may not come, perhaps before any."""
        return self.num_emitted == len(self.kept_nodes)

    @property
    def emitted_token_ids(self) -> list[int]:
        """The tokens that the step appended to the text."""
        return self.sequence.token_ids[self.length_before : self.length_before + self.num_emitted]


@dataclass(slots=True)
class StepPlan:
    """Who runs in a step, and who was preempted because the cache was full."""

    scheduled: list[StepItem] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)

    @property
    def decoding(self) -> list[StepItem]:
        """Those that get at least one token."""
        return [item for item in self.scheduled if item.decodes]
