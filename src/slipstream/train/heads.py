"""Medusa and Hydra heads as students of the trainer.

Medusa-1 and Hydra do not change the target. `JointStudent` trains a copy of it with the heads (Medusa-2). The result is
*another target*, and speculation with these heads gives that target's text.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.config import SpeculativeConfig
from slipstream.draft.heads.checkpoints import check_fits
from slipstream.draft.heads.hydra import HydraConfig, HydraHeads, load_hydra, save_hydra
from slipstream.draft.heads.medusa import MedusaConfig, MedusaHeads, load_medusa, save_medusa
from slipstream.draft.methods import MEDUSA
from slipstream.errors import ConfigError
from slipstream.train.batches import TrainingBatch, TrainingRows
from slipstream.train.options import HeadTrainOptions
from slipstream.train.progress import about_loss
from slipstream.train.target import FrozenTarget


class HeadStudent:
    """Heads that learn the target's distributions of the tokens after its next one."""

    def __init__(self, options: HeadTrainOptions, target: FrozenTarget, method: str, seed: int) -> None:
        """`method` is the name of `MEDUSA` or of `HYDRA`."""
        self.options, self.target, self.name = options, target, method
        torch.manual_seed(seed)
        self.heads = self._make() if options.init is None else self._given(options.init)
        self.module: nn.Module = self.heads
        self.feature_layers: Seq[int] = (target.num_layers,)

    def own_text(self, rows: TrainingRows, step: int) -> TrainingRows:
        """`rows` unchanged."""
        return rows

    def loss(self, batch: TrainingBatch) -> tuple[Tensor, dict[str, float]]:
        """Sum over the heads of the cross-entropy with the target's distribution, head k's times `step_decay ** k`.

        A head learns where a draft can begin and its token still belongs to the same answer.
        """
        return self._loss_of_heads(batch, batch.hidden_states[self.target.num_layers])

    def _loss_of_heads(self, batch: TrainingBatch, states: Tensor) -> tuple[Tensor, dict[str, float]]:
        """`states` [B, T, hidden] are what the heads read."""
        learns, documents = batch.loss_mask.flatten(), batch.documents.flatten()
        hidden = states.flatten(0, 1)
        embeds = self.target.embed(batch.token_ids).flatten(0, 1)
        logits = batch.target_logits_at(batch.loss_mask)
        place = learns.cumsum(0) - 1
        roots = learns.nonzero()[:, 0]  # flat indices of the tokens behind which a draft begins
        total = hidden.new_zeros(())
        metrics: dict[str, float] = {}
        for head in range(self.heads.config.num_heads):
            before = roots + 1 + head  # the token before the head's prediction
            inside = before < len(documents)
            roots, before = roots[inside], before[inside]
            same = (documents[roots] == documents[before]) & learns[before]
            roots, before = roots[same], before[same]
            if not len(roots):
                break
            draft_logits = self._draft_logits(head, roots, hidden, embeds)
            wanted = logits[place[before]]
            losses = -(wanted.softmax(dim=-1) * draft_logits.float().log_softmax(dim=-1)).sum(dim=-1)
            total = total + self.options.step_decay**head * losses.mean()
            if not head:
                entropy = torch.special.entr(wanted.softmax(dim=-1)).sum(dim=-1).mean()
                metrics["nats_1"] = float(losses.detach().mean() - entropy)
            agrees = (draft_logits.argmax(dim=-1) == wanted.argmax(dim=-1)).float().mean()
            metrics[f"agrees_{head + 1}"] = float(agrees)
        return total, metrics

    def about_loss(self) -> str:
        """See `Student`."""
        return about_loss("the heads' cross-entropies", "the first head", self.heads.config.vocab_size)

    def save(self, folder: Path) -> None:
        """Write the heads in the layout of the authors' code and of vLLM."""
        if isinstance(self.heads, MedusaHeads):
            shared = self.target.model.get_output_embeddings().weight.detach()
            save_medusa(self.heads, folder, lm_head=shared if self.heads.config.shares_lm_head else None)
        else:
            save_hydra(self.heads, folder)

    def target_path(self, folder: Path) -> str | None:
        """None: the target does not change."""
        return None

    def speculative_config(self, folder: Path) -> SpeculativeConfig:
        """A chain with one draft token a head."""
        options: dict[str, Any] = {
            "model": str(folder),
            "num_speculative_tokens": self.heads.config.num_heads,
            "tree_top_k": 1,
        }
        return SpeculativeConfig(self.name, options=options)

    def _draft_logits(self, head: int, roots: Tensor, hidden: Tensor, embeds: Tensor) -> Tensor:
        """[n, vocab]: the logits of `head` for each root."""
        if isinstance(self.heads, HydraHeads):
            following = [embeds[roots + 1 + i] for i in range(head + 1)]
            return self.heads.step(head, torch.cat([hidden[roots], *following], dim=-1))
        return self.heads.project(self.heads.blocks[head](hidden[roots])[None], first=head)[0]

    def _make(self) -> MedusaHeads | HydraHeads:
        options, target = self.options, self.target
        sizes: dict[str, Any] = {
            "hidden_size": target.hidden_size,
            "vocab_size": target.vocab_size,
            "num_heads": options.num_heads,
            "num_layers": options.num_layers,
            "shares_lm_head": options.shares_lm_head,
            "base_model": target.path,
        }
        project = target.model.get_output_embeddings()
        heads: MedusaHeads | HydraHeads
        if self.name == MEDUSA.name:
            heads = MedusaHeads(MedusaConfig(**sizes), project)
        else:
            heads = HydraHeads(HydraConfig(**sizes), project)
        heads.init_projections(project.weight.detach())
        return heads

    def _given(self, path: str) -> MedusaHeads | HydraHeads:
        """The heads to continue from; raises `ModelError` for another target's heads."""
        load = load_medusa if self.name == MEDUSA.name else load_hydra
        heads = load(path, self.target.model.get_output_embeddings())
        check_fits(path, heads.config.hidden_size, heads.config.vocab_size, self.target)
        if self.options.joint and heads.config.shares_lm_head:
            raise ConfigError(f"{path!r} shares the target's output layer, which --joint trains")
        return heads.requires_grad_(True)


