"""What decides a replica's bits: equal fingerprints give equal answers to equal requests."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Digests of what a replica computes with."""

    model: str
    """Digest of checkpoint, configuration and tokenizer. Replicas of another model are never behind the same router."""
    arithmetic: str
    """Digest of kernels, formats and number types. Our kernels give the same bits on every CPU, so the processor
    is no part of it; where PyTorch computes, its version and the processor are."""
    about: str = ""
    """The arithmetic in words."""

    def same_model(self, other: Fingerprint) -> bool:
        return self.model == other.model

    def same_bits(self, other: Fingerprint) -> bool:
        """True where an answer of one may be continued by the other without a seam."""
        return (self.model, self.arithmetic) == (other.model, other.arithmetic)
