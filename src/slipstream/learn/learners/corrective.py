"""A light layer on any draft with logits: a low-rank bias by the token before, and a temperature.

It is small enough for one a tenant: 2 * vocabulary * rank numbers. The base drafter computes as before.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from slipstream.draft.heads.eagle_head import EagleHead
from slipstream.draft.proposers.correction import corrected
from slipstream.errors import LearnError
from slipstream.learn.learners.base import Learner, Tensors, hidden_logits
from slipstream.learn.learners.batches import LearnBatch
from slipstream.learn.learners.eagle import EagleLearner, HeadScorer
from slipstream.learn.learners.scoring import ModelScorer, Scorer


class Corrective(nn.Module):
    """Logits over a temperature, plus `left[previous] @ right`.

    The bigram term is DSpark's Markov head without its states; see docs/guides/learning.md.
    """

    def __init__(self, vocab_size: int, rank: int) -> None:
        """At first it changes nothing."""
        super().__init__()
        self.left = nn.Parameter(torch.zeros(vocab_size, rank))
        self.right = nn.Parameter(torch.randn(rank, vocab_size) * rank**-0.5)
        self.log_temperature = nn.Parameter(torch.zeros(1))

    @classmethod
    def of(cls, tensors: Tensors) -> Corrective:
        """Make it from a version's tensors; raises `LearnError` for others."""
        try:
            made = cls(*tensors["left"].shape)
            made.load_state_dict({name: one.float() for name, one in tensors.items()})
        except (KeyError, RuntimeError, TypeError):
            raise LearnError(
                "a version of corrective needs left, right and log_temperature that fit each other"
            ) from None
        return made

    def forward(self, logits: Tensor, previous: Tensor, token_ids: Tensor | None = None) -> Tensor:
        """`logits` [n, vocab] behind the tokens `previous`, int64 [n]; or those of `token_ids` alone."""
        right = self.right if token_ids is None else self.right[:, token_ids]
        return corrected(logits, self.left[previous] @ right, self.log_temperature)


class _LayerVersions:
    """What a version of a layer holds, and how a drafter loads it. A model is the base drafter and the layer on it."""

    def tensors(self, model: Any) -> dict[str, Tensor]:
        return {name: one.detach().clone() for name, one in model[1].named_parameters()}

    def checkpoint(self, tensors: Tensors, folder: Path) -> None:
        raise LearnError("a corrective layer is no draft of its own; it works on its base drafter's logits")

    def version_options(self, tensors: Tensors, folder: Path) -> dict[str, str]:
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "correction.safetensors"
        save_file({name: one.contiguous() for name, one in tensors.items()}, file)
        return {"correction": str(file)}


class CorrectiveLearner(_LayerVersions, Learner):
    """Learns the layer of a draft that reads the text alone; the draft stays as it is."""

    name = "corrective"

    def begin(self, start: Tensors | None) -> tuple[Any, list[nn.Parameter]]:
        model = self.base.causal_model().requires_grad_(False)
        vocab_size = int(model.config.get_text_config().vocab_size)
        layer = Corrective(vocab_size, self.options.rank) if start is None else Corrective.of(start)
        return (model, layer), list(layer.parameters())

    def logits(self, model: Any, batch: LearnBatch) -> Tensor:
        base, layer = model
        with torch.no_grad():
            logits = hidden_logits(base, batch)
        found: Tensor = layer(logits, batch.previous)
        return found

    def scorer(self, tensors: Tensors | None) -> Scorer:
        return ModelScorer(self.base.causal_model(), None if tensors is None else Corrective.of(tensors))


class CorrectiveHeadLearner(_LayerVersions, EagleLearner):
    """Learns the layer of an EAGLE head of either kind; the head stays as it is."""

    name = "corrective"

    def begin(self, start: Tensors | None) -> tuple[Any, list[nn.Parameter]]:
        head = self._read_head().requires_grad_(False)
        size = self.target.vocab_size
        layer = Corrective(size, self.options.rank) if start is None else Corrective.of(start)
        return (head, layer), list(layer.parameters())

    def logits_behind(self, model: Any, states: Tensor, previous: Tensor) -> Tensor:
        head, layer = model
        with torch.no_grad():
            logits = head.logits(states) if head.config.version == 3 else self.target.project(states)
        if layer is None:
            return logits.float()
        found: Tensor = layer(logits.float(), previous, head.draft_token_ids)
        return found

    def scorer(self, tensors: Tensors | None) -> Scorer:
        head = self._read_head()
        return HeadScorer((head, None if tensors is None else Corrective.of(tensors)), self, head)

    def _head_of(self, model: Any) -> EagleHead:
        head: EagleHead = model[0]
        return head
