"""Changes of low rank that are kept apart from a layer's weight, as LoRA learns them (Hu et al. 2021)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class LowRankChange:
    """What is added to the outputs of a layer: `up (down x)` for an input x."""

    down: Tensor
    """float32 [rank, in]"""
    up: Tensor
    """float32 [out, rank], times the adapter's scale."""

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return int(self.down.nbytes + self.up.nbytes)

    def of(self, rows: Tensor) -> Tensor:
        """float32 [..., in] -> [..., out]"""
        return rows.float() @ self.down.T.to(rows.device) @ self.up.T.to(rows.device)

    def outputs(self, begin: int, end: int) -> LowRankChange:
        """The same for some neighbouring outputs."""
        return LowRankChange(self.down, self.up[begin:end])
