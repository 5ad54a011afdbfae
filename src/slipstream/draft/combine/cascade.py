"""A draft model that is itself decoded speculatively: an inner drafter drafts for it.

Chen et al., "Cascade speculative drafting for even faster LLM inference" (NeurIPS 2024); Spector and Re, "Accelerating
LLM inference with staged speculative decoding" (2023). A draft model's token is a function of its logits and of noise
that is keyed by position, also where it is sampled. So inner draft tokens are verified by equality, and the chain is
the same as the draft model alone would propose, in fewer of its passes. The inner drafter may be a cascade too.

Where the draft model is the target itself, with fewer layers or with weights in another format, it shares the target's
keys and values (`model.shared_kv` says why that is exact): it has no cache of its own and computes no prompt. What it
writes for an inner drafter's tokens lies within the same reserved slots, and is moved and overwritten there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from slipstream.config import DTYPES, EngineConfig, SpeculativeConfig, check_types, reject_unknown
from slipstream.core.proposal import EMPTY_PROPOSAL, ROOT, Proposal
from slipstream.core.sequence import Sequence
from slipstream.draft.base import DraftContext, Drafter, Observation
from slipstream.draft.footprint import Footprint
from slipstream.draft.guarded.guard import Guard
from slipstream.draft.model.draft_model import DraftModelDrafter, DraftModelOptions, footprint_of
from slipstream.draft.model.layer_search import Layers
from slipstream.draft.model.self_model import DRAFT_FORMAT, self_model
from slipstream.draft.model.shared_kv import (
    SharedKVDrafter,
    check_choice,
    chosen_layers,
    shared_kv_footprint,
)
from slipstream.draft.proposers.autoregressive import AutoregressiveDrafter
from slipstream.draft.proposers.draft_tree import DraftTree
from slipstream.draft.proposers.growing import Feed
from slipstream.draft.proposers.proposal_shape import ShapeOptions
from slipstream.draft.registry import create_drafter, validate
from slipstream.draft.traits import DrafterTraits
from slipstream.errors import ConfigError
from slipstream.kv.cache import KVCache
from slipstream.models import CausalLM
from slipstream.models.linear.formats import check_quantization
from slipstream.models.rows import tree_rows
from slipstream.text.common_prefix import common_prefix_length


@dataclass(frozen=True, kw_only=True)
class CascadeOptions(ShapeOptions):
    """Keys of `speculative_config` for `method: cascade`: a draft model's, and its own drafter's under `draft`."""

    num_speculative_tokens: int = 6
    draft: Mapping[str, Any]
    """`method` and keys of the inner drafter, whose target is the draft model."""
    model: str | None = None
    """Folder or hub id of the draft model; None is the target itself, over its own keys and values."""
    skip_layers: list[int] | None = None
    """Without `model`: layers that a draft leaves out, counted from 0."""
    exit_layer: int | None = None
    """Without `model`: a draft pass runs this many layers."""
    dtype: str = "auto"
    quantization: str | None = None
    """Weight format of the draft model, on a CPU. None: as the target's, or int8 without `model`, `skip_layers` and
    `exit_layer`."""
    device: str = "auto"
    revision: str | None = None

    def __post_init__(self) -> None:
        check_types(self, "cascade")
        self.check_shape("cascade")
        reject_unknown([self.dtype], DTYPES, "cascade dtype")
        check_quantization(self.quantization, "cascade")
        check_choice("cascade", self.skip_layers, self.exit_layer)
        if self.model is not None and self.names_layers:
            raise ConfigError(
                "cascade skip_layers and exit_layer are for the target's own layers; omit model"
            )
        if self.skip_layers == [] and self.quantization is None:
            raise ConfigError("cascade skip_layers is empty: the draft would be the target itself")
        if self.tree_top_k > 1 or self.tree_choices is not None:
            raise ConfigError("cascade drafts are chains; set tree_top_k and tree_choices in the inner draft")
        if "verifier" in self.draft:
            raise ConfigError(
                "cascade draft has a verifier, but inner drafts are verified by equality; omit it"
            )
        validate(SpeculativeConfig.from_mapping(self.draft))

    @property
    def names_layers(self) -> bool:
        """Whether the draft model is some of the target's layers."""
        return self.skip_layers is not None or self.exit_layer is not None

    @property
    def copy_format(self) -> str | None:
        """Return the format without `model`: the weight format of the target's copy, None for the target itself."""
        return self.quantization if self.names_layers else self.quantization or DRAFT_FORMAT


