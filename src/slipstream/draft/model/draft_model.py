"""A smaller model of the same vocabulary drafts a chain or a tree (Leviathan et al. 2023; Chen et al. 2023)."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from slipstream.config import DTYPES, EngineConfig, check_types, reject_unknown
from slipstream.core.sequence import Sequence
from slipstream.draft.base import DraftContext
from slipstream.draft.footprint import Footprint
from slipstream.draft.proposers.autoregressive import AutoregressiveDrafter
from slipstream.draft.proposers.correction import CorrectedOptions, correction_bytes
from slipstream.draft.proposers.device_tree import DeviceTrees
from slipstream.draft.proposers.growing import Feed
from slipstream.draft.proposers.own_cache import CachedDrafter
from slipstream.draft.proposers.proposal_shape import ProposalShape
from slipstream.draft.traits import DrafterTraits
from slipstream.errors import ConfigError
from slipstream.kv.cache import KVCache
from slipstream.kv.state import SPARE_ROWS, StateRoom
from slipstream.models import CausalLM, load_draft_tokenizer, load_model, load_tokenizer
from slipstream.models.batch import ForwardBatch
from slipstream.models.executor.chains import Chains
from slipstream.models.linear.formats import check_quantization, weight_format
from slipstream.models.load_options import LoadOptions
from slipstream.models.outline import outline_model
from slipstream.text.vocabulary import check_same_vocabulary

log = logging.getLogger(__name__)

NOT_COMPARED = (
    "whether the draft has the target's vocabulary was not looked at: the tokenizers of both must be in folders "
    "here"
)


@dataclass(frozen=True, kw_only=True)
class DraftModelOptions(CorrectedOptions):
    """Keys of `speculative_config` for `method: draft_model`."""

    model: str
    """Folder or hub id of the draft model; its vocabulary must be the target's."""
    dtype: str = "auto"
    quantization: str | None = None
    """Weight format of the draft, such as `int8`, on a CPU. None: as the target's. The text stays the target's."""
    device: str = "auto"
    revision: str | None = None
    lora: str | None = None
    """Folder of a LoRA adapter for the draft; None uses one in the model's own folder, if any. As the target's."""

    def __post_init__(self) -> None:
        self.check_draft("draft_model")

    def check_draft(self, what: str) -> None:
        """Raise `ConfigError` for an invalid value; `what` is the drafter's name in the message."""
        check_types(self, what)
        self.check_shape(what)
        reject_unknown([self.dtype], DTYPES, f"{what} dtype")
        check_quantization(self.quantization, what)


