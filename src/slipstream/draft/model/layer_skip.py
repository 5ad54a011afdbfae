"""The target drafts for itself with some of its layers, over its own keys and values.

No weights and no cache are added. The draft's entries lie where the target's next pass will write the same tokens'
entries, so all of them are overwritten. The layers are given (Zhang et al., "Draft & Verify: lossless large language
model acceleration via self-speculative decoding", ACL 2024), the first few (Elhoushi et al., "LayerSkip: enabling early
exit inference and self-speculative decoding", ACL 2024), or found on the traffic itself (SWIFT, see `layer_search`).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipstream.bounded import BoundedDict
from slipstream.config import check_at_least, check_types
from slipstream.core import EMPTY_PROPOSAL, Proposal, Sequence
from slipstream.draft.base import DraftContext, Observation
from slipstream.draft.model.growth import Growth, GrowthOptions, Peaks, ProposalShape, whole_chains
from slipstream.draft.model.layer_search import Layers, LayerSearch
from slipstream.draft.model.self_model import copy_dtype, is_smaller, target_copy
from slipstream.draft.model.shaped import ShapedDrafter
from slipstream.draft.outline import DraftOutline
from slipstream.errors import ConfigError
from slipstream.kv.cache import KVCache
from slipstream.models import CausalLM, RowGroup, load_model
from slipstream.models.cpu.chains import Chains
from slipstream.models.linear.formats import check_quantization
from slipstream.models.rows import Rows

MAX_TENANTS = 256
"""Tenants whose searches are kept; the oldest one is dropped."""


@dataclass(frozen=True, kw_only=True)
class LayerSkipOptions(GrowthOptions):
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
        self.check_growth("layer_skip")
        check_at_least("layer_skip", 1, drafts_per_trial=self.drafts_per_trial, patience=self.patience)
        check_quantization(self.quantization, "layer_skip")
        if not 0 <= self.skip_ratio < 1:
            raise ConfigError(f"layer_skip skip_ratio must be at least 0 and below 1, got {self.skip_ratio}")
        if self.skip_layers is not None:
            if self.exit_layer is not None:
                raise ConfigError("layer_skip has skip_layers and exit_layer; give one of them")
            check_at_least("layer_skip", 0, **{"skip_layers item": min(self.skip_layers, default=0)})
            if not self.skip_layers and self.quantization is None:
                raise ConfigError("layer_skip skip_layers is empty: the draft would be the target itself")


class LayerSkipDrafter(ShapedDrafter):
    """Drafts where the target has computed all of the text but its last token: in every step but the first.

    If the search ends without a set of layers that gains speed, nothing is drafted until `reset`.
    """

    summary = "the target itself with some layers left out, in the target's own cache"

    Options = LayerSkipOptions

    @classmethod
    def outline(cls, options: Any, context: DraftContext) -> DraftOutline:
        """A copy of the target's weights in another format, or nothing."""
        shape = ProposalShape.of(options, context.verifier)
        engine = context.engine_config
        copies = (
            [] if options.quantization is None else [target_copy(options.quantization, engine, context.dtype)]
        )
        return DraftOutline(shape.num_nodes, tuple(copies), logit_rows=shape.logit_rows)

    def __init__(self, options: LayerSkipOptions, context: DraftContext) -> None:
        super().__init__(options, context, vocab_size=context.vocab_size)
        if context.target is None:
            raise ConfigError("layer_skip needs the target itself to draft with")
        self.model = _model(options.quantization, context, context.target)
        self.model.check_layers()
        self._layers = _given(options, self.model.num_layers)
        self._searches: BoundedDict[str, LayerSearch] = BoundedDict(MAX_TENANTS)
        self._open: dict[int, Layers] = {}
        """The layers behind the last proposal of each sequence, until its verdict has been observed."""
        self._cache: KVCache | None = None

    def drafting_model(self) -> CausalLM:
        return self.model

    def remembers(self) -> bool:
        """True while layers are searched for: the choice depends on earlier verdicts."""
        return self._layers is None

    def attach(self, cache: KVCache) -> None:
        self._cache = cache

    def memory_bytes(self) -> int:
        return 0 if self.model is self.context.target else self.model.weight_bytes

    @torch.inference_mode()
    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Proposal]:
        growths: dict[int, Growth] = {}
        alike: dict[Layers, list[Growth]] = {}
        for sequence, budget in zip(sequences, budgets, strict=True):
            self._open.pop(sequence.id, None)
            if budget == 0 or sequence.num_pending != 1 or not self._growths.may_draft(sequence):
                continue
            layers = self._layers or self._found(sequence.tenant)
            if layers is None:
                continue
            growths[sequence.id] = self._growths.begin(sequence, budget)
            self._open[sequence.id] = layers
            alike.setdefault(layers, []).append(growths[sequence.id])
        for layers, growing in alike.items():
            self._draft(growing, layers)
        return [growths[s.id].proposal() if s.id in growths else EMPTY_PROPOSAL for s in sequences]

    def observe(self, observations: Seq[Observation]) -> None:
        """Record the verdicts in the tenants' searches."""
        for seen in observations:
            layers = self._open.pop(seen.sequence.id, None)
            if layers is not None and self._layers is None and len(seen.proposal):
                num_passes = max(seen.proposal.depths)
                self.search(seen.sequence.tenant).record(layers, num_passes, seen.num_accepted)

    def release(self, sequence: Sequence) -> None:
        self._open.pop(sequence.id, None)
        self._growths.release(sequence)

    def reset(self) -> None:
        self._searches.clear()

    def num_held(self) -> int:
        return max(len(self._open), len(self._growths))

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

    def _found(self, tenant: str) -> Layers | None:
        """The layers to draft with; None once the search has ended without a set that gains speed."""
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

    def _draft(self, growths: list[Growth], layers: Layers) -> None:
        """Grow all trees, one pass a level: first the row of the last committed token, then the frontiers."""
        assert self._cache is not None, "attach() comes before the first proposal"
        slots = {g.sequence.id: self._cache.accounting.slots(g.sequence.id) for g in growths}
        groups = [
            RowGroup(slots[g.sequence.id], g.sequence.num_computed, g.sequence.token_ids[-1:], [0])
            for g in growths
        ]
        if self.model.decoder is not None:
            draws = whole_chains(growths)
            drawn = [number for number, growth in enumerate(growths) if growth.sequence.id in draws]
            if drawn:
                rows = Rows([groups[number] for number in drawn])
                chains = Chains(list(draws.values()), self._growths.vocab_size)
                made = self.model.decoder.draft(rows, self._cache.pool, chains, layers)
                for number, token_ids in zip(drawn, made, strict=True):
                    growths[number].take_chain(token_ids)
            groups = [group for growth, group in zip(growths, groups, strict=True) if growth.frontier]
            growths = [growth for growth in growths if growth.frontier]
        while growths:
            logits = self._forward(groups, layers)
            peaks = Peaks.of(logits, growths)
            end = 0
            for growth, group in zip(growths, groups, strict=True):
                begin, end = end, end + len(group.logit_rows)
                growth.grow(logits[begin:end], peaks.rows(begin, end))
                # No more slots than nodes are reserved behind the last committed token.
                growth.frontier = growth.frontier[: growth.max_nodes - len(growth.stored)]
            growths = [growth for growth in growths if growth.frontier]
            groups = [g.store_frontier(slots[g.sequence.id], len(g.sequence.token_ids)) for g in growths]

    def _forward(self, groups: list[RowGroup], layers: Layers) -> Tensor:
        assert self._cache is not None
        return self.model.forward(groups, self._cache.pool, layers=layers).logits


