"""The whole draft learns: for drafts of a few million parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from slipstream.errors import LearnError
from slipstream.learn.learners.base import Learner, Tensors, write_checkpoint
from slipstream.learn.learners.scoring import ModelScorer, Scorer


class WholeLearner(Learner):
    """All weights of the draft model, as Liu et al. ("Online speculative decoding", ICML 2024) learn them."""

    name = "whole"

    def begin(self, start: Tensors | None) -> tuple[Any, list[nn.Parameter]]:
        model = self._model(start)
        return model, list(model.parameters())

    def tensors(self, model: Any) -> dict[str, Tensor]:
        return {name: one.detach().half() for name, one in model.named_parameters()}

    def scorer(self, tensors: Tensors | None) -> Scorer:
        return ModelScorer(self._model(tensors))

    def checkpoint(self, tensors: Tensors, folder: Path) -> None:
        write_checkpoint(self._model(tensors), self.base.path, folder)

    def _model(self, tensors: Tensors | None) -> Any:
        model = self.base.causal_model()
        if tensors is not None:
            own = dict(model.named_parameters())
            shapes = {name: one.shape for name, one in tensors.items()}
            if shapes != {name: one.shape for name, one in own.items()}:
                raise LearnError(
                    "a version of whole has other weights than its base drafter; it belongs to another draft"
                )
            for name, one in own.items():
                one.data.copy_(tensors[name])
        return model
