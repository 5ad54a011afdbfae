"""The contract of a verifier."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from slipstream.core.proposal import Proposal, ProposalKind, Verdict, VerifierTraits
from slipstream.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from slipstream.sampling.noise import Noise


@dataclass(frozen=True, slots=True)
class Judgement:
    """What one sequence's verdict depends on, and nothing else."""

    log_probs: torch.Tensor
    """[1 + n, vocab] fully processed target log-probabilities: row 0 follows the committed text, row i + 1 follows
    node i. Each row is normalised; forbidden tokens are -inf; a greedy row is one-hot (for a verifier that needs no
    distributions it may be the raw logits, of which only the argmax counts)."""
    proposal: Proposal
    noise: Noise
    """The randomness of this sequence at this step."""


class Verifier(ABC):
    """A pure function from processed target distributions, a proposal and noise to a verdict.

    The class attributes say what a verifier can do; engine and drafters go by them and never by its name. Drafters may
    draw with the target's own noise (`accepts_coupled`) where `kinds` has `ProposalKind.COUPLED`.
    """

    name: ClassVar[str] = ""
    """For messages; the class's name unless given."""
    kinds: ClassVar[frozenset[ProposalKind]]
    """The proposal kinds for which the verdicts follow the target's distribution exactly."""

    reproducible: ClassVar[bool] = False
    """True where a seed gives the same text whatever was drafted. Elsewhere the text depends on how many draft tokens
    each step had, and so on the load, on the memory, and on what a drafter has learned or a controller measured."""
    lossy: ClassVar[bool] = False
    """True for a rule that is meant to change the distribution of texts. `slipstream audit` never certifies one."""
    needs_distributions: ClassVar[bool] = True
    """False when only the argmax of a greedy row is looked at: such rows may then be raw logits."""

    walks: ClassVar[bool] = False
    """True where the verdict is the walk down the tree along the target's own tokens, each of them by its position's
    noise: a pass may then take it, and `verify` is not called."""

    def __init_subclass__(cls) -> None:
        """A verdict of one's own is not the walk that was inherited."""
        super().__init_subclass__()
        if "verify" in cls.__dict__ and "walks" not in cls.__dict__:
            cls.walks = False

    @classmethod
    def traits(cls) -> VerifierTraits:
        """What this verifier can do, without its class. Raises `ConfigError` where it does not set `kinds`."""
        if not hasattr(cls, "kinds"):
            raise ConfigError(
                f"verifier {cls.__qualname__} does not set kinds, the proposal kinds that it judges"
            )
        return VerifierTraits(cls.name or cls.__name__, cls.kinds, cls.needs_distributions, cls.reproducible)

    @abstractmethod
    def verify(self, judgements: Seq[Judgement]) -> list[Verdict]:
        """One verdict a judgement, in order."""
