"""What the exact grid is made of: targets under every processor, draft distributions, tree shapes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from slipstream.core.proposal import ROOT, Proposal, ProposalKind
from slipstream.sampling.grammars.grammar import Grammar
from slipstream.sampling.noise import Noise
from slipstream.sampling.params import (
    MAX_REPETITION_PENALTY,
    MAX_TEMPERATURE,
    MIN_REPETITION_PENALTY,
    MIN_TEMPERATURE,
    SamplingParams,
)
from slipstream.testing.enumeration import Target
from slipstream.testing.table_model import (
    CHAIN_3,
    SIBLINGS_2,
    TWO_LEVELS,
    UNBALANCED,
    TableDrafter,
    TableModel,
    Text,
)

EXACT = 1e-12
"""Total variation up to which two enumerations are the same; rounding makes about 1e-16."""
BIASED = 1e-3
"""What a real mistake exceeds."""

MODEL = TableModel(vocab_size=3, seed=2)
PROMPT = (0, 2)


class Letters:
    """A tokenizer of four tokens, the last of which ends a text."""

    tokens = (b"a", b"b", b"ab", b"<end>")
    special_token_ids = (3,)
    eos_token_id = 3
    bos_token_id = None

    def __call__(self, text: bytes | str) -> list[int]:
        return [
            self.tokens.index(bytes([byte])) for byte in (text.encode() if isinstance(text, str) else text)
        ]


def letters_grammar(regex: str) -> Grammar:
    """What `Letters` may say: texts that match `regex`, and then the end."""
    vocabulary = LLTokenizer(TokenizerWrapper(Letters()))
    return Grammar(LLMatcher(vocabulary, LLMatcher.grammar_from_regex(regex)), [3], [3], vocab_size=4)


def under_grammar(regex: str, params: SamplingParams | None = None) -> Target:
    """A target that must keep to `regex`."""
    model = TableModel(vocab_size=4, seed=2)
    return Target(model, params or SamplingParams(), stop_token_ids=(3,), grammar=letters_grammar(regex))


TARGETS: dict[str, Target] = {
    "plain": Target(MODEL),
    "wide": Target(TableModel(vocab_size=4, seed=2)),
    "sharp": Target(TableModel(seed=5, spread=4.0)),
    "greedy": Target(MODEL, SamplingParams(temperature=0)),
    "temperature": Target(MODEL, SamplingParams(temperature=0.5)),
    "top_k": Target(MODEL, SamplingParams(top_k=2)),
    "top_p": Target(MODEL, SamplingParams(top_p=0.7)),
    "min_p_top_p": Target(TableModel(vocab_size=4, seed=2), SamplingParams(min_p=0.4, top_p=0.8)),
    "repetition": Target(MODEL, SamplingParams(repetition_penalty=1.8), (0,)),
    "presence_frequency": Target(MODEL, SamplingParams(presence_penalty=0.9, frequency_penalty=0.7), PROMPT),
    "logit_bias": Target(MODEL, SamplingParams(logit_bias={0: 1.5, 2: -0.8})),
    "min_tokens": Target(MODEL, SamplingParams(min_tokens=2), stop_token_ids=(1,)),
    "stop": Target(MODEL, stop_token_ids=(2,)),
    "allowed": Target(MODEL, SamplingParams(allowed_token_ids=[0, 2])),
    "bad_words": Target(MODEL, prompt=PROMPT, bad_words=((0, 1), (2, 2, 1), (2, 0))),
    "nothing_left": Target(
        MODEL,
        SamplingParams(allowed_token_ids=[0, 1]),
        stop_token_ids=(2,),
        bad_words=((0, 0), (0, 1), (1, 1)),
    ),
    "nothing_left_to_end_with": Target(
        MODEL, SamplingParams(allowed_token_ids=[0, 1]), bad_words=((0, 0), (0, 1), (1, 1))
    ),
    "highest": Target(
        MODEL,
        SamplingParams(
            temperature=MAX_TEMPERATURE,
            repetition_penalty=MAX_REPETITION_PENALTY,
            presence_penalty=2,
            frequency_penalty=2,
            logit_bias={1: 100},
            allowed_token_ids=[0, 1],
        ),
        PROMPT,
    ),
    "lowest": Target(
        MODEL,
        SamplingParams(
            temperature=MIN_TEMPERATURE,
            repetition_penalty=MIN_REPETITION_PENALTY,
            presence_penalty=-2,
            frequency_penalty=-2,
            logit_bias={1: -100},
            min_p=5e-324,
            top_p=5e-324,
            allowed_token_ids=[1, 2],
        ),
        PROMPT,
    ),
    "grammar": under_grammar("b?(a|ab)b*a?"),
    "grammar_forced": under_grammar("(ba|ab)(ba)*"),
    "grammar_combined": under_grammar("a?b(ab|b)*", SamplingParams(top_k=2, presence_penalty=0.8)),
    "combined": Target(
        MODEL,
        SamplingParams(
            temperature=0.8,
            top_p=0.95,
            min_p=0.05,
            repetition_penalty=1.3,
            presence_penalty=0.5,
            frequency_penalty=-0.4,
            logit_bias={1: 0.5},
            min_tokens=1,
        ),
        PROMPT,
        stop_token_ids=(1,),
        bad_words=((0, 2),),
    ),
}

SHAPES: dict[str, tuple[int, ...]] = {
    "empty": (),
    "chain_1": (ROOT,),
    "chain_2": (ROOT, 0),
    "chain_3": CHAIN_3,
    "siblings_2": SIBLINGS_2,
    "siblings_3": (ROOT, ROOT, ROOT),
    "two_levels": TWO_LEVELS,
    "unbalanced": UNBALANCED,
}

CLASSICAL_KINDS = (
    ProposalKind.ONE_HOT,
    ProposalKind.SAMPLED_IID,
    ProposalKind.SAMPLED_WITHOUT_REPLACEMENT,
)
VERIFIERS = ("coupled", "rejection", "block")


def far(target: Target) -> Callable[[Text], torch.Tensor]:
    """A draft that knows nothing of the target."""
    return cache(TableModel(target.model.vocab_size, seed=99, spread=1.5).log_probs)


def close(target: Target) -> Callable[[Text], torch.Tensor]:
    """The target's raw logits, a little off."""
    other = TableModel(target.model.vocab_size, seed=98, spread=0.3)
    return cache(lambda text: (target.model.logits(text) + other.logits(text)).log_softmax(-1))


