"""EAGLE heads as students of the trainer."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from slipstream.config import SpeculativeConfig
from slipstream.draft.heads.eagle_files import read_eagle, save_eagle
from slipstream.draft.heads.eagle_head import EagleConfig, EagleHead, default_feature_layers
from slipstream.draft.methods import EAGLE, EAGLE3, PEAGLE
from slipstream.errors import ConfigError
from slipstream.train.batches import TrainingBatch, TrainingDocument, TrainingRows
from slipstream.train.channels import channel_scale, scaled, without_scales
from slipstream.train.eagle_loss import TargetText, training_time_test
from slipstream.train.options import EagleTrainOptions, PEagleTrainOptions, parse_layers
from slipstream.train.progress import about_loss
from slipstream.train.target import FrozenTarget


class EagleStudent:
    """An EAGLE head that learns from the target's features and distributions."""

    def __init__(
        self,
        options: EagleTrainOptions,
        target: FrozenTarget,
        documents: Seq[TrainingDocument],
        version: int,
        seed: int,
    ) -> None:
        """`version` is 1 or 3 (EAGLE-2's heads are version 1). Raises `ConfigError` for invalid options."""
        self.options, self.target, self.version = options, target, version
        self.name = (EAGLE3 if version == 3 else EAGLE).name
        torch.manual_seed(seed)
        if version != 3 and options.freeze_lm_head:
            raise ConfigError("--freeze-lm-head is for EAGLE-3; EAGLE-1 has the target's own output layer")
        if options.init is not None:
            self.head = _given(options.init, target, version)
        else:
            self.head = fresh_head(fresh_config(options, target, version), target, documents)
        self.module: nn.Module = self.head
        self.feature_layers: Seq[int] = self.head.config.feature_layers
        if version == 3:
            scale = channel_scale(target, documents, self.feature_layers)
            self.head.fc = scaled(self.head.fc, scale, is_fresh=options.init is None)
            self.head.lm_head.requires_grad_(not options.freeze_lm_head)

    def own_text(self, rows: TrainingRows, step: int) -> TrainingRows:
        """`rows` unchanged: the head's own drafts are made inside the loss."""
        return rows

    def loss(self, batch: TrainingBatch) -> tuple[Tensor, dict[str, float]]:
        """The training-time test; metrics are the agreement by step, and the nats of the first."""
        features = torch.cat([batch.hidden_states[layer] for layer in self.feature_layers], dim=-1)
        text = TargetText(
            self.target.embed(batch.token_ids),
            features,
            batch.positions,
            batch.documents,
            batch.loss_mask,
        )
        steps = training_time_test(
            self.head,
            text,
            batch.target_scores_at(batch.loss_mask, self.head.draft_token_ids),
            self.target.model.get_output_embeddings(),
            num_steps=self.options.num_steps,
            decay=self.options.step_decay,
            feature_weight=self.options.feature_weight,
        )
        agrees = {f"agrees_{i + 1}": value for i, value in enumerate(steps.agreement)}
        return steps.loss, ({"nats_1": steps.nats[0], **agrees} if steps.nats else {})

    def about_loss(self) -> str:
        """See `Student`."""
        summed = "the cross-entropies of all steps of the training-time test, and of features for EAGLE-1"
        return about_loss(summed, "the head", self.head.config.draft_vocab_size)

    def save(self, folder: Path) -> None:
        """Write the head in the chosen layout."""
        save_eagle(
            without_scales(self.head),
            folder,
            target=self.target.path,
            layout=self.options.layout or self.name,
            num_speculative_tokens=self.options.num_speculative_tokens,
        )

    def target_path(self, folder: Path) -> None:
        """None: the target does not change."""

    def speculative_config(self, folder: Path) -> SpeculativeConfig:
        """A chain, so that evaluations report acceptance by position."""
        options: dict[str, Any] = {
            "model": str(folder),
            "num_speculative_tokens": self.options.num_speculative_tokens,
            "tree_top_k": 1,
            "num_draft_nodes": None,
        }
        return SpeculativeConfig(self.name, options=options)


def _given(path: str, target: FrozenTarget, version: int) -> EagleHead:
    """The head to continue from; raises `ModelError` for another target's head, `ConfigError` for another kind."""
    head = read_eagle(path, target)
    if head.config.version != version:
        raise ConfigError(f"{path!r} is an EAGLE-{head.config.version} head, not an EAGLE-{version} one")
    if head.embedding is not None:
        raise ConfigError(f"{path!r} has an embedding of its own; training supports only the target's")
    if head.config.num_layers > 1 or head.config.mask_token_id is not None:
        raise ConfigError(
            f"{path!r} has several layers or reads masks; this trains heads of one layer without masks, and "
            f"slipstream train {PEAGLE.name} the others"
        )
    return head