@dataclass(slots=True)
class _InnerSequence:
    """A sequence for the inner drafter, in which the draft model's tokens count as committed."""

    sequence: Sequence
    num_committed: int = 0
    """Leading tokens that are known to be in the real text."""


class CascadeDrafter(AutoregressiveDrafter):
    """Drafts with a model whose passes verify an inner drafter's proposals. Making one makes one of its subclasses."""

    Options = CascadeOptions

    model: CausalLM
    layers: Layers | None = None
    """The layers of `model` that run; None is all."""

    def __new__(cls, options: CascadeOptions, context: DraftContext) -> CascadeDrafter:
        """By where the draft model's keys and values lie."""
        kind: type[CascadeDrafter] = cls
        if cls is CascadeDrafter:
            kind = _SharedKVCascade if _shares_kv(options, context) else _CachedCascade
        return super().__new__(kind)

    @classmethod
    def footprint(cls, options: Any, context: DraftContext) -> Footprint:
        """The draft model and, loaded after it, the inner drafter, whose target it is."""
        traits = cls.configured(options, context)
        if _shares_kv(options, context):
            own = shared_kv_footprint("cascade", options.copy_format, options, context, traits)
        else:
            own = footprint_of(_draft_model(options, context), context, traits)
        target = own.models[0] if own.models else context.target_outline
        inner_class, inner_options = validate(SpeculativeConfig.from_mapping(options.draft))
        engine, fmt = context.engine_config, options.quantization if options.model else options.copy_format
        inside = dataclasses.replace(
            context,
            engine_config=dataclasses.replace(engine, quantization=fmt or engine.quantization),
            target_outline=target,
            target=None,
        )
        inner = inner_class.footprint(inner_options, inside)
        joined = Footprint.joined([own, inner], _around(own.traits, inner.traits))
        return dataclasses.replace(joined, logit_rows=own.logit_rows + 1 + inner.traits.max_nodes)

    def _add_inner(self, options: CascadeOptions, config: EngineConfig, max_model_len: int) -> None:
        """Make the inner drafter, for the target of `config`, which is the draft model."""
        if self.model.states:
            raise ConfigError(
                f"a cascade rolls its draft model back by itself, which the states of {self.model.family}'s recurrent "
                "layers do not allow; draft with it by method draft_model"
            )
        context = DraftContext(
            engine_config=config,
            tokenizer=self.context.tokenizer,
            vocab_size=self._trees.vocab_size,
            max_model_len=max_model_len,
            device=self.model.device,
            dtype=self.model.dtype,
            verifier=self.context.verifier,
            target=self.model,
            target_layers=self.layers,
        )
        inner = create_drafter(SpeculativeConfig.from_mapping(options.draft), context)
        if inner.traits.feature_layers:
            method = options.draft["method"]
            raise ConfigError(f"{method!r} reads hidden states of its target, which a cascade does not keep")
        self.guard = Guard(inner, self._trees.vocab_size, inner.traits.kinds, self.context.draft_timeout_s)
        """Calls the inner drafter."""
        self.traits = _around(self.traits, inner.traits)
        self._inner_sequences: dict[int, _InnerSequence] = self.by_sequence()

    @property
    def inner(self) -> Drafter:
        """The cheaper drafter, whose draft tokens the draft model verifies."""
        return self.guard.drafter

    # --- the contract -----------------------------------------------------------------------------------------

    @property
    def num_failures(self) -> int:
        """How often the inner drafter has been retired for a sequence."""
        return self.guard.num_failures

    @property
    def parts(self) -> list[Drafter]:
        """The inner drafter."""
        return [self.inner]

    def rewind(self, sequence: Sequence) -> None:
        super().rewind(sequence)
        if inner := self._inner_sequences.get(sequence.id):
            inner.num_committed = min(inner.num_committed, len(sequence.token_ids))

    def release(self, sequence: Sequence) -> None:
        if sequence.id in self._inner_sequences:
            inner = self._inner_sequence(sequence)
            inner.finish_reason = sequence.finish_reason
            self.guard.release(inner)
        super().release(sequence)

    # --- drafting ---------------------------------------------------------------------------------------------

    def _has_room(self, sequence: Sequence) -> bool:
        if not super()._has_room(sequence):
            return False
        self._inner_sequence(sequence)
        return True

    def draws_chains(self) -> bool:
        return False  # a pass verifies what the inner drafter proposes

    def _compute(self, feeds: list[Feed]) -> None:
        """One pass over the feeds, each with the inner drafter's proposal below it."""
        inner_sequences = [self._inner_sequences[feed.tree.sequence.id].sequence for feed in feeds]
        budgets: list[int] = []
        for feed, inner in zip(feeds, inner_sequences, strict=True):
            inner.num_computed = feed.rows.num_past
            # The pass itself yields one more token.
            missing = feed.tree.max_depth - len(feed.tree.nodes) - 1
            budgets.append(min(missing, self.inner.traits.max_nodes) if feed.rows.logit_rows else 0)
        served = [place for place, inner in enumerate(inner_sequences) if self.guard.serves(inner)]
        answers = self.guard.propose(
            [inner_sequences[place] for place in served], [budgets[place] for place in served]
        )
        proposals = [EMPTY_PROPOSAL] * len(inner_sequences)
        for place, proposal in zip(served, answers, strict=True):
            proposals[place] = proposal
        own_rows = [feed.rows for feed in feeds]
        for feed, proposal in zip(feeds, proposals, strict=True):
            rows = feed.rows
            if len(proposal):
                first = rows.logit_rows[0]
                feed.rows = tree_rows(rows.slots, rows.num_past, rows.token_ids, proposal, first)
                feed.rows.owner = rows.owner
        logits = self._forward(feeds)
        seen: list[Observation] = []
        end = 0
        for feed, inner, proposal, rows in zip(feeds, inner_sequences, proposals, own_rows, strict=True):
            feed.rows = rows
            self.commit_feed(feed)
            if rows.logit_rows:
                begin, end = end, end + 1 + len(proposal)
                accepted = self._walk(feed.tree, proposal, logits[begin:end])
                self.cache.pool.gather(rows.slots, rows.num_entries, accepted)
                length = len(inner.token_ids)
                tokens = [node.token_id for node in feed.tree.nodes]
                inner.token_ids[len(feed.tree.sequence.token_ids) :] = tokens
                was_cut = len(inner.token_ids) - length == len(
                    accepted
                )  # the chain lacked confidence to go on
                num = len(accepted)
                seen.append(Observation(inner, proposal, num, logits[begin:end], length, was_cut))
        self.guard.observe(seen)

    def _walk(self, tree: DraftTree, proposal: Proposal, logits: Tensor) -> list[int]:
        """Grow the chain by the draft model's own tokens, as far as the inner drafter proposed them.

        `logits` is [1 + n, vocab]: row 0 follows the chain, row i + 1 node i. Returns the accepted nodes.
        """
        accepted: list[int] = []
        node: int | None = ROOT
        while node is not None and tree.frontier:
            grown = tree.grow(logits[node + 1 : node + 2])
            if not grown:
                break
            (draft,) = grown
            children = {proposal.token_ids[child]: child for child in proposal.children.get(node, ())}
            node = children.get(draft.token_id)
            if node is not None:
                accepted.append(node)
                draft.stored = len(tree.stored)
                tree.stored.append(draft)
        return accepted

    def _inner_sequence(self, sequence: Sequence) -> Sequence:
        """The inner drafter's sequence, rewound to the committed text."""
        inner = self._inner_sequences.get(sequence.id)
        if inner is None:
            inner = self._inner_sequences[sequence.id] = _InnerSequence(self._new_inner_sequence(sequence))
        seen, text = inner.sequence.token_ids, sequence.token_ids
        common = inner.num_committed
        common += common_prefix_length(seen[common:], text[common:])
        if common < len(seen):
            del seen[common:]
            self.guard.rewind(inner.sequence)
        seen.extend(text[common:])
        inner.num_committed = len(seen)
        return inner.sequence

    def _new_inner_sequence(self, sequence: Sequence) -> Sequence:
        params = sequence.params
        if self.shape.method == "greedy" and params.temperature > 0:
            params = dataclasses.replace(params, temperature=0.0)  # the draft model takes the argmax
        return Sequence(
            id=sequence.id,
            request_id=sequence.request_id,
            index=sequence.index,
            token_ids=[],
            num_prompt_tokens=sequence.num_prompt_tokens,
            params=params,
            seed=sequence.seed,
            options=sequence.options,
            encoder_input=sequence.encoder_input,
            grammar=sequence.grammar and sequence.grammar.copy(),  # it follows another text
        )


