"""Judges of a drafted step: from the target's logits along it to a mark. They are lossy: they look at meaning.

A judge only says whether a whole step is taken as it is. It never chooses a token; the verifier does that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, ClassVar

from slipstream.reasoning.options import StepOptions
from slipstream.reasoning.record import StepScore

if TYPE_CHECKING:
    import torch

LEAST_DIGIT_MASS = 0.5
"""A judge of whose next token less is on the ten digits has not answered the question."""


class StepJudge(ABC):
    """Gives a drafted step a mark."""

    lossy: ClassVar[bool] = True
    """Steps that it keeps change the distribution of texts. `slipstream audit` never certifies them."""
    question: Seq[int] = ()
    """Tokens that are computed behind the step in the same pass; their entries are dropped."""

    @abstractmethod
    def score(self, logits: torch.Tensor, token_ids: Seq[int]) -> StepScore:
        """The mark of a step of n drafted tokens.

        `logits` [1 + n + q, vocab] are the target's, unprocessed: row 0 follows the text before the drafted tokens, row
        i + 1 token i, and the last q rows the tokens of the `question`.
        """

    @abstractmethod
    def keeps(self, score: StepScore, options: StepOptions) -> bool:
        """Whether a step of this mark is kept."""


class ScoreJudge(StepJudge):
    """Has the target give a mark from 0 to 9: the mean of the digits, by their probabilities.

    As in Pan et al., "SpecReason" (NeurIPS 2025), but in the pass that computes the step anyway.
    """

    def __init__(self, question: Seq[int], digits: Mapping[int, int]) -> None:
        """`question` ends where the digit follows; `digits` maps token ids to the digits that they say."""
        self.question = tuple(question)
        self._token_ids = list(digits)
        self._digits = list(digits.values())

    def score(self, logits: torch.Tensor, token_ids: Seq[int]) -> StepScore:
        import torch

        probs = torch.softmax(logits[-1].double(), dim=-1)[self._token_ids]
        mass = float(probs.sum())
        if not mass > 0:
            return StepScore(0.0, is_sure=False)
        marks = torch.tensor(self._digits, dtype=probs.dtype, device=probs.device)
        return StepScore(float((probs * marks).sum()) / mass, is_sure=mass >= LEAST_DIGIT_MASS)

    def keeps(self, score: StepScore, options: StepOptions) -> bool:
        return score.is_sure and score.value >= options.least


class LogprobJudge(StepJudge):
    """The mean log-probability that the target gives the step's drafted tokens, and its mean entropy along them."""

    def score(self, logits: torch.Tensor, token_ids: Seq[int]) -> StepScore:
        import torch

        log_probs = torch.log_softmax(logits[: len(token_ids)].double(), dim=-1)  # [n, vocab]
        said = log_probs.gather(1, torch.tensor([token_ids], device=log_probs.device).T)
        entropy = -(log_probs.exp() * log_probs.clamp(min=-1e9)).sum(-1)
        mean = float(said.mean())
        return StepScore(mean, float(entropy.mean()), is_sure=mean == mean)

    def keeps(self, score: StepScore, options: StepOptions) -> bool:
        calm = options.max_entropy is None or (
            score.entropy is not None and score.entropy <= options.max_entropy
        )
        return score.is_sure and calm and score.value >= options.least
