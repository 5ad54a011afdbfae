"""PARD: a draft model learns to read mask tokens, so that it drafts all its tokens in one pass."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.config import SpeculativeConfig
from slipstream.draft.methods import PARD
from slipstream.draft.model.pard import reads_target
from slipstream.errors import ConfigError
from slipstream.train.batches import TrainingBatch, TrainingDocument, TrainingRows
from slipstream.train.distillation import DraftStudent, distillation_loss
from slipstream.train.mask_chains import ChainRows, mask_chains
from slipstream.train.mask_tokens import mask_token
from slipstream.train.options import PardTrainOptions


class PardStudent(DraftStudent):
    """A causal language model that learns the tokens behind masks (An et al., 2025)."""

    name = PARD.name

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        options: PardTrainOptions,
        documents: Seq[TrainingDocument],
        seed: int,
    ) -> None:
        """`model` is the draft model to begin with; one that names its mask token keeps it. Raises `ConfigError`."""
        if reads_target(model.config):
            raise ConfigError(
                f"{options.init!r} is a PARD-2 model, whose projection of the target's states is not trained here; "
                "begin with a PARD or an ordinary draft model"
            )
        super().__init__(model, tokenizer, options, seed)
        self.options = options
        vocab_size = model.config.vocab_size
        given = getattr(model.config, "pard_token", None)
        wanted = str(given) if options.mask_token is None and given is not None else options.mask_token
        self.mask, self._mask_is = mask_token(wanted, tokenizer, vocab_size, documents)
        model.config.pard_token, model.config.spd_type = self.mask, PARD.name

    def own_text(self, rows: TrainingRows, step: int) -> TrainingRows:
        """`rows` unchanged."""
        return rows

    def loss(self, batch: TrainingBatch) -> tuple[Tensor, dict[str, float]]:
        """The weighted losses, averaged over the rows of all depths; logs what `DraftStudent.loss` does."""
        target = batch.target_logits_at(batch.loss_mask)  # [n, vocab]
        place = (batch.loss_mask.flatten().cumsum(0) - 1).view_as(batch.loss_mask)
        total, count, means = target.new_zeros(()), 0, {"alpha": 0.0, "agreement": 0.0}
        for rows in mask_chains(batch.documents, batch.loss_mask, self.options, [self._seed, batch.step]):
            last = rows.last[rows.learned]
            draft = self._logits(batch, rows)
            wanted, labels = target[place[rows.row][last]], batch.labels[rows.row][last]
            loss, metrics = distillation_loss(draft, wanted, labels, self.options.losses)
            total = total + len(last) * loss
            means = {name: value + len(last) * metrics[name] for name, value in means.items()}
            count += len(last)
        if not count:
            return total, {}
        return total / count, {name: value / count for name, value in means.items()}

    def _logits(self, batch: TrainingBatch, rows: ChainRows) -> Tensor:
        """float32 [m, vocab]: of the rows that are learned."""
        token_ids = batch.token_ids[rows.row][rows.places].where(~rows.masked, self.mask)
        mask = torch.zeros(rows.seen.shape, dtype=batch.attention_mask.dtype, device=token_ids.device)
        hidden = self.model.base_model(
            input_ids=token_ids[None],
            position_ids=(batch.positions[rows.row][rows.places] + rows.depths)[None],
            attention_mask=mask.masked_fill_(~rows.seen, -3e4)[None, None],
            use_cache=False,
        ).last_hidden_state[0]
        return self.model.get_output_embeddings()(hidden[rows.learned]).float()  # type: ignore[no-any-return]

    def about_loss(self) -> str:
        """See `Student`; also says which token the mask is."""
        return f"the mask token is {self._mask_is}\n{super().about_loss()}, over all depths"

    def speculative_config(self, folder: Path) -> SpeculativeConfig:
        options = {"model": str(folder), "num_speculative_tokens": self.options.num_depths}
        return SpeculativeConfig(PARD.name, options=options)
