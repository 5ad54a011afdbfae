"""What may be added to the step of an engine, and the extension that adds nothing."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from slipstream.core.proposal import Proposal
from slipstream.core.sequence import Sequence
from slipstream.core.step import StepItem
from slipstream.draft.base import Drafter
from slipstream.errors import ReasoningError
from slipstream.reasoning.options import StepOptions
from slipstream.sampling.params import SamplingParams
from slipstream.sampling.processors import LogitsProcessor

Verify = Callable[[Seq[StepItem]], None]
"""Sets the verdict of each item, by the engine's verifier."""


class StepExtension:
    """Called three times in a step: `propose` before it is planned, `verify` after the target's pass, `commit` once
    tokens are appended. By default it changes nothing, so every token is the target's own."""

    lossy = False
    """True where an answer that requests it may not be the target's own."""

    reads_logits = False
    """True where it looks at `StepItem.logits`."""

    propose_s = 0.0
    """What the last `propose` took."""

    # --- the step ---------------------------------------------------------------------------------------------

    def propose(self) -> dict[int, Proposal]:
        """Sequence id to a chain that the next pass checks whole, or not at all where there is no room for it. It has
        as many nodes as the sequence's `num_step_nodes`, and no drafter is called for that sequence."""
        return {}

    def verify(self, items: Seq[StepItem], verify: Verify) -> None:
        """Have the `items`, the sequences that decode, verified."""
        verify(items)

    def commit(self, items: Seq[StepItem]) -> None:
        """The verdicts' tokens are in the texts."""

    # --- its requests -----------------------------------------------------------------------------------------

    def check(self, options: StepOptions, params: SamplingParams) -> None:
        """Raise `ReasoningError` for a request that cannot be served with step-level speculation."""
        raise ReasoningError(
            "reasoning needs a draft that writes steps; start the engine with one, as reasoning in its "
            "speculative_config (--reasoning-draft), or leave reasoning out"
        )

    def open(self, sequence: Sequence, processor: LogitsProcessor) -> None:
        """An answer begins; `processor` is its own."""

    def release(self, sequence: Sequence) -> None:
        """The sequence is finished, aborted or preempted."""

    # --- its state --------------------------------------------------------------------------------------------

    def drafters(self) -> list[Drafter]:
        """The drafters that it calls, for whose memory the engine plans."""
        return []

    def begin(self, num_slots: int, end_token_ids: frozenset[int], max_model_len: int) -> None:
        """Memory is planned: `num_slots` tokens in all, `max_model_len` a text; `end_token_ids` end an answer."""

    def reset(self) -> None:
        """Forget what was kept from finished sequences."""

    def num_held(self) -> int:
        """Answers for which anything is kept; 0 once all have been released."""
        return 0

    def integrity(self) -> list[str]:
        """Violated invariants, a sentence each."""
        return []
