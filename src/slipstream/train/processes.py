"""Training with several processes, through Accelerate; a single process does not need it."""

from __future__ import annotations

import os
from collections.abc import Sequence as Seq
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import ConfigError


class Processes:
    """The processes started by `accelerate launch` or `torchrun`; a single one without them.

    Each computes its share of a batch's rows. Gradients are averaged, so all have the same weights.
    """

    def __init__(self) -> None:
        self.count = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = 0
        self._accelerator: Any = None
        if self.count > 1:
            try:
                from accelerate import Accelerator
            except ImportError:
                raise ConfigError(
                    f"{self.count} processes need Accelerate: pip install 'slipstream-llm[train]'"
                ) from None
            self._accelerator = Accelerator(cpu=not torch.cuda.is_available())
            self.rank = int(self._accelerator.process_index)

    @property
    def is_main(self) -> bool:
        """True for the process that writes files and evaluates."""
        return self.rank == 0

    def average(self, gradients: Seq[Tensor]) -> None:
        """Replace each gradient by its mean over the processes."""
        if self._accelerator is not None:
            for gradient in gradients:
                gradient.copy_(self._accelerator.reduce(gradient, reduction="mean"))

    def largest(self, value: float) -> float:
        """The maximum of the processes' values, for decisions that all must share."""
        if self._accelerator is None:
            return value
        return float(self._gather(value).max())

    def total(self, value: int) -> int:
        """The sum of the processes' values."""
        return value if self._accelerator is None else int(self._gather(float(value)).sum())

    def _gather(self, value: float) -> Tensor:
        device = self._accelerator.device
        gathered: Tensor = self._accelerator.gather(torch.tensor([value], dtype=torch.float64, device=device))
        return gathered