def fresh_head(config: EagleConfig, target: FrozenTarget, documents: Seq[TrainingDocument]) -> EagleHead:
    head = EagleHead(config)
    initialise(head, target)
    if config.draft_vocab_size < config.vocab_size:
        head.draft_token_ids = most_used(documents, config.vocab_size, config.draft_vocab_size)
        head.lm_head.weight.data.copy_(output_weight(target)[head.draft_token_ids])
    return head


def most_used(documents: Seq[TrainingDocument], vocab_size: int, size: int) -> Tensor:
    """int64 [size], ascending: the most frequent tokens of answers; ties go to the lower ids."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for document in documents:
        counts += np.bincount(document.tokens[document.is_answer], minlength=vocab_size)
    best = np.argsort(-counts, kind="stable")[:size]
    return torch.from_numpy(np.sort(best))


def fresh_config(
    options: EagleTrainOptions | PEagleTrainOptions, target: FrozenTarget, version: int
) -> EagleConfig:
    model = target.model.config
    layers: tuple[int, ...] = (target.num_layers,)
    if version == 3:
        layers = _layers(options.feature_layers, target.num_layers)
    elif options.feature_layers is not None or options.draft_vocab_size is not None:
        raise ConfigError("--feature-layers and --draft-vocab-size are for EAGLE-3")
    heads = model.num_attention_heads
    draft_vocab = options.draft_vocab_size or target.vocab_size
    if draft_vocab > target.vocab_size:
        raise ConfigError(f"--draft-vocab-size {draft_vocab} is more than the target's {target.vocab_size}")
    return EagleConfig(
        version=version,
        hidden_size=target.hidden_size,
        target_hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab,
        intermediate_size=options.intermediate_size or model.intermediate_size,
        num_attention_heads=heads,
        num_key_value_heads=getattr(model, "num_key_value_heads", None) or heads,
        head_dim=getattr(model, "head_dim", None) or target.hidden_size // heads,
        feature_layers=layers,
        fc_bias=False,  # vLLM's EAGLE-1 has no place for one
        rms_norm_eps=getattr(model, "rms_norm_eps", 1e-6),
        max_position_embeddings=model.max_position_embeddings,
        rope_parameters=rope_of(model),
    )


def _layers(text: str | None, num_layers: int) -> tuple[int, ...]:
    if text is None:
        return default_feature_layers(num_layers)
    layers = parse_layers(text)
    if len(layers) != 3 or any(not 0 <= layer < num_layers for layer in layers):
        raise ConfigError(f"--feature-layers takes three numbers from 0 to {num_layers - 1}, got {text!r}")
    return layers


def rope_of(model: Any) -> dict[str, Any]:
    """The target's rotary settings if they apply to any length, else default ones with the same base."""
    rope = dict(getattr(model, "rope_parameters", None) or {})
    if rope.get("rope_type") in ("default", "linear", "llama3", "yarn"):
        return rope
    return {"rope_type": "default", "rope_theta": rope.get("rope_theta", 10000.0)}


def initialise(head: EagleHead, target: FrozenTarget) -> None:
    """Initialise with small weights, the target's output layer, and a norm in front of it as `first_norm` says."""
    for name, weight in head.named_parameters():
        if weight.ndim > 1:
            nn.init.normal_(weight, std=0.02)
        elif name.endswith("bias"):
            nn.init.zeros_(weight)
    if head.config.version == 3:
        head.norm.weight.data.copy_(first_norm(target))
        if head.config.draft_vocab_size == head.config.vocab_size:
            head.lm_head.weight.data.copy_(output_weight(target))


def output_weight(target: FrozenTarget) -> Tensor:
    """[vocab, hidden]: the weight of the target's output layer."""
    weight: Tensor = target.model.get_output_embeddings().weight.detach()
    return weight[: target.vocab_size]


def first_norm(target: FrozenTarget) -> Tensor:
    """[hidden]: the weight of the target's final norm, made so small that the logits of a random state vary by 1.

    A fresh head's states are random, and the target's own norm would make sharp distributions of them.
    """
    norm = final_norm(target)
    spread = (output_weight(target) * norm).square().sum(dim=-1).mean().sqrt()
    return norm / spread.clamp(min=1.0)


def final_norm(target: FrozenTarget) -> Tensor:
    """[hidden]: the weight of the target's final norm, ones where it has none."""
    norm = getattr(target.model.base_model, "norm", None)
    weight = getattr(norm, "weight", None)
    return torch.ones(target.hidden_size) if weight is None else weight.detach()
