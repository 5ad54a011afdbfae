"""What a drafter will hold in memory, told before anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slipstream.models.outline import ModelOutline


@dataclass(frozen=True, slots=True)
class DraftOutline:
    """What follows from a drafter's options and from configurations alone."""

    max_nodes: int = 0
    """The most nodes of a proposal."""
    models: tuple[ModelOutline, ...] = ()
    """The language models that it loads for itself, in this order."""
    head_bytes: int = 0
    """Weights of heads, as they are held."""
    head_stored_bytes: int = 0
    """The same in their file."""
    head_bytes_per_row: int = 0
    """What a head computes with, for one row of its pass."""
    kv_bytes_per_token: int = 0
    """Keys and values of its own, those of `models` included."""
    feature_layers: tuple[int, ...] = ()
    """The target's hidden states that are kept for it."""
    logit_rows: int = 0
    """Rows of its own logits and distributions that exist at once for one sequence."""
    note: str = ""
    """What could not be told."""

    @classmethod
    def joined(cls, parts: Seq[DraftOutline], max_nodes: int) -> DraftOutline:
        """Several drafters that are loaded together; one of them drafts at a time."""
        return cls(
            max_nodes=max_nodes,
            models=tuple(model for part in parts for model in part.models),
            head_bytes=sum(part.head_bytes for part in parts),
            head_stored_bytes=max((part.head_stored_bytes for part in parts), default=0),
            head_bytes_per_row=max((part.head_bytes_per_row for part in parts), default=0),
            kv_bytes_per_token=sum(part.kv_bytes_per_token for part in parts),
            feature_layers=tuple(dict.fromkeys(layer for part in parts for layer in part.feature_layers)),
            logit_rows=max((part.logit_rows for part in parts), default=0),
            note="; ".join(part.note for part in parts if part.note),
        )