def _model(quantization: str | None, context: DraftContext, target: CausalLM) -> CausalLM:
    """The target, or its quantised copy; raises `ConfigError` where the copy cannot share the target's cache."""
    if quantization is None:
        return target
    if not is_smaller(quantization, target.weight_format.name):
        name = target.weight_format.name
        raise ConfigError(f"the target is {name} already; omit layer_skip's quantization")
    config = context.engine_config
    copy = load_model(
        config.model,
        dtype=copy_dtype(config, target.dtype),
        device=str(context.device),
        revision=config.revision,
        trust_remote_code=config.trust_remote_code,
        quantization=quantization,
        cpu_kernels=config.cpu_kernels,
        lora=config.lora,
        max_model_len=config.max_model_len,
        attention_backend=config.attention_backend,
    )
    if (
        copy.shapes != target.shapes
        or copy.dtype != target.dtype
        or copy.backend.layout is not target.backend.layout
    ):
        raise ConfigError(f"{config.model!r} in {quantization} does not fit into the target's cache")
    return copy


def _given(options: LayerSkipOptions, num_layers: int) -> Layers | None:
    """The layers that the options name; None where they are to be searched for. Raises `ConfigError`."""
    if options.exit_layer is not None:
        if not 1 <= options.exit_layer < num_layers:
            raise ConfigError(
                f"layer_skip exit_layer must be from 1 to {num_layers - 1} for a target of {num_layers} layers, "
                f"got {options.exit_layer}"
            )
        return tuple(range(options.exit_layer))
    if options.skip_layers is None:
        return None
    beyond = [layer for layer in options.skip_layers if layer >= num_layers]
    if beyond:
        raise ConfigError(
            f"layer_skip cannot skip layer {beyond[0]}: the target's last one is {num_layers - 1}"
        )
    layers = tuple(layer for layer in range(num_layers) if layer not in options.skip_layers)
    if not layers:
        raise ConfigError("layer_skip skip_layers leaves no layer to draft with")
    return layers
