"""What one step of the engine did and what it cost."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step, over all sequences that took part in it. Seconds are wall-clock."""

    num_sequences: int
    num_rows: int
    """Committed tokens that were computed: one a decoding sequence, more where a prompt is computed."""
    num_context_tokens: int
    """Committed tokens of all sequences together, those of this step's rows included."""
    num_draft_tokens: int
    draft_depth: int
    """Levels of the deepest proposal: the passes that a draft model made for it."""
    draft_s: float
    verify_s: float
    """The target pass and the verdicts."""
    other_s: float = 0.0
    """The rest of the step: planning, stop rules, text, what the drafter learns."""

    @property
    def only_decodes(self) -> bool:
        """True when no prompt was computed in it: every sequence had one committed token to compute."""
        return self.num_rows == self.num_sequences