def equal(target: Target) -> Callable[[Text], torch.Tensor]:
    """The target's own processed distribution: nothing is ever rejected, and residuals are numerically zero."""
    return lambda text: target.log_probs(text[len(target.prompt) :])[0]


def with_zeros(target: Target) -> Callable[[Text], torch.Tensor]:
    """A draft that gives its least likely token no chance."""
    draft = Target(TableModel(target.model.vocab_size, seed=97), SamplingParams(top_k=2))
    return lambda text: draft.log_probs(text)[0]


def narrow(target: Target) -> Callable[[Text], torch.Tensor]:
    """A draft whose vocabulary lacks the target's last token."""
    return cache(TableModel(target.model.vocab_size - 1, seed=96).log_probs)


DRAFTS = {"far": far, "close": close, "equal": equal, "with_zeros": with_zeros, "narrow": narrow}


@dataclass(frozen=True)
class Overflowing:
    """Draws as `drafter` does, but says `value` of its distribution after every other text."""

    drafter: TableDrafter
    value: float

    def __call__(self, text: Text, noise: Noise, max_depth: int) -> Proposal:
        proposal = self.drafter(text, noise, max_depth)
        if proposal.draft_probs is None:
            return proposal
        probs = proposal.draft_probs.clone()
        for node in range(len(proposal)):
            before = (*text, *(proposal.token_ids[step] for step in proposal.path(node)[:-1]))
            if sum(before) % 2 == 0:
                probs[node] = self.value
        return replace(proposal, draft_probs=probs)
