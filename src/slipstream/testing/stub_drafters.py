"""Drafters with known proposals and faults, to test what surrounds a drafter.

They are built like any other, from options and a context, so that an engine can be given one by name:
`{"method": "slipstream.testing.stub_drafters:OracleDrafter", "texts": [...], "accuracy": 0.7}`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from slipstream.config import EngineConfig
from slipstream.core.proposal import EMPTY_PROPOSAL, ROOT, Proposal
from slipstream.core.sequence import Sequence
from slipstream.draft.base import DraftContext, Drafter
from slipstream.draft.traits import DrafterTraits
from slipstream.verify.registry import VERIFIERS


def draft_context(
    vocab_size: int, max_model_len: int = 256, verifier: str = "coupled", tokenizer: object = None
) -> DraftContext:
    """A context as the engine would make it for a small model on a CPU in float32."""
    import torch

    return DraftContext(
        engine_config=EngineConfig("stub"),
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        device=torch.device("cpu"),
        dtype=torch.float32,
        verifier=VERIFIERS.load(verifier).traits(),
    )


@dataclass(frozen=True)
class OracleOptions:
    """The oracle's texts and accuracy."""

    texts: Seq[Seq[int]] = ()
    """Whole texts, prompt and answer; the first that begins with a sequence's tokens is its future."""
    accuracy: float = 1.0
    """Share of draft tokens that are correct."""
    num_speculative_tokens: int = 4
    seed: int = 0


class OracleDrafter(Drafter):
    """Drafts the true continuation of known texts. Which tokens are wrong depends on seed, text and position only."""

    Options = OracleOptions
    traits = DrafterTraits(reads_text_only=True)

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Proposal]:
        """The true continuation, with some of its tokens replaced; nothing for an unknown text."""
        return [self._propose(sequence, budget) for sequence, budget in zip(sequences, budgets, strict=True)]

    def _propose(self, sequence: Sequence, budget: int) -> Proposal:
        start = len(sequence.token_ids)
        end = start + min(budget, self.options.num_speculative_tokens)
        for number, text in enumerate(self.options.texts):
            if list(text[:start]) == sequence.token_ids:
                return Proposal.chain(
                    [self._tell(number, text[at], at) for at in range(start, min(end, len(text)))]
                )
        return EMPTY_PROPOSAL

    def _tell(self, number: int, token: int, position: int) -> int:
        rng = random.Random(f"{self.options.seed}/{number}/{position}")
        if rng.random() < self.options.accuracy:
            return token
        return (token + rng.randrange(1, self.context.vocab_size)) % self.context.vocab_size


@dataclass(frozen=True)
class RandomTreeOptions:
    """Shape of the trees."""

    num_draft_nodes: int = 8
    seed: int = 0


class RandomTreeDrafter(Drafter):
    """Random trees with distinct siblings; a function of the seed, the sequence and its length alone."""

    Options = RandomTreeOptions

    def __init__(self, options: RandomTreeOptions, context: DraftContext) -> None:
        super().__init__(options, context)
        self.traits = replace(self.traits, max_nodes=options.num_draft_nodes)

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Proposal]:
        """A random tree a sequence, from empty to the whole budget."""
        return [self._propose(sequence, budget) for sequence, budget in zip(sequences, budgets, strict=True)]

    def _propose(self, sequence: Sequence, budget: int) -> Proposal:
        rng = random.Random(f"{self.options.seed}/{sequence.id}/{len(sequence.token_ids)}")
        token_ids: list[int] = []
        parents: list[int] = []
        for node in range(rng.randint(0, min(budget, self.options.num_draft_nodes))):
            parent = rng.randint(ROOT, node - 1)
            siblings = {token for token, other in zip(token_ids, parents, strict=True) if other == parent}
            unused = [token for token in range(self.context.vocab_size) if token not in siblings]
            if unused:
                token_ids.append(rng.choice(unused))
                parents.append(parent)
            else:
                break
        return Proposal(tuple(token_ids), tuple(parents))


@dataclass(frozen=True)
class RaisingOptions(OracleOptions):
    """When it fails."""

    at_call: int | None = None
    """Fail at this call of `propose`, counted from 1, and at every later one."""
    sequence_id: int | None = None
    """Fail whenever this sequence is among those to propose for."""


class RaisingDrafter(OracleDrafter):
    """An oracle that raises RuntimeError."""

    Options = RaisingOptions

    def __init__(self, options: RaisingOptions, context: DraftContext) -> None:
        super().__init__(options, context)
        self.num_calls = 0

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Proposal]:
        """As an oracle, until it fails."""
        self.num_calls += 1
        if self.options.at_call is not None and self.num_calls >= self.options.at_call:
            raise RuntimeError(f"stub drafter fails at call {self.num_calls}")
        if any(sequence.id == self.options.sequence_id for sequence in sequences):
            raise RuntimeError(f"stub drafter fails for sequence {self.options.sequence_id}")
        return super().propose(sequences, budgets)


@dataclass(frozen=True)
class OverBudgetOptions(OracleOptions):
    """Number of tokens beyond the budget."""

    num_extra_tokens: int = 1


class OverBudgetDrafter(OracleDrafter):
    """Breaks the contract: proposes a chain of token 0 that is longer than the budget."""

    Options = OverBudgetOptions

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Proposal]:
        """A chain of `budget + num_extra_tokens` tokens each."""
        return [Proposal.chain([0] * (budget + self.options.num_extra_tokens)) for budget in budgets]


@dataclass(frozen=True)
class SlowOptions(OracleOptions):
    """How slow it is."""

    delay_s: float = 0.01


class SlowDrafter(OracleDrafter):
    """An oracle with a delay in every call."""

    Options = SlowOptions

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Proposal]:
        """As an oracle, `delay_s` later."""
        time.sleep(self.options.delay_s)
        return super().propose(sequences, budgets)
