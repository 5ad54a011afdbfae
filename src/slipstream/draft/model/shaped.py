"""What all drafters whose proposals have a chosen shape answer alike."""

from __future__ import annotations

from slipstream.core.proposal import ProposalKind
from slipstream.draft.base import DraftContext, Drafter
from slipstream.draft.model.draft_trees import DraftTrees
from slipstream.draft.model.proposal_shape import ProposalShape, ShapeOptions


class ShapedDrafter(Drafter):
    """Grows a chain or a tree whose depth and width its options say."""

    kinds = frozenset(ProposalKind)
    observes_all = False

    def __init__(self, options: ShapeOptions, context: DraftContext, *, vocab_size: int) -> None:
        """`vocab_size` is the number of target tokens that the drafter has logits for.

        Raises `ConfigError` where the verifier cannot judge what the options ask for.
        """
        super().__init__(options, context)
        self.shape = ProposalShape.of(options, context.verifier)
        self._trees = DraftTrees(self.shape, vocab_size, options.confidence_threshold)

    def kinds_made(self) -> frozenset[ProposalKind]:
        return self.shape.kinds

    def ends_early(self) -> bool:
        """Whether chains end early, as with a `confidence_threshold`."""
        return bool(self.options.confidence_threshold > 0)

    def max_nodes(self) -> int:
        return self.shape.num_nodes

    def chain_length(self) -> int | None:
        return self.shape.depth if self.shape.is_chain else None
