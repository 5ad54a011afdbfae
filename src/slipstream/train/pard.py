"""PARD: a draft model learns to read mask tokens, so that it drafts all its tokens in one pass."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.config import SpeculativeConfig
from slipstream.draft.methods import PARD
from slipstream.train.batches import TrainingBatch, TrainingDocument, TrainingRows
from slipstream.train.distillation import DraftStudent, distillation_loss, make_draft
from slipstream.train.mask_chains import ChainRows, mask_chains
from slipstream.train.mask_tokens import mask_token
from slipstream.train.options import PardTrainOptions
from slipstream.train.target import FrozenTarget
from slipstream.train.target_states import target_states

LOSS, PARD2_LOSS = "hard", "hard=0.1,forward_kl=1"


class PardStudent(DraftStudent):
    """A causal language model that learns the tokens behind masks (An et al., 2025).

    A PARD-2 model (An et al., 2026) also reads the target's hidden states. It learns each token as much as the target
    would have said the tokens before it in its chain, since a draft token counts only if those before it are accepted.
    """

    name = PARD.name

    def __init__(
        self,
        options: PardTrainOptions,
        target: FrozenTarget,
        tokenizer: Any,
        documents: Seq[TrainingDocument],
        seed: int,
    ) -> None:
        """A model to begin with that names its mask token keeps it. Raises `ConfigError` and `ModelError`."""
        model = make_draft(options, target, seed, may_read_target=True)
        self._states = target_states(model, options, target, documents)
        is_pard2 = self._states is not None
        self.options = replace(options, loss=options.loss or (PARD2_LOSS if is_pard2 else LOSS))
        super().__init__(model, tokenizer, self.options, seed)
        if self._states is not None:
            self.feature_layers = self._states.config.feature_layers
            self.module = nn.ModuleDict({"model": model, "states": self._states})
        given = getattr(model.config, "pard_token", None)
        wanted = str(given) if options.mask_token is None and given is not None else options.mask_token
        self.mask, self._mask_is = mask_token(wanted, tokenizer, model.config.vocab_size, documents)
        model.config.pard_token = self.mask
        model.config.spd_type = "pard2" if is_pard2 else PARD.name

    def own_text(self, rows: TrainingRows, step: int) -> TrainingRows:
        """`rows` unchanged."""
        return rows

    def loss(self, batch: TrainingBatch) -> tuple[Tensor, dict[str, float]]:
        """The weighted losses, averaged over the rows of all depths; logs what `DraftStudent.loss` does."""
        target = batch.target_logits_at(batch.loss_mask)  # [n, vocab]
        place = (batch.loss_mask.flatten().cumsum(0) - 1).view_as(batch.loss_mask)
        gold = target.new_zeros(len(target))
        if self._states is not None:
            gold = gold_log_probabilities(target, batch.labels[batch.loss_mask])
        total, count, num_rows, means = target.new_zeros(()), 0.0, 0, {"alpha": 0.0, "agreement": 0.0}
        for rows in mask_chains(batch.documents, batch.loss_mask, self.options, [self._seed, batch.step]):
            last, at = rows.last[rows.learned], place[rows.row]
            draft = self.logits(batch, rows)
            counts = chain_probabilities(gold, at[rows.places[rows.learned]], at[last])
            wanted, labels = target[at[last]], batch.labels[rows.row][last]
            loss, metrics = distillation_loss(draft, wanted, labels, self.options.losses, counts)
            total, count = total + counts.sum() * loss, count + float(counts.sum())
            means = {name: value + len(last) * metrics[name] for name, value in means.items()}
            num_rows += len(last)
        if not num_rows:
            return total, {}
        return total / count, {name: value / num_rows for name, value in means.items()}

    def logits(self, batch: TrainingBatch, rows: ChainRows) -> Tensor:
        """float32 [m, vocab]: of the rows that are learned."""
        token_ids = batch.token_ids[rows.row][rows.places].where(~rows.masked, self.mask)
        mask = torch.zeros(rows.seen.shape, dtype=batch.attention_mask.dtype, device=token_ids.device)
        given = {"input_ids": token_ids[None]}
        if self._states is not None:
            added = self._states(batch, rows, [self._seed, batch.step, rows.row])
            given = {"inputs_embeds": (self.model.get_input_embeddings()(token_ids) + added)[None]}
        hidden = self.model.base_model(
            **given,
            position_ids=(batch.positions[rows.row][rows.places] + rows.depths)[None],
            attention_mask=mask.masked_fill_(~rows.seen, -3e4)[None, None],
            use_cache=False,
        ).last_hidden_state[0]
        return self.model.get_output_embeddings()(hidden[rows.learned]).float()  # type: ignore[no-any-return]

    def about_loss(self) -> str:
        """See `Student`; also says which token the mask is, and what a PARD-2 model reads and how it weighs."""
        lines = [f"the mask token is {self._mask_is}", f"{super().about_loss()}, over all depths"]
        if self._states is not None:
            layers = ", ".join(map(str, self.feature_layers))
            lines.insert(1, f"a PARD-2 model, which reads the target's hidden states {layers}")
            lines[-1] += ", each token weighted by the probability of the tokens before it in its chain"
        return "\n".join(lines)

    def save(self, folder: Path) -> None:
        """As a draft model; the projection of a PARD-2 model, in float32, next to it."""
        super().save(folder)
        if self._states is not None:
            self._states.save(folder)

    def speculative_config(self, folder: Path) -> SpeculativeConfig:
        options = {"model": str(folder), "num_speculative_tokens": self.options.num_depths}
        return SpeculativeConfig(PARD.name, options=options)


def gold_log_probabilities(target: Tensor, labels: Tensor) -> Tensor:
    """[n]: the target's log-probabilities, of logits [n, vocab], of the text's own tokens `labels` [n]."""
    return target.gather(-1, labels[:, None])[:, 0] - target.logsumexp(dim=-1)


def chain_probabilities(gold: Tensor, first: Tensor, last: Tensor) -> Tensor:
    """[m]: the probability that the target says the tokens of a text from `first` on, up to but without `last`.

    `gold` [n] are the tokens' log-probabilities, `first` and `last` [m] indices in it.
    """
    before = F.pad(gold.double().cumsum(0), (1, 0))
    return (before[last] - before[first]).exp().to(gold.dtype)