class _CachedCascade(CascadeDrafter, DraftModelDrafter):  # type: ignore[misc]
    """With a draft model that has keys and values of its own."""

    def __init__(self, options: CascadeOptions, context: DraftContext) -> None:
        DraftModelDrafter.__init__(self, _draft_model(options, context), context)
        own = self.options
        config = dataclasses.replace(
            context.engine_config,
            model=own.model,
            revision=own.revision,
            dtype=own.dtype,
            quantization=self.model.quantization,
        )
        self._add_inner(options, config, min(context.max_model_len, self.model.context_length))

    def allocate(self, num_tokens: int) -> None:
        super().allocate(num_tokens)
        self.guard.attach(self.cache)

    def _max_stored(self) -> int:
        return super()._max_stored() + self.inner.traits.max_nodes


class _SharedKVCascade(CascadeDrafter, SharedKVDrafter):
    """With the target, or a copy of it, over the target's own keys and values."""

    def __init__(self, options: CascadeOptions, context: DraftContext) -> None:
        SharedKVDrafter.__init__(self, "cascade", options, context, options.copy_format)
        self.layers = chosen_layers("cascade", options.skip_layers, options.exit_layer, context)
        if self.layers is not None:
            self.model.check_layers(self.layers)
        config = dataclasses.replace(context.engine_config, quantization=self.model.quantization)
        self._add_inner(options, config, context.max_model_len)

    def attach(self, cache: KVCache) -> None:
        super().attach(cache)
        self.guard.attach(cache)


def _around(own: DrafterTraits, inner: DrafterTraits) -> DrafterTraits:
    """The traits of a draft model `own` that drafts with an `inner` drafter."""
    return dataclasses.replace(
        own,
        kv_bytes_per_token=own.kv_bytes_per_token + inner.kv_bytes_per_token,
        tables=inner.tables,
        remembers=inner.remembers,
    )


def _shares_kv(options: CascadeOptions, context: DraftContext) -> bool:
    """Whether the draft model can write to the target's cache: copies in another weight format compute float32."""
    if options.model is not None:
        return False
    return options.copy_format is None or context.dtype == torch.float32


def _draft_model(options: CascadeOptions, context: DraftContext) -> DraftModelOptions:
    """The options of the draft model alone."""
    if options.model is None:
        return self_model(options.copy_format or DRAFT_FORMAT, options, context)
    return DraftModelOptions(
        model=options.model,
        dtype=options.dtype,
        quantization=options.quantization,
        device=options.device,
        revision=options.revision,
        **{field.name: getattr(options, field.name) for field in fields(ShapeOptions)},
    )
