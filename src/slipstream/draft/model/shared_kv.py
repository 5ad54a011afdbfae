"""Drafters that compute over the target's own keys and values: no cache of their own, and no prompt to compute.

Why that is exact. Such a drafter begins where the target has computed all of the text but its last token. It reads
what the target wrote for that text, in the layers that it runs, and writes behind it only: entries of the last token
and of draft tokens, in the slots that the step has reserved for the same positions. None of them ever counts as valid,
since it is the engine that commits. The target's next pass over the sequence begins with the row of its last token, and
a pass writes a row's entries in every layer before any row reads them there. So what a draft wrote is overwritten, or
lies behind the text and is not read, whether it is what the target writes too (the first layers with the target's own
weights) or something else (layers behind a skipped one, weights in another format). A draft token remains a function of
the text and of the drafter's noise, and is judged by the probabilities that it was drawn with.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from torch import Tensor

from slipstream.config import check_at_least
from slipstream.core.sequence import Sequence
from slipstream.draft.base import DraftContext
from slipstream.draft.footprint import Footprint
from slipstream.draft.model.layer_search import Layers
from slipstream.draft.model.self_model import check_copy, copy_options, target_copy
from slipstream.draft.proposers.autoregressive import AutoregressiveDrafter
from slipstream.draft.proposers.correction import CorrectedOptions, correction_bytes
from slipstream.draft.proposers.draft_tree import DraftTree
from slipstream.draft.proposers.growing import Feed
from slipstream.draft.proposers.proposal_shape import ProposalShape, ShapeOptions
from slipstream.draft.traits import DrafterTraits
from slipstream.errors import ConfigError
from slipstream.kv.cache import KVCache
from slipstream.models import CausalLM, load_model
from slipstream.models.executor.chains import Chains
from slipstream.models.identity import ModelIdentity
from slipstream.models.layers import find_layers
from slipstream.models.outline import ModelOutline
from slipstream.models.rows import RowGroup


class SharedKVDrafter(AutoregressiveDrafter):
    """Drafts with the target, or with a copy of it in another weight format, in the target's cache.

    It drafts where the target has computed all of the text but its last token: in every step but the first.
    """

    def __init__(
        self, what: str, options: ShapeOptions, context: DraftContext, quantization: str | None
    ) -> None:
        """`quantization` is the copy's weight format; None is the target itself. `what` is the drafter's name.

        Raises `ConfigError` where the copy's entries do not fit into the target's cache.
        """
        super().__init__(options, context, vocab_size=context.vocab_size)
        if context.target is None:
            raise ConfigError(f"{what} needs the target itself to draft with")
        _check_states(what, context.target)
        self.model = context.target if quantization is None else _copy(what, quantization, context)
        self.layers: Layers | None = None
        """Those that the passes at hand run; None is all."""

    def drafting_model(self) -> CausalLM:
        return self.model

    def attach(self, cache: KVCache) -> None:
        self._cache = cache

    def memory_bytes(self) -> int:
        own = 0 if self.model is self.context.target else self.model.weight_bytes
        return super().memory_bytes() + own

    def rewind(self, sequence: Sequence) -> None:
        return  # nothing is known of a text

    # --- drafting ---------------------------------------------------------------------------------------------

    def _has_room(self, sequence: Sequence) -> bool:
        """The engine has reserved slots for as many entries as the budget has nodes."""
        return sequence.num_pending == 1 and super()._has_room(sequence)

    def pending_feeds(self, trees: list[DraftTree]) -> list[Feed]:
        feeds: list[Feed] = []
        for tree in trees:
            if tree.frontier:
                past = tree.length - 1
                last = tree.sequence.token_ids[-1:]
                rows = RowGroup(tree.slots, past, last, [0], owner=tree.sequence.id)
                feeds.append(Feed(tree, rows, past))
        return feeds

    def _compute(self, feeds: list[Feed]) -> None:
        super()._compute(feeds)
        for feed in feeds:  # no more slots than nodes are reserved behind the last committed token
            tree = feed.tree
            tree.frontier = tree.frontier[: tree.max_nodes - len(tree.stored)]

    def _forward(self, feeds: Seq[Feed]) -> Tensor:
        return self.model.forward([feed.rows for feed in feeds], self.cache.pool, layers=self.layers).logits

    def _chains(self, feeds: Seq[Feed], chains: Chains) -> Seq[Seq[int]]:
        return self.model.draft_chain([feed.rows for feed in feeds], self.cache.pool, chains, self.layers)


def shared_kv_footprint(
    what: str, quantization: str | None, options: ShapeOptions, context: DraftContext, own: DrafterTraits
) -> Footprint:
    """What the drafter `what` with the traits `own` holds: a copy of the target's weights in another format, or
    nothing.

    Raises `ConfigError` as `check_copy` does.
    """
    if context.target_outline is not None:
        _check_states(what, context.target_outline)
    if quantization is not None:
        check_copy(what, quantization, context)
    copies = [] if quantization is None else [target_copy(quantization, context.engine_config, context.dtype)]
    layer = correction_bytes(options) if isinstance(options, CorrectedOptions) else 0
    return Footprint(
        traits=own,
        models=tuple(copies),
        head_bytes=layer,
        head_stored_bytes=layer,
        logit_rows=ProposalShape.of(options, context.verifier).logit_rows,
    )


def check_choice(what: str, skip_layers: list[int] | None, exit_layer: int | None) -> None:
    """Raise `ConfigError` for a choice of layers that no model can have."""
    if skip_layers is None:
        return
    if exit_layer is not None:
        raise ConfigError(f"{what} has skip_layers and exit_layer; give one of them")
    check_at_least(what, 0, **{"skip_layers item": min(skip_layers, default=0)})


def chosen_layers(
    what: str, skip_layers: list[int] | None, exit_layer: int | None, context: DraftContext
) -> Layers | None:
    """The layers of the context's target that the options leave, None where they do not say.

    Raises `ConfigError` where the target has no such layers, or where their entries are not written.
    """
    assert context.target is not None
    num_layers, written = context.target.num_layers, context.target_layers
    layers: Layers | None = None
    if exit_layer is not None:
        if not 1 <= exit_layer < num_layers:
            raise ConfigError(
                f"{what} exit_layer must be from 1 to {num_layers - 1} for a target of {num_layers} layers, "
                f"got {exit_layer}"
            )
        layers = tuple(range(exit_layer))
    elif skip_layers is not None:
        beyond = [layer for layer in skip_layers if layer >= num_layers]
        if beyond:
            raise ConfigError(
                f"{what} cannot skip layer {beyond[0]}: the target's last one is {num_layers - 1}"
            )
        layers = tuple(layer for layer in range(num_layers) if layer not in skip_layers)
        if not layers:
            raise ConfigError(f"{what} skip_layers leaves no layer to draft with")
    if written is not None and not set(layers or range(num_layers)) <= set(written):
        raise ConfigError(
            f"the cascade around {what} runs layers {', '.join(map(str, written))} only; "
            f"set {what}'s exit_layer or skip_layers so that it runs some of these"
        )
    return layers


def check_shares(what: str, target: ModelIdentity) -> None:
    """Raise `ConfigError` for a target, loaded or not, in whose cache some of its layers cannot run alone."""
    _check_states(what, target)
    if isinstance(target, CausalLM):
        target.check_layers()
        return
    assert isinstance(target, ModelOutline)
    if not target.is_fused and find_layers(target.model, target.num_layers) is None:
        raise ConfigError(
            f"{what} runs some of the target's layers, and {target.family}'s are not in one list of modules; draft "
            "with another model"
        )


def _check_states(what: str, target: ModelIdentity) -> None:
    """Raise `ConfigError` for a target with recurrent layers."""
    if target.states:
        raise ConfigError(
            f"{what} drafts in the target's cache, where {target.family}'s recurrent layers have one state of a text, "
            "which drafts may not change; draft with another model or a head"
        )


def _copy(what: str, quantization: str, context: DraftContext) -> CausalLM:
    """The target in another weight format."""
    target, config = context.target, context.engine_config
    assert target is not None
    check_copy(what, quantization, context)
    options = copy_options(quantization, config, target.dtype)
    copy = load_model(config.model, options, device=str(context.device))
    if (
        copy.shapes != target.shapes
        or copy.dtype != target.dtype
        or copy.backend.layout is not target.backend.layout
    ):
        raise ConfigError(f"{config.model!r} in {quantization} does not fit into the target's cache")
    return copy