class DraftModelDrafter(CachedDrafter, AutoregressiveDrafter):
    """Drafts with a small causal language model."""

    Options = DraftModelOptions
    traits = replace(CachedDrafter.traits, reads_text_only=True, has_own_model=True)
    shares_vocabulary: ClassVar[bool] = True
    """Whether the draft's tokens are the target's; else it must have a tokenizer."""

    @classmethod
    def footprint(cls, options: Any, context: DraftContext) -> Footprint:
        """Raises `VocabularyMismatchError` as loading does, where the target's tokenizer is loaded or both are files
        here."""
        held = footprint_of(options, context, cls.configured(options, context))
        engine = context.engine_config
        target = engine.tokenizer or engine.model
        if options.model == target or not cls.shares_vocabulary:
            return held
        if context.tokenizer is not None:
            theirs = load_draft_tokenizer(
                options.model,
                context.tokenizer,
                revision=options.revision,
                trust_remote_code=engine.trust_remote_code,
            )
            check_same_vocabulary(context.tokenizer, theirs, options.model)
            return held
        if not (_has_tokenizer(target) and _has_tokenizer(options.model)):
            return replace(held, note=NOT_COMPARED)
        _compare_files(target, options.model, engine.trust_remote_code)
        return held

    def __init__(self, options: DraftModelOptions, context: DraftContext) -> None:
        self.tokenizer = self._load_tokenizer(options, context)
        self._check_tokenizer(options, context)
        loaded_as = _load_options(options, context)
        self._loaded_as = (options.model, loaded_as)
        reused = (
            None if context.loaded_drafter is None else context.loaded_drafter.reusable_model(self._loaded_as)
        )
        self._is_reused = reused is not None
        self.model = reused or load_model(options.model, loaded_as)
        self._warn_of_size(options.model, context)
        _check_encoders(options.model, self.model, context.target)
        super().__init__(
            options,
            context,
            vocab_size=self._draft_vocab_size(context.vocab_size),
            context_length=self.model.context_length,
            shapes=self.model.shapes,
            like=self.model,
        )

    def _warn_of_size(self, path: str, context: DraftContext) -> None:
        """Warn of a draft model that reads as many bytes of weights a token as the target on the same device."""
        target = context.target
        if target is None or self.model.device != target.device:
            return
        own, theirs = self.model.weight_bytes, target.weight_bytes
        if own >= theirs:
            log.warning(
                "draft model %r holds %.1f MiB of weights and the target %.1f MiB: a draft token costs "
                "as much as one of the target, so drafting with it cannot gain speed",
                *(path, own / 2**20, theirs / 2**20),
            )

    def drafting_model(self) -> CausalLM:
        return self.model

    def reusable_model(self, loaded_as: tuple[object, ...]) -> CausalLM | None:
        return self.model if loaded_as == self._loaded_as else None

    def _new_cache(self, num_tokens: int, prefix_caching: bool) -> KVCache:
        engine = self.context.engine_config
        number = engine.max_num_seqs
        room = StateRoom(number, number if prefix_caching else 0, self.shape.max_stored + SPARE_ROWS)
        cache = self.model.new_cache(num_tokens, prefix_caching=prefix_caching, states=room)
        self.model.executor.warm_up(cache.pool, engine.max_num_batched_tokens)
        return cache

    def _has_room(self, sequence: Sequence) -> bool:
        if not super()._has_room(sequence):
            return False
        if self.model.encoded_shapes:
            if not self.model.reads(sequence):
                return False
            self.model.encode(self.cache, sequence)
        return True

    def weight_bytes(self) -> int:
        """0 for a model that another drafter has loaded and counts."""
        return 0 if self._is_reused else self.model.weight_bytes

    def _load_tokenizer(self, options: DraftModelOptions, context: DraftContext) -> Any:
        """The draft's tokenizer; the target's where the draft is the target itself, or has none that it could be."""
        target = context.engine_config
        if (options.model, options.revision) == (target.model, target.revision):
            return context.tokenizer
        return load_draft_tokenizer(
            options.model,
            context.tokenizer if self.shares_vocabulary else None,
            revision=options.revision,
            trust_remote_code=target.trust_remote_code,
        )

    def _check_tokenizer(self, options: DraftModelOptions, context: DraftContext) -> None:
        """Raise `VocabularyMismatchError` unless this drafter can use the draft's tokenizer."""
        check_same_vocabulary(context.tokenizer, self.tokenizer, options.model)

    def _draft_vocab_size(self, target_vocab_size: int) -> int:
        """Width of the logits that draft tokens are chosen from; the models' padding of the vocabulary may differ."""
        return min(self.model.vocab_size, target_vocab_size)

    def _can_read(self, token_ids: Seq[int]) -> bool:
        return max(token_ids, default=0) < self.model.vocab_size  # the target's embedding may be wider

    def draws_chains(self) -> bool:
        # A subclass that feeds or reads tokens in another way computes level by level.
        return type(self)._forward is DraftModelDrafter._forward

    def runs_ahead(self, sequence: Sequence) -> bool:
        # Of the draft tokens that are accepted all have entries but the last, and so the text's last two are fed. A
        # mask's entry is not that of a token; and other executors attend to as many entries as the host says.
        if not (self.keeps_accepted and self.draws_chains() and self.model.executor.chooses):
            return False
        same_text = type(self)._token_ids is DraftModelDrafter._token_ids
        return same_text and self.draws_ahead(sequence)

    def _chains(self, feeds: Seq[Feed], chains: Chains) -> Seq[Seq[int]]:
        return self.model.draft_chain([feed.rows for feed in feeds], self.cache.pool, chains)

    def grows_on_device(self) -> bool:
        return self.model.executor.chooses and self.draws_chains()

    def _grow_pending(self, feeds: Seq[Feed], trees: DeviceTrees) -> bool:
        groups, pool = [feed.rows for feed in feeds], self.cache.pool
        drawn = self.model.executor.draft(ForwardBatch(groups), pool, trees)
        if drawn is None:
            logits = self.model.forward(groups, pool).logits
            trees.draw(logits, lambda level: self.model.forward(level, pool).logits)
        else:
            trees.finish(drawn)
        return True

    def let_pend(self, device: torch.device) -> None:
        super().let_pend(device)
        if self.may_pend and self.grows_on_device() and self.model.executor.warms_up:
            pool, executor = self.cache.pool, self.model.executor
            self.record_drafts(lambda rows, drafts: executor.draft(rows, pool, drafts))

    def _forward(self, feeds: Seq[Feed]) -> Tensor:
        logits = self.model.forward([feed.rows for feed in feeds], self.cache.pool).logits
        return logits[:, : self._trees.vocab_size]


