"""P-EAGLE: an EAGLE-3 head that reads mask tokens drafts all its tokens in one pass (`proposers.masked`)."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from slipstream.draft.base import DraftContext
from slipstream.draft.footprint import Footprint
from slipstream.draft.heads.eagle import Eagle3Drafter, EagleOptions
from slipstream.draft.heads.eagle_head import EagleConfig
from slipstream.draft.proposers.growing import Feed
from slipstream.draft.proposers.masked import MaskedDrafter
from slipstream.draft.proposers.proposal_shape import ProposalShape
from slipstream.errors import ConfigError, ModelError
from slipstream.models.batch import ForwardBatch
from slipstream.models.executor.levels import PendingDrafts
from slipstream.models.executor.recorded_drafts import FirstStates


@dataclass(frozen=True, kw_only=True)
class PEagleOptions(EagleOptions):
    """Keys of `speculative_config` for `method: peagle`."""

    method: ClassVar[str] = "peagle"
    num_speculative_tokens: int = 7
    """Depth: draft tokens in a chain, levels in a tree. All come of one pass, which has a row for each."""
    tree_top_k: int = 1
    num_draft_nodes: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.correction is not None:
            raise ConfigError("peagle has no correction: one is learnt for a head that reads its own tokens")


class PEagleDrafter(MaskedDrafter, Eagle3Drafter):
    """Drafts all tokens in one pass of an EAGLE-3 head with mask tokens."""

    Options = PEagleOptions

    def __init__(self, options: PEagleOptions, context: DraftContext) -> None:
        super().__init__(options, context)
        self.mask_token_id = _mask_token_of(self.head.config, options.model)

    @classmethod
    def footprint(cls, options: Any, context: DraftContext) -> Footprint:
        """As of an EAGLE-3 head, with the logits of all levels at once, of its own vocabulary and of the target's."""
        held = super().footprint(options, context)
        depth = ProposalShape.of(options, context.verifier).depth
        return replace(held, logit_rows=held.logit_rows + 2 * depth)

    @classmethod
    def _check_config(cls, config: EagleConfig, path: str) -> None:
        super()._check_config(config, path)
        _mask_token_of(config, path)

    def weight_bytes(self) -> int:
        return super().weight_bytes() + self._mask_features().nbytes

    def draw_at_once(self, feeds: Seq[Feed], drafts: PendingDrafts) -> Tensor | None:
        rows, mask = ForwardBatch([feed.rows for feed in feeds]), self._mask_features()
        features, places = self._first_states([]).read, list[int]()
        for feed in feeds:
            text = replace(
                feed.rows, token_ids=feed.rows.token_ids[: len(feed.rows.token_ids) - feed.num_masks]
            )
            places += [*self._first_states([replace(feed, rows=text)]).places, *[-1] * feed.num_masks]

        def read(at: Tensor) -> Tensor:
            return torch.where(at[:, None] < 0, mask, features(at.clamp(min=0)))

        return self.executor.draft(rows, self.cache.pool, drafts, FirstStates(read, places), at_once=True)

    def _features(self, feed: Feed) -> Tensor:
        """[rows, width]: the target's features for committed tokens, and what the head learned for each mask."""
        if not feed.num_masks:
            return super()._features(feed)
        rows = replace(feed.rows, token_ids=feed.rows.token_ids[: -feed.num_masks])
        masks = self._mask_features().expand(feed.num_masks, -1)
        return torch.cat([super()._features(replace(feed, rows=rows)), masks])

    def _mask_features(self) -> Tensor:
        """[1, width]"""
        assert self.mask_features is not None, "checked when it was loaded"
        return self.mask_features


def _mask_token_of(config: EagleConfig, path: str) -> int:
    """The mask token of a P-EAGLE head; raises `ModelError` for any other."""
    if config.mask_token_id is None:
        raise ModelError(
            f"{path!r} was not trained to read mask tokens: it has no mask_token_id and no mask_hidden; run it as "
            "eagle3, or train one with `slipstream train peagle`"
        )
    return config.mask_token_id
