"""Cost of steps and the predicted speedup: c, v and τ/(γ·c + v), from the engine's own step times.

All seconds are measured by the engine in the timed runs themselves. Steps that compute a prompt are excluded, so that
only decoding is compared.

- Target step time T: `verify_s` of steps with speculation off, where a sequence is one row. Attention costs more
  the longer the context and a step more the more sequences share it, so T is looked up by (sequences, context): the
  mean of off's steps with the same number of sequences and the same context to within `CONTEXT_BIN` tokens a sequence,
  weighted by the number of the configuration's steps there. Its steps without such a step of off are excluded.
- v = mean `verify_s` of the configuration's steps / T: γ + 1 rows a sequence against one.
- γ = mean depth of the actual proposals, including empty and shortened ones.
- c = seconds of drafting / passes of drafting / T, a pass being one level of a proposal. Steps that propose nothing
  cost time as well, so that γ·c is mean drafting time a step / T.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from slipstream.core.metrics.step import StepReport

CONTEXT_BIN = 64
"""Tokens: contexts are similar when they are equal after division by this."""

Key = tuple[int, int]
"""Sequences in the step, and their mean context in units of `CONTEXT_BIN` tokens."""


@dataclass(slots=True)
class Cell:
    """Sums over similar steps."""

    num_steps: int = 0
    draft_depth: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0

    def add(self, other: Cell) -> None:
        self.num_steps += other.num_steps
        self.draft_depth += other.draft_depth
        self.draft_s += other.draft_s
        self.verify_s += other.verify_s


@dataclass(slots=True)
class StepTally:
    """All steps of a run: their total times, and sums over the decoding steps by sequences and context."""

    draft_s: float = 0.0
    verify_s: float = 0.0
    cells: dict[Key, Cell] = field(default_factory=dict)

    def add(self, step: StepReport) -> None:
        """Count a step; use it as an engine's `on_step`."""
        self.draft_s += step.draft_s
        self.verify_s += step.verify_s
        if step.only_decodes:
            context = step.num_context_tokens // step.num_sequences // CONTEXT_BIN
            cell = Cell(1, step.draft_depth, step.draft_s, step.verify_s)
            self.cells.setdefault((step.num_sequences, context), Cell()).add(cell)

    def merge(self, other: StepTally) -> None:
        """Add another run's steps."""
        self.draft_s += other.draft_s
        self.verify_s += other.verify_s
        for key, cell in other.cells.items():
            self.cells.setdefault(key, Cell()).add(cell)


@dataclass(frozen=True, slots=True)
class CostModel:
    """The measured terms of τ/(γ·c + v); see the module's docstring."""

    target_step_s: float
    """T."""
    gamma: float
    c: float | None
    """None when nothing was proposed."""
    v: float
    draft_s_per_step: float
    num_steps: int
    """The configuration's steps that were compared."""
    num_unmatched_steps: int
    """The configuration's decoding steps without a comparable step of off."""

    def predicted_speedup(self, tau: float) -> float:
        """τ/(γ·c + v)."""
        return tau / (self.draft_s_per_step / self.target_step_s + self.v)


def cost_model(steps: StepTally, off: StepTally) -> CostModel | None:
    """The cost model of a configuration's `steps` against `off`; None where no steps are comparable."""
    matched = Cell()
    target_s = 0.0
    for key, cell in steps.cells.items():
        if key in off.cells:
            matched.add(cell)
            target_s += cell.num_steps * off.cells[key].verify_s / off.cells[key].num_steps
    if not matched.num_steps or not target_s:
        return None
    num = matched.num_steps
    step_s = target_s / num
    return CostModel(
        target_step_s=step_s,
        gamma=matched.draft_depth / num,
        c=matched.draft_s / matched.draft_depth / step_s if matched.draft_depth else None,
        v=matched.verify_s / num / step_s,
        draft_s_per_step=matched.draft_s / num,
        num_steps=num,
        num_unmatched_steps=sum(cell.num_steps for cell in steps.cells.values()) - num,
    )
