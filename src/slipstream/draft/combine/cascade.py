"""A draft model that is itself decoded speculatively: an inner drafter drafts for it.

Chen et al., "Cascade speculative drafting for even faster LLM inference" (NeurIPS 2024); Spector and Re, "Accelerating
LLM inference with staged speculative decoding" (2023). A draft model's token is a function of its logits and of noise
that is keyed by position, also where it is sampled. So inner draft tokens are verified by equality, and the chain is
the same as the draft model alone would propose, in fewer of its passes. The inner drafter may be a cascade too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from slipstream.config import DTYPES, SpeculativeConfig, check_types, reject_unknown
from slipstream.core import EMPTY_PROPOSAL, ROOT, Proposal, Sequence
from slipstream.draft.base import DraftContext, Drafter, Observation
from slipstream.draft.guard import Guard
from slipstream.draft.model.cached import Feed
from slipstream.draft.model.draft_model import DraftModelDrafter, DraftModelOptions, outline_of
from slipstream.draft.model.growth import Growth, GrowthOptions
from slipstream.draft.model.self_model import DRAFT_FORMAT, self_model
from slipstream.draft.outline import DraftOutline
from slipstream.draft.registry import create_drafter, validate
from slipstream.errors import ConfigError
from slipstream.models.linear.formats import check_quantization
from slipstream.models.rows import tree_rows
from slipstream.text.common_prefix import common_prefix_length


@dataclass(frozen=True, kw_only=True)
class CascadeOptions(GrowthOptions):
    """Keys of `speculative_config` for `method: cascade`: a draft model's, and its own drafter's under `draft`."""

    num_speculative_tokens: int = 6
    draft: Mapping[str, Any]
    """`method` and keys of the inner drafter, whose target is the draft model."""
    model: str | None = None
    """Folder or hub id of the draft model; None is the target's own weights, quantised, as in `method: self`."""
    dtype: str = "auto"
    quantization: str | None = None
    """Weight format of the draft model, on a CPU. None: as the target's, or int8 without `model`."""
    device: str = "auto"
    revision: str | None = None

    def __post_init__(self) -> None:
        check_types(self, "cascade")
        self.check_growth("cascade")
        reject_unknown([self.dtype], DTYPES, "cascade dtype")
        check_quantization(self.quantization, "cascade")
        if self.tree_top_k > 1 or self.tree_choices is not None:
            raise ConfigError("cascade drafts are chains; set tree_top_k and tree_choices in the inner draft")
        if "verifier" in self.draft:
            raise ConfigError(
                "cascade draft has a verifier, but inner drafts are verified by equality; omit it"
            )
        validate(SpeculativeConfig.from_mapping(self.draft))


@dataclass(slots=True)
class _Shadow:
    """A sequence for the inner drafter, in which the draft model's tokens count as committed."""

    sequence: Sequence
    num_committed: int = 0
    """Leading tokens that are known to be in the real text."""


