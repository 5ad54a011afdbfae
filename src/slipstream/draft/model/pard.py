"""PARD: a draft model that was trained to read mask tokens drafts all its tokens in one pass (`proposers.masked`).

Its checkpoint is that of an ordinary language model, whose configuration names the mask token, `pard_token`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from slipstream.draft.base import DraftContext
from slipstream.draft.footprint import Footprint
from slipstream.draft.model.draft_model import DraftModelDrafter, DraftModelOptions
from slipstream.draft.proposers.masked import MaskedDrafter
from slipstream.draft.proposers.proposal_shape import ProposalShape
from slipstream.errors import ConfigError, ModelError
from slipstream.models import load_config
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
        super().__init__(options, context)

    @classmethod
    def footprint(cls, options: Any, context: DraftContext) -> Footprint:
        """As of a draft model, with the logits of all levels at once."""
        held = super().footprint(options, context)
        model = held.models[0]
        mask_token_of(model.config, model.vocab_size, options.model)
        return replace(held, logit_rows=held.logit_rows + ProposalShape.of(options, context.verifier).depth)


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
