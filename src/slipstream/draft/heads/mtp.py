"""Multi-token prediction: drafts with the layers for it that the target's own checkpoint brings, or an assistant."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from slipstream.config import reject_unknown
from slipstream.core.sequence import Sequence
from slipstream.draft.base import DraftContext, Drafter
from slipstream.draft.footprint import Footprint
from slipstream.draft.heads.checkpoints import (
    head_configuration,
    held_bytes,
    outline_checkpoint,
    read_checkpoint,
)
from slipstream.draft.heads.head_executor import mtp_executor
from slipstream.draft.heads.mtp_files import (
    form_of,
    layout_by_config,
    layout_of,
    load_mtp,
    num_mtp_layers,
    outline_mtp,
)
from slipstream.draft.heads.mtp_head import MtpForm
from slipstream.draft.methods import ASSISTANTS
from slipstream.draft.proposers.correction import CorrectedOptions, correction_bytes
from slipstream.draft.proposers.features import FeatureDrafter
from slipstream.draft.proposers.parallel import HeadOptions, target_of
from slipstream.draft.proposers.proposal_shape import ProposalShape
from slipstream.errors import ConfigError
from slipstream.kv.pool import bytes_per_token
from slipstream.models.checkpoint import unused_names
from slipstream.models.support import text_config

AUTO = "auto"
_CHOICES = {
    "hidden": {"post": ("hidden_is_normed", True), "pre": ("hidden_is_normed", False)},
    "recycled": {"z": ("recycles_normed", True), "y": ("recycles_normed", False)},
    "order": {"eh": ("hidden_first", False), "he": ("hidden_first", True)},
}
"""Option to value to a field of `MtpForm` and what it is then."""


@dataclass(frozen=True, kw_only=True)
class MtpOptions(CorrectedOptions, HeadOptions):
    """Keys of `speculative_config` for `method: mtp`."""

    method: ClassVar[str] = "mtp"
    model: str = ""
    """A folder or hub id with layers in the layout of the speculators library, or with an assistant of Gemma 4's.
    Empty: the target's own checkpoint."""
    num_speculative_tokens: int = 3
    """Depth: draft tokens in a chain, levels in a tree."""
    hidden: str = AUTO
    """The target's hidden state that the first layer reads: `post`, behind the target's final norm, or `pre`, before
    it. `auto`: as engines do for the family."""
    recycled: str = AUTO
    """What the next step reads of the step before: a layer's output behind its own norm, `z`, or before it, `y`."""
    order: str = AUTO
    """The order of a layer's inputs: `eh`, the embedding first, or `he`, the hidden state first."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, choices in _CHOICES.items():
            reject_unknown([getattr(self, name)], (AUTO, *choices), f"{self.method} {name}")

    def chosen(self, form: MtpForm) -> MtpForm:
        """The family's form, with what the options say."""
        given = [(choices, getattr(self, name)) for name, choices in _CHOICES.items()]
        return replace(form, **dict(choices[value] for choices, value in given if value != AUTO))


class MtpDrafter(FeatureDrafter):
    """Drafts with the target's prediction layers in turn; chains, fixed trees and dynamic trees."""

    Options = MtpOptions

    def __init__(self, options: MtpOptions, context: DraftContext) -> None:
        self.target = target_of(options, context)
        path, tensors = self.target.path, context.unused_tensors
        config: Any = text_config(self.target.config)
        if options.model:
            path = options.model
            config, tensors = read_checkpoint(path, revision=options.revision)
        layout = layout_of(tensors, self.target, path)
        form = options.chosen(form_of(layout, self.target))
        number = num_mtp_layers(config, tensors, layout, self.target)
        depth = ProposalShape.of(options, context.verifier).depth
        self.head = load_mtp(tensors, layout, form, self.target, path, number=number, depth=depth)
        self.executor = mtp_executor(self.head, self.target, options.quantization)
        super().__init__(
            options,
            context,
            vocab_size=context.vocab_size,
            context_length=self.target.context_length,
            shapes=self.head.shapes,
            like=self.target,
            kept_width=self.head.kept_width,
        )
        self.traits = replace(self.traits, feature_layers=(self.target.num_layers,))

    def _has_room(self, sequence: Sequence) -> bool:
        """From the text on in which each layer has a row, so that trees lie behind one in all."""
        return len(sequence.token_ids) > len(self.head.layers) and super()._has_room(sequence)

    @classmethod
    def made(cls, options: Any, context: DraftContext) -> Drafter:
        """Of an assistant, the drafter that runs it."""
        assistant = _assistant(options)
        return cls(options, context) if assistant is None else assistant(options, context)

    @classmethod
    def footprint(cls, options: Any, context: DraftContext) -> Footprint:
        """Return the weights of the layers, which the target's own configuration describes, and their entries."""
        if (assistant := _assistant(options)) is not None:
            return assistant.footprint(options, context)
        target = context.target_outline
        if target is None:
            raise ConfigError("mtp drafts from a target's features; give the target with it")
        names: Collection[str] | None
        path, layout = target.path, None
        config: Any = text_config(target.config)
        if options.model:
            path = options.model
            config, names = outline_checkpoint(path, revision=options.revision)
        else:
            names = unused_names(path, target.config)
            layout = layout_by_config(target) if names is None else None
        layout = layout or layout_of(names or (), target, path)
        shape = ProposalShape.of(options, context.verifier)
        number = num_mtp_layers(config, names, layout, target)
        head = outline_mtp(names, layout, target, number=number, depth=shape.depth)
        weights = dict(head.named_parameters())
        num_weights = sum(weight.numel() for weight in weights.values())
        correction = correction_bytes(options)
        width = 2 * target.hidden_size + max(len(weight) for weight in weights.values() if weight.ndim == 2)
        return Footprint(
            traits=replace(
                cls.configured(options, context),
                context_length=target.context_length,
                kv_bytes_per_token=bytes_per_token(head.shapes, target.cache_dtype)
                + head.kept_width * target.dtype.itemsize,
                feature_layers=(target.num_layers,),
            ),
            head_bytes=held_bytes(weights, target, options.quantization) + correction,
            head_stored_bytes=round(num_weights * target.stored_bytes_per_weight) + correction,
            head_bytes_per_row=(2 * width + 6 * target.hidden_size + 4 * head.kept_width)
            * target.dtype.itemsize,
            logit_rows=shape.logit_rows,
        )


def _assistant(options: MtpOptions) -> type[Drafter] | None:
    """The class that runs what `model` names, where that is an assistant; raises `ConfigError` for what it cannot use.

    Its file imports Gemma 4's code, which no other target needs.
    """
    config = head_configuration(options.model, options.revision) if options.model else {}
    if config.get("model_type") not in ASSISTANTS:
        return None
    for name in (*_CHOICES, "correction"):
        if getattr(options, name) not in (AUTO, None):
            raise ConfigError(f"mtp {name} is not for an assistant, as {options.model!r} is one; omit it")
    from slipstream.draft.heads.assistant import AssistantDrafter

    return AssistantDrafter
