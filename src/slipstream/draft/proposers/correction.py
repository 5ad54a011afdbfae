"""A light layer on a drafter's logits: a temperature, and a bias by the token before.

The bias is of low rank, `left[previous] @ right`: DSpark's Markov head without its states (docs/guides/learning.md).
The drafter draws from the corrected logits and says so, so every verifier judges it as it judges any other draft.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slipstream.draft.proposers.proposal_shape import ShapeOptions
from slipstream.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from slipstream.models.rows import RowGroup

NAMES = ("left", "right", "log_temperature")


@dataclass(frozen=True, kw_only=True)
class CorrectedOptions(ShapeOptions):
    """The keys of drafters that compute logits level by level, which a layer may correct."""

    correction: str | None = None
    """File of a layer that was learned for this drafter (`slipstream learn export` of a `corrective` version): a bias
    by the token before and a temperature on the draft's logits."""


def corrected(logits: Tensor, bias: Tensor, log_temperature: Tensor) -> Tensor:
    """`logits` [n, vocab] over a temperature, plus `bias` [n, vocab]."""
    return logits * torch.exp(-log_temperature) + bias


class Correction:
    """A layer as a drafter uses it."""

    def __init__(self, tensors: Mapping[str, Tensor], vocab_size: int) -> None:
        """For logits of `vocab_size` tokens; raises `ModelError` where the tensors are no layer, or for fewer."""
        try:
            left, right, log_temperature = (tensors[name].float() for name in NAMES)
        except KeyError as error:
            raise ModelError(f"a correction has {', '.join(NAMES)}; {error} is missing") from None
        known = right.shape[-1]
        if left.shape != (known, len(right)) or log_temperature.shape != (1,):
            raise ModelError(
                "a correction has left [vocab, rank], right [rank, vocab] and log_temperature [1]; these are "
                f"{tuple(left.shape)}, {tuple(right.shape)} and {tuple(log_temperature.shape)}"
            )
        if known < vocab_size:
            raise ModelError(f"the correction is for {known} tokens and the draft has {vocab_size}")
        self._left, self._right, self._log_temperature = left, right[:, :vocab_size], log_temperature
        self.num_bytes = int(left.nbytes + right.nbytes)

    @classmethod
    def read(cls, file: str, vocab_size: int) -> Correction:
        """Read it from a safetensors file; raises `ModelError`."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return cls(load_file(file), vocab_size)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"cannot read the correction {file!r}: {error}") from None

    def __call__(self, logits: Tensor, rows: Seq[RowGroup]) -> Tensor:
        """float32 [n, vocab]: the logits of the wanted rows of `rows`, each behind its row's own token."""
        if self._left.device != logits.device:
            self._left, self._right = self._left.to(logits.device), self._right.to(logits.device)
            self._log_temperature = self._log_temperature.to(logits.device)
        previous = [each.token_ids[row] for each in rows for row in each.logit_rows]
        index = torch.tensor(previous, dtype=torch.int64, device=logits.device)
        return corrected(logits.float(), self._left[index] @ self._right, self._log_temperature)


def correction_bytes(options: CorrectedOptions) -> int:
    """What the layer of `options` holds, about; 0 without one."""
    if options.correction is None:
        return 0
    try:
        return Path(options.correction).stat().st_size
    except OSError as error:
        raise ModelError(f"cannot read the correction {options.correction!r}: {error.strerror}") from None
