"""The target drafts for itself with some of its layers, over its own keys and values.

No weights and no cache are added (see `shared_kv`). The layers are given (Zhang et al., "Draft & Verify: lossless large
language model acceleration via self-speculative decoding", ACL 2024), the first few (Elhoushi et al., "LayerSkip:
enabling early exit inference and self-speculative decoding", ACL 2024), or found on the traffic itself (SWIFT, see
`layer_search`).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

from slipstream.config import check_at_least, check_types
from slipstream.core.bounded import BoundedDict
from slipstream.core.proposal import EMPTY_PROPOSAL, Proposal
from slipstream.core.sequence import Sequence
from slipstream.draft.base import DraftContext, Observation
from slipstream.draft.footprint import Footprint
from slipstream.draft.model.layer_search import Layers, LayerSearch
from slipstream.draft.model.shared_kv import SharedKVDrafter, check_choice, chosen_layers, shared_kv_footprint
from slipstream.draft.proposers.correction import CorrectedOptions
from slipstream.draft.traits import DrafterTraits
from slipstream.errors import ConfigError
from slipstream.kv.pool import runnable
from slipstream.models.linear.formats import check_quantization

MAX_TENANTS = 256
"""Tenants whose searches are kept; the oldest one is dropped."""


@dataclass(frozen=True, kw_only=True)
class LayerSkipOptions(CorrectedOptions):
    """Keys of `speculative_config` for `method: layer_skip`."""

    skip_layers: list[int] | None = None
    """Layers that a draft leaves out, counted from 0."""
    exit_layer: int | None = None
    """A draft pass runs this many layers. Without `exit_layer` and `skip_layers` the layers are searched for on live
    traffic, for each tenant separately."""
    quantization: str | None = None
    """Weight format of a copy of the target whose layers draft, such as `int8`, on a CPU. None: the target's own."""
    skip_ratio: float = 0.5
    """The search begins with evenly spread sets that skip up to this share of the layers."""
    drafts_per_trial: int = 32
    """Drafts made with a set of layers before it is compared with the best one so far."""
    patience: int = 16
    """The search ends after this many trials in a row without improvement."""

    def __post_init__(self) -> None:
        check_types(self, "layer_skip")
        self.check_shape("layer_skip")
        check_at_least("layer_skip", 1, drafts_per_trial=self.drafts_per_trial, patience=self.patience)
        check_quantization(self.quantization, "layer_skip")
        if not 0 <= self.skip_ratio < 1:
            raise ConfigError(f"layer_skip skip_ratio must be at least 0 and below 1, got {self.skip_ratio}")
        check_choice("layer_skip", self.skip_layers, self.exit_layer)
        if self.skip_layers == [] and self.quantization is None:
            raise ConfigError("layer_skip skip_layers is empty: the draft would be the target itself")


class LayerSkipDrafter(SharedKVDrafter):
    """Drafts with layers that are given, or searched for on each tenant's traffic.

    If the search ends without a set of layers that gains speed, nothing is drafted until `reset`.
    """

    Options = LayerSkipOptions

    traits = SharedKVDrafter.traits  # `observe` reads no logits

    @classmethod
    def footprint(cls, options: Any, context: DraftContext) -> Footprint:
        own = cls.configured(options, context)
        return shared_kv_footprint("layer_skip", options.quantization, options, context, own)

    @classmethod
    def configured(cls, options: Any, context: DraftContext) -> DrafterTraits:
        """While layers are searched for, the choice depends on earlier verdicts."""
        searches = options.skip_layers is None and options.exit_layer is None
        return replace(super().configured(options, context), remembers=searches)

    def __init__(self, options: LayerSkipOptions, context: DraftContext) -> None:
        super().__init__("layer_skip", options, context, options.quantization)
        self._given = chosen_layers("layer_skip", options.skip_layers, options.exit_layer, context)
        self.model.check_layers(self._given or ())
        self._searches: BoundedDict[str, LayerSearch] = BoundedDict(MAX_TENANTS)
        self._open: dict[int, Layers] = self.by_sequence()
        """The layers behind the last proposal of each sequence, until its verdict has been observed."""

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Proposal]:
        alike: dict[Layers, list[tuple[Sequence, int]]] = {}
        for sequence, budget in zip(sequences, budgets, strict=True):
            self._open.pop(sequence.id, None)
            if budget and self._has_room(sequence) and (layers := self._layers_for(sequence.tenant)):
                self._open[sequence.id] = layers
                alike.setdefault(layers, []).append((sequence, budget))
        proposals: dict[int, Proposal] = {}
        for layers, calls in alike.items():
            self.layers = runnable(self.model.shapes, layers)
            made = super().propose(*zip(*calls, strict=True))
            proposals.update((s.id, proposal) for (s, _), proposal in zip(calls, made, strict=True))
        return [proposals.get(sequence.id, EMPTY_PROPOSAL) for sequence in sequences]

    def observe(self, observations: Seq[Observation]) -> None:
        """Record the verdicts in the tenants' searches."""
        for seen in observations:
            layers = self._open.pop(seen.sequence.id, None)
            if layers is not None and self._given is None and len(seen.proposal):
                num_passes = max(seen.proposal.depths)
                self.search(seen.sequence.tenant).record(layers, num_passes, seen.num_accepted)

    def reset(self) -> None:
        self._searches.clear()

    def search(self, tenant: str) -> LayerSearch:
        """The search on a tenant's traffic; used where no layers are given."""
        if tenant not in self._searches:
            options: LayerSkipOptions = self.options
            self._searches[tenant] = LayerSearch(
                self.model.num_layers,
                self._cost,
                options.skip_ratio,
                options.drafts_per_trial,
                options.patience,
            )
        return self._searches[tenant]

    def _layers_for(self, tenant: str) -> Layers | None:
        """The layers to draft with; None once the search has ended without a set that gains speed."""
        if self._given is not None:
            return self._given
        search = self.search(tenant)
        return search.layers if search.pays else None

    def _cost(self, layers: Layers) -> float:
        """Weight bytes that a draft pass reads, as a share of a target pass's."""
        target = self.context.target
        assert target is not None
        head = target.vocab_size * target.hidden_size
        tied = bool(getattr(target.config, "tie_word_embeddings", False))
        in_layers = target.num_parameters - (head if tied else 2 * head)
        share: float = (in_layers * len(layers) / target.num_layers + head) / (in_layers + head)
        return share * self.model.weight_bytes / target.weight_bytes