def _check_encoders(path: str, draft: CausalLM, target: CausalLM | None) -> None:
    """Raise `ConfigError` where a draft model has an encoder that cannot read what the target's does."""
    if not draft.encoded_shapes:
        return
    if target is None or not target.encoded_shapes:
        raise ConfigError(
            f"the draft {path!r} is an encoder-decoder, and what it would read does not come with the target's tokens; "
            "it drafts for an encoder-decoder in the same process"
        )
    for name in ("num_mel_bins", "max_source_positions"):
        own, theirs = (getattr(model.config, name, None) for model in (draft, target))
        if own != theirs:
            raise ConfigError(
                f"the draft {path!r} hears other features than the target: its {name} is {own}, the target's {theirs}"
            )


def _has_tokenizer(path: str) -> bool:
    return (Path(path) / "tokenizer.json").is_file()


@lru_cache(maxsize=16)
def _compare_files(target: str, draft: str, trust_remote_code: bool) -> None:
    """Kept once they are the same: a plan that does not fit is made again with each change."""
    ours, theirs = (load_tokenizer(path, trust_remote_code=trust_remote_code) for path in (target, draft))
    check_same_vocabulary(ours, theirs, draft)


def _inherited_format(engine: EngineConfig, device: str) -> str | None:
    """The target's weight format, for a draft that names none; not on a device that has no kernels for it."""
    held = engine.quantization
    return held if device.partition(":")[0] in (*weight_format(held).devices, "auto") else None


def _load_options(options: DraftModelOptions, context: DraftContext) -> LoadOptions:
    """How the draft is loaded; what its own options do not say is as for the target."""
    device = str(context.device) if options.device == "auto" else options.device
    return LoadOptions.of_draft(
        context.engine_config,
        dtype=options.dtype,
        device=device,
        revision=options.revision,
        quantization=options.quantization or _inherited_format(context.engine_config, device),
        lora=options.lora,
    )


def footprint_of(options: DraftModelOptions, context: DraftContext, own: DrafterTraits) -> Footprint:
    """What a drafter with this draft model holds: its weights, and keys and values of its own. `own` are its traits
    without them."""
    model = outline_model(options.model, _load_options(options, context))
    return Footprint(
        traits=replace(own, kv_bytes_per_token=model.kv_bytes_per_token, context_length=model.context_length),
        models=(model,),
        head_bytes=correction_bytes(options),
        head_stored_bytes=correction_bytes(options),
        logit_rows=ProposalShape.of(options, context.verifier).logit_rows,
    )
