"""PARD: a draft model that was trained to read mask tokens drafts all its tokens in one pass (`proposers.masked`).

Its checkpoint is that of an ordinary language model, whose configuration names the mask token, `pard_token`. PARD-2's
also reads the target's hidden states (`target_projection`).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from slipstream.core.sequence import Sequence
from slipstream.draft.base import DraftContext
from slipstream.draft.footprint import Footprint
from slipstream.draft.methods import is_pard2
from slipstream.draft.model.draft_model import DraftModelDrafter, DraftModelOptions
from slipstream.draft.model.target_projection import ProjectionConfig, TargetProjection
from slipstream.draft.proposers.growing import Feed
from slipstream.draft.proposers.masked import MaskedDrafter
from slipstream.draft.proposers.proposal_shape import ProposalShape
from slipstream.errors import ConfigError, ModelError
from slipstream.kv.cache import KVCache
from slipstream.models import load_config
from slipstream.models.batch import ForwardBatch
from slipstream.models.executor.levels import PendingDrafts
from slipstream.models.support import text_config


@dataclass(frozen=True, kw_only=True)
class PardOptions(DraftModelOptions):
    """Keys of `speculative_config` for `method: pard`."""

    model: str
    """Folder or hub id of the draft model, whose `config.json` names its `pard_token`; its vocabulary must be the
    target's."""
    num_speculative_tokens: int = 8
    """Depth: draft tokens in a chain, levels in a tree. All come of one pass, which has a row for each."""

    def __post_init__(self) -> None:
        self.check_draft("pard")
        if self.correction is not None:
            raise ConfigError("pard has no correction: one is learnt for a model that reads its own tokens")


class PardDrafter(MaskedDrafter, DraftModelDrafter):
    """Drafts all tokens in one pass of a draft model with mask tokens."""

    Options = PardOptions

    def __init__(self, options: PardOptions, context: DraftContext) -> None:
        engine = context.engine_config
        config = text_config(
            load_config(options.model, revision=options.revision, trust_remote_code=engine.trust_remote_code)
        )
        self.mask_token_id = mask_token_of(config, config.vocab_size, options.model)
        projection = None
        if is_pard2(config.to_dict()):
            if context.target is None:
                raise ConfigError(
                    f"{options.model!r} is a PARD-2 model, which reads the target's hidden states: it drafts in the "
                    "target's own process only"
                )
            projection = ProjectionConfig.of(config, context.target, options.model)
        super().__init__(options, context)
        self._projection: TargetProjection | None = None
        self._target_cache: KVCache | None = None
        if projection is not None:
            self._projection = TargetProjection(projection, self.model, options.model, options.revision)
            self.traits = replace(
                self.traits, reads_text_only=False, feature_layers=projection.feature_layers
            )

    @classmethod
    def footprint(cls, options: Any, context: DraftContext) -> Footprint:
        """As of a draft model, with the logits of all levels at once."""
        held = super().footprint(options, context)
        model = held.models[0]
        mask_token_of(model.config, model.vocab_size, options.model)
        held = replace(held, logit_rows=held.logit_rows + ProposalShape.of(options, context.verifier).depth)
        if not is_pard2(model.config.to_dict()) or context.target_outline is None:
            return held
        projection = ProjectionConfig.of(model.config, context.target_outline, options.model)
        extra = projection.num_bytes(model.dtype.itemsize)
        return replace(
            held,
            traits=replace(held.traits, reads_text_only=False, feature_layers=projection.feature_layers),
            head_bytes=held.head_bytes + extra,
            head_stored_bytes=held.head_stored_bytes + extra,
        )

    def attach(self, cache: KVCache) -> None:
        self._target_cache = cache

    def weight_bytes(self) -> int:
        return super().weight_bytes() + (0 if self._projection is None else self._projection.num_bytes)

    def _num_ready(self, sequence: Sequence) -> int:
        ready = super()._num_ready(sequence)
        # A token is read with the target's states of the one before it.
        return ready if self._projection is None else min(ready, sequence.num_computed + 1)

    def _forward(self, feeds: Seq[Feed]) -> Tensor:
        if self._projection is None:
            return super()._forward(feeds)
        added = self._projection(torch.cat([self._features(feed) for feed in feeds]))
        logits = self.model.forward([feed.rows for feed in feeds], self.cache.pool, added=added).logits
        return logits[:, : self._trees.vocab_size]

    def draw_at_once(self, feeds: Seq[Feed], drafts: PendingDrafts) -> Tensor | None:
        if self._projection is not None:
            return None
        rows = ForwardBatch([feed.rows for feed in feeds])
        return self.model.executor.draft(rows, self.cache.pool, drafts, at_once=True)

    def _features(self, feed: Feed) -> Tensor:
        """[rows, width]: the target's states of the token before each committed one, the last of them for each mask."""
        assert self._target_cache is not None, "attach() comes before the first proposal"
        end = feed.first - 1 + len(feed.rows.token_ids) - feed.num_masks
        features = self._target_cache.features(feed.tree.sequence.id, max(feed.first - 1, 0), end)
        if feed.first == 0:
            features = torch.cat([features.new_zeros(1, features.shape[1]), features])
        return torch.cat([features, features[-1:].expand(feed.num_masks, -1)])


def mask_token_of(config: Any, vocab_size: int, path: str) -> int:
    """The id of the mask token that a draft model's configuration names.

    Raises `ModelError` where it names none, or one that the model has no embedding for.
    """
    token_id = getattr(config, "pard_token", None)
    if token_id is None:
        raise ModelError(
            f"{path!r} was not trained to read mask tokens: its configuration has no pard_token; run it as "
            "draft_model, or train one with `slipstream train pard`"
        )
    if type(token_id) is not int or not 0 <= token_id < vocab_size:
        raise ModelError(
            f"{path!r}: the mask token {token_id!r} is outside its vocabulary of {vocab_size} tokens; "
            "set pard_token to the id that it was trained with"
        )
    return token_id
