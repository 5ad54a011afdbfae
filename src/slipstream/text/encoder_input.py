"""What the encoder of an encoder-decoder reads for a request."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np


@dataclass(frozen=True, eq=False)
class EncoderInput:
    """Token ids, or the features of a sound."""

    token_ids: tuple[int, ...] = ()
    features: Any = None
    """float32 [bins, frames], an array; None for a text."""

    @cached_property
    def digest(self) -> str:
        """Equal for equal inputs alone: what a decoder computes depends on it."""
        held = np.asarray(self.token_ids, np.int64) if self.features is None else self.features
        return hashlib.sha256(np.ascontiguousarray(held).tobytes()).hexdigest()