class JointStudent(HeadStudent):
    """Medusa-2: trains a copy of the target with the heads, regularised towards the frozen target.

    The copy's loss is the cross-entropy with the frozen target's distributions (the paper's self-distillation), the
    heads' loss is weighted by `joint_weight`, and its gradient reaches the copy too.
    """

    def __init__(self, options: HeadTrainOptions, target: FrozenTarget, tokenizer: Any, seed: int) -> None:
        super().__init__(options, target, MEDUSA.name, seed)
        self.model = copy.deepcopy(target.model).requires_grad_(True)
        self.module = nn.ModuleDict({"heads": self.heads, "target": self.model})
        self._tokenizer = tokenizer

    def loss(self, batch: TrainingBatch) -> tuple[Tensor, dict[str, float]]:
        """See the class; logs `target_drift`, the divergence of the copy from the frozen target."""
        states = self.model.base_model(
            input_ids=batch.token_ids,
            position_ids=batch.positions,
            attention_mask=batch.attention_mask,
            use_cache=False,
        ).last_hidden_state
        wanted = batch.target_logits_at(batch.loss_mask).log_softmax(dim=-1)
        own = self.model.get_output_embeddings()(states[batch.loss_mask]).float().log_softmax(dim=-1)
        own_loss = -(wanted.exp() * own).sum(dim=-1).mean()
        drift = own_loss.detach() + (wanted.exp() * wanted).sum(dim=-1).mean()
        heads_loss, metrics = self._loss_of_heads(batch, states)
        return own_loss + self.options.joint_weight * heads_loss, {"target_drift": float(drift), **metrics}

    def save(self, folder: Path) -> None:
        """Write the heads, and their target in the folder `target`."""
        super().save(folder)
        model = copy.deepcopy(self.model).half()
        model.save_pretrained(folder / "target")
        self._tokenizer.save_pretrained(folder / "target")

    def target_path(self, folder: Path) -> str:
        """The fine-tuned copy."""
        return str(folder / "target")
