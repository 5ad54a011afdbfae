"""What a drafter will hold in memory, known before anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from slipstream.draft.traits import DrafterTraits
from slipstream.errors import ConfigError

if TYPE_CHECKING:
    from slipstream.models.identity import ModelIdentity
    from slipstream.models.outline import ModelOutline


class NoGainError(ConfigError):
    """A copy of the target would read as many bytes a token as the target itself."""

    def __init__(self, what: str, quantization: str, reason: str) -> None:
        super().__init__(
            f"{what} cannot draft more cheaply than the target with a copy of it in {quantization}: {reason}. Choose "
            "a format of fewer bits where the weights allow one, or another drafter: suffix, a smaller draft model, a "
            "trained head"
        )
        self.reason = reason


@dataclass(frozen=True, kw_only=True, slots=True)
class Footprint:
    """What follows from a drafter's options and from configurations alone.

    What a token costs, and what tables come to hold, its `traits` say: the same for one that is loaded.
    """

    traits: DrafterTraits
    """The traits that it will have."""
    models: tuple[ModelOutline, ...] = ()
    """The language models that it loads for itself, in this order."""
    head_bytes: int = 0
    """Weights of heads, as they are held."""
    head_stored_bytes: int = 0
    """The same in their file."""
    head_bytes_per_row: int = 0
    """What a head computes with, for one row of its pass."""
    logit_rows: int = 0
    """Rows of its own logits and distributions that exist at once for one sequence."""
    missing: str = ""
    """What it lacks, or why it does not run there; empty when it runs as it is."""
    is_known: bool = True
    """False where what it holds depends on what is missing."""
    note: str = ""
    """What is not known."""

    @classmethod
    def unknown(cls, missing: str) -> Footprint:
        """A drafter that cannot run as it is."""
        return cls(traits=DrafterTraits(), missing=missing, is_known=False)

    @classmethod
    def joined(cls, parts: Seq[Footprint], traits: DrafterTraits) -> Footprint:
        """Several drafters that are loaded together, as one with these `traits`; one of them drafts at a time."""
        return cls(
            traits=traits,
            models=tuple(model for part in parts for model in part.models),
            head_bytes=sum(part.head_bytes for part in parts),
            head_stored_bytes=max((part.head_stored_bytes for part in parts), default=0),
            head_bytes_per_row=max((part.head_bytes_per_row for part in parts), default=0),
            logit_rows=max((part.logit_rows for part in parts), default=0),
            note="; ".join(part.note for part in parts if part.note),
        )

    def with_traits(self, **changes: Any) -> Footprint:
        """The same with some traits replaced."""
        return replace(self, traits=replace(self.traits, **changes))

    @property
    def weight_bytes(self) -> int:
        """Bytes of the drafter's own models and heads, without the target's."""
        return self.head_bytes + sum(model.weight_bytes for model in self.models)

    def feature_bytes_per_token(self, target: ModelIdentity) -> int:
        """Hidden states of the target that are kept for it."""
        return len(self.traits.feature_layers) * target.hidden_size * target.dtype.itemsize
