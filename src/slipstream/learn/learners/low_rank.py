"""Low-rank adapters of the last layers and the output layer: for drafts that are too large to learn as a whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from slipstream.errors import LearnError
from slipstream.learn.learners.base import Learner, Tensors, write_checkpoint
from slipstream.learn.learners.scoring import ModelScorer, Scorer

_UP, _DOWN = ".up", ".down"


class LowRankSum(nn.Module):
    """A weight [out, in] plus the product of two thin ones (Hu et al., "LoRA", ICLR 2022)."""

    def __init__(self, weight: Tensor, rank: int) -> None:
        """At first the product is 0."""
        super().__init__()
        out, into = weight.shape
        rank = min(rank, out, into)
        self.up = nn.Parameter(torch.zeros(out, rank))
        self.down = nn.Parameter(torch.randn(rank, into) * into**-0.5)

    def forward(self, weight: Tensor) -> Tensor:
        """The sum."""
        return weight + self.up @ self.down


class LowRankLearner(Learner):
    """Adapters of all linear layers in the last blocks, and of the output layer."""

    name = "low_rank"

    def begin(self, start: Tensors | None) -> tuple[Any, list[nn.Parameter]]:
        model = self._model(start)
        learned = [one for name, one in model.named_parameters() if name.endswith((_UP, _DOWN))]
        for one in model.parameters():
            one.requires_grad_(False)
        for one in learned:
            one.requires_grad_(True)
        return model, learned

    def tensors(self, model: Any) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name, module in self._adapted(model):
            sum_ = module.parametrizations.weight[0]
            found[name + _UP], found[name + _DOWN] = sum_.up.detach().clone(), sum_.down.detach().clone()
        return found

    def scorer(self, tensors: Tensors | None) -> Scorer:
        return ModelScorer(self.base.causal_model() if tensors is None else self._merged(tensors))

    def checkpoint(self, tensors: Tensors, folder: Path) -> None:
        write_checkpoint(self._merged(tensors), self.base.path, folder)

    def _merged(self, tensors: Tensors) -> Any:
        """A plain model. An output layer that was the embedding's becomes one of its own."""
        model = self._model(tensors)
        for _, module in self._adapted(model):
            parametrize.remove_parametrizations(module, "weight", leave_parametrized=True)
        model.config.tie_word_embeddings = False
        return model

    def _model(self, tensors: Tensors | None) -> Any:
        """The base drafter with adapters."""
        model = self.base.causal_model()
        output = model.get_output_embeddings()
        if output.weight is model.get_input_embeddings().weight:
            output.weight = nn.Parameter(output.weight.detach().clone())  # it alone is adapted
        names = []
        for name, module in self._adapted(model):
            made = LowRankSum(module.weight, self.options.rank)
            if tensors is not None:
                try:
                    up, down = tensors[name + _UP].float(), tensors[name + _DOWN].float()
                except KeyError:
                    raise LearnError(
                        f"a version of low_rank has no adapter of {name}; it belongs to another draft"
                    ) from None
                if up.shape[0] != made.up.shape[0] or down.shape[1] != made.down.shape[1]:
                    raise LearnError(
                        f"a version of low_rank has another shape at {name}; it belongs to another draft"
                    )
                made.up, made.down = nn.Parameter(up.clone()), nn.Parameter(down.clone())
            parametrize.register_parametrization(module, "weight", made, unsafe=True)
            names.append(name)
        return model

    def _adapted(self, model: Any) -> list[tuple[str, Any]]:
        """The linear layers that are adapted, by name, whether they are yet or not."""
        output = model.get_output_embeddings()
        first = int(model.config.num_hidden_layers) - self.options.adapted_layers
        found = []
        for name, module in model.named_modules():
            if not isinstance(module, nn.Linear):
                continue
            parts = name.split(".")
            layer = int(parts[parts.index("layers") + 1]) if "layers" in parts else -1
            if module is output or layer >= first:
                found.append((name, module))
        return found