class CascadeDrafter(DraftModelDrafter):
    """Drafts with a draft model whose passes verify an inner drafter's proposals."""

    summary = "a draft model that itself drafts with a cheaper drafter"

    Options = CascadeOptions  # type: ignore[assignment]

    @classmethod
    def outline(cls, options: Any, context: DraftContext) -> DraftOutline:
        """The draft model and, loaded after it, the inner drafter, whose target it is."""
        own = outline_of(_draft_model(options, context), context)
        inner_class, inner_options = validate(SpeculativeConfig.from_mapping(options.draft))
        inner = inner_class.outline(
            inner_options, dataclasses.replace(context, target_outline=own.models[0], target=None)
        )
        joined = DraftOutline.joined([own, inner], own.max_nodes)
        return dataclasses.replace(joined, logit_rows=own.logit_rows + 1 + inner.max_nodes)

    @classmethod
    def table_bytes(cls, options: Any, vocab_size: int, num_seqs: int, num_tokens: int) -> int:
        """The inner drafter's."""
        inner_class, inner_options = validate(SpeculativeConfig.from_mapping(options.draft))
        return inner_class.table_bytes(inner_options, vocab_size, num_seqs, num_tokens)

    def __init__(self, options: CascadeOptions, context: DraftContext) -> None:
        super().__init__(_draft_model(options, context), context)
        inner = self._create_inner(options)
        self.guard = Guard(inner, self._growths.vocab_size, inner.kinds, context.draft_timeout_s)
        """Asks the inner drafter."""
        self._shadows: dict[int, _Shadow] = {}

    def _create_inner(self, options: CascadeOptions) -> Drafter:
        config, model = self.context.engine_config, self.options
        inner = create_drafter(
            SpeculativeConfig.from_mapping(options.draft),
            DraftContext(
                engine_config=dataclasses.replace(
                    config,
                    model=model.model,
                    revision=model.revision,
                    dtype=model.dtype,
                    quantization=self.model.quantization,
                ),
                tokenizer=self.context.tokenizer,
                vocab_size=self._growths.vocab_size,
                max_model_len=min(self.context.max_model_len, self.context_length),
                device=self.model.device,
                dtype=self.model.dtype,
                verifier=self.context.verifier,
                target=self.model,
            ),
        )
        if inner.feature_layers():
            method = options.draft["method"]
            raise ConfigError(f"{method!r} reads hidden states of its target, which a cascade does not keep")
        return inner

    @property
    def inner(self) -> Drafter:
        """The cheaper drafter, whose draft tokens the draft model verifies."""
        return self.guard.drafter

    # --- the contract -----------------------------------------------------------------------------------------

    @property
    def num_failures(self) -> int:
        """How often the inner drafter has been retired for a sequence."""
        return self.guard.num_failures

    def kv_bytes_per_token(self) -> int:
        return super().kv_bytes_per_token() + self.inner.kv_bytes_per_token()

    def allocate(self, num_tokens: int) -> None:
        super().allocate(num_tokens)
        self.inner.allocate(num_tokens)
        self.guard.attach(self.cache)

    def memory_bytes(self) -> int:
        return super().memory_bytes() + self.inner.memory_bytes()

    def rewind(self, sequence: Sequence) -> None:
        super().rewind(sequence)
        if shadow := self._shadows.get(sequence.id):
            shadow.num_committed = min(shadow.num_committed, len(sequence.token_ids))

    def remembers(self) -> bool:
        """As the inner drafter does."""
        return self.inner.remembers()

    def release(self, sequence: Sequence) -> None:
        super().release(sequence)
        if sequence.id in self._shadows:
            shadow = self._shadow(sequence)
            shadow.finish_reason = sequence.finish_reason
            self.guard.release(shadow)
            del self._shadows[sequence.id]

    def reset(self) -> None:
        super().reset()
        self.inner.reset()

    def num_held(self) -> int:
        return max(super().num_held(), len(self._shadows), self.inner.num_held())

    def integrity(self) -> list[str]:
        return [*super().integrity(), *(f"inner {fault}" for fault in self.inner.integrity())]

    # --- drafting ---------------------------------------------------------------------------------------------

    def _has_room(self, sequence: Sequence) -> bool:
        if not super()._has_room(sequence):
            return False
        self._shadow(sequence)
        return True

    def _max_stored(self) -> int:
        return super()._max_stored() + self.inner.max_nodes()

    def draws_chains(self) -> bool:
        return False  # a pass verifies what the inner drafter proposes

    def _compute(self, feeds: list[Feed]) -> None:
        """One pass over the feeds, each with the inner drafter's proposal below it."""
        shadows = [self._shadows[feed.growth.sequence.id].sequence for feed in feeds]
        budgets: list[int] = []
        for feed, shadow in zip(feeds, shadows, strict=True):
            shadow.num_computed = feed.rows.num_past
            # The pass itself yields one more token.
            missing = feed.growth.max_depth - len(feed.growth.nodes) - 1
            budgets.append(min(missing, self.inner.max_nodes()) if feed.rows.logit_rows else 0)
        served = [place for place, shadow in enumerate(shadows) if self.guard.serves(shadow)]
        answers = self.guard.ask([shadows[place] for place in served], [budgets[place] for place in served])
        proposals = [EMPTY_PROPOSAL] * len(shadows)
        for place, proposal in zip(served, answers, strict=True):
            proposals[place] = proposal
        own_rows = [feed.rows for feed in feeds]
        for feed, proposal in zip(feeds, proposals, strict=True):
            rows = feed.rows
            if len(proposal):
                first = rows.logit_rows[0]
                feed.rows = tree_rows(rows.slots, rows.num_past, rows.token_ids, proposal, first)
        logits = self._forward(feeds)
        seen: list[Observation] = []
        end = 0
        for feed, shadow, proposal, rows in zip(feeds, shadows, proposals, own_rows, strict=True):
            feed.rows = rows
            self._commit(feed)
            if rows.logit_rows:
                begin, end = end, end + 1 + len(proposal)
                accepted = self._walk(feed.growth, proposal, logits[begin:end])
                self.cache.pool.gather(rows.slots, rows.num_entries, accepted)
                length = len(shadow.token_ids)
                tokens = [node.token_id for node in feed.growth.nodes]
                shadow.token_ids[len(feed.growth.sequence.token_ids) :] = tokens
                was_cut = len(shadow.token_ids) - length == len(
                    accepted
                )  # the chain lacked confidence to go on
                num = len(accepted)
                seen.append(Observation(shadow, proposal, num, logits[begin:end], length, was_cut))
        self.guard.observe(seen)

    def _walk(self, growth: Growth, proposal: Proposal, logits: Tensor) -> list[int]:
        """Grow the chain by the draft model's own tokens, as far as the inner drafter proposed them.

        `logits` is [1 + n, vocab]: row 0 follows the chain, row i + 1 node i. Returns the accepted nodes.
        """
        accepted: list[int] = []
        node: int | None = ROOT
        while node is not None and growth.frontier:
            grown = growth.grow(logits[node + 1 : node + 2])
            if not grown:
                break
            (draft,) = grown
            children = {proposal.token_ids[child]: child for child in proposal.children.get(node, ())}
            node = children.get(draft.token_id)
            if node is not None:
                accepted.append(node)
                draft.stored = len(growth.stored)
                growth.stored.append(draft)
        return accepted

    def _shadow(self, sequence: Sequence) -> Sequence:
        """The inner drafter's sequence, rewound to the committed text."""
        shadow = self._shadows.get(sequence.id)
        if shadow is None:
            shadow = self._shadows[sequence.id] = _Shadow(self._new_shadow(sequence))
        seen, text = shadow.sequence.token_ids, sequence.token_ids
        common = shadow.num_committed
        common += common_prefix_length(seen[common:], text[common:])
        if common < len(seen):
            del seen[common:]
            self.guard.rewind(shadow.sequence)
        seen.extend(text[common:])
        shadow.num_committed = len(seen)
        return shadow.sequence

    def _new_shadow(self, sequence: Sequence) -> Sequence:
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
            grammar=sequence.grammar and sequence.grammar.copy(),  # it follows another text
        )


def _draft_model(options: CascadeOptions, context: DraftContext) -> DraftModelOptions:
    """The options of the draft model alone."""
    if options.model is None:
        return self_model(options.quantization or DRAFT_FORMAT, options, context)
    return DraftModelOptions(
        model=options.model,
        dtype=options.dtype,
        quantization=options.quantization,
        device=options.device,
        revision=options.revision,
        **{field.name: getattr(options, field.name) for field in fields(GrowthOptions)},
    )
