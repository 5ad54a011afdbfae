"""P-EAGLE: an EAGLE-3 head learns to read mask tokens, so that it drafts all its tokens in one pass."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.config import SpeculativeConfig
from slipstream.draft.heads.eagle_files import read_eagle, save_eagle
from slipstream.draft.heads.eagle_head import EagleConfig, EagleHead
from slipstream.draft.methods import PEAGLE
from slipstream.errors import ConfigError
from slipstream.train.attention import PADDING
from slipstream.train.batches import TargetScores, TrainingBatch, TrainingDocument, TrainingRows
from slipstream.train.channels import channel_scale, scaled, without_scales
from slipstream.train.eagle import fresh_config, fresh_head, initialise
from slipstream.train.eagle_loss import Wanted, token_loss
from slipstream.train.mask_chains import ChainRows, mask_chains
from slipstream.train.mask_tokens import mask_token
from slipstream.train.options import MaskOptions, PEagleTrainOptions
from slipstream.train.progress import about_loss
from slipstream.train.target import FrozenTarget


class PEagleStudent:
    """An EAGLE-3 head that learns the target's distributions at all depths of its masks."""

    name = PEAGLE.name

    def __init__(
        self,
        options: PEagleTrainOptions,
        target: FrozenTarget,
        tokenizer: Any,
        documents: Seq[TrainingDocument],
        seed: int,
    ) -> None:
        """Raises `ConfigError` for invalid options, and `ModelError` for a head of another target."""
        self.options, self.target, self._seed = options, target, seed
        torch.manual_seed(seed)
        given = None if options.init is None else _given(options.init, target)
        wanted = options.mask_token
        if wanted is None and given is not None and given.config.mask_token_id is not None:
            wanted = str(given.config.mask_token_id)
        mask, self._mask_is = mask_token(wanted, tokenizer, target.vocab_size, documents)
        if given is not None:
            self.head = _continued(given, options.num_layers, mask, target)
        else:
            base = replace(
                fresh_config(options, target, 3), mask_token_id=mask, num_layers=options.num_layers or 2
            )
            self.head = fresh_head(base, target, documents)
        self.module: nn.Module = self.head
        self.feature_layers: Seq[int] = self.head.config.feature_layers
        scale = channel_scale(target, documents, self.feature_layers)
        self.head.fc = scaled(self.head.fc, scale, is_fresh=given is None)

    def own_text(self, rows: TrainingRows, step: int) -> TrainingRows:
        """`rows` unchanged."""
        return rows

    def loss(self, batch: TrainingBatch) -> tuple[Tensor, dict[str, float]]:
        """See `masked_loss`; the masks are drawn anew for each batch of the run."""
        scores = batch.target_scores_at(batch.loss_mask, self.head.draft_token_ids)
        return masked_loss(
            self.head, batch, scores, self.target.embed, self.options, [self._seed, batch.step]
        )

    def about_loss(self) -> str:
        """See `Student`; also says which token the mask is."""
        summed = "the mean cross-entropy with the target's distribution, over all depths alike"
        return f"the mask token is {self._mask_is}\n" + about_loss(
            summed, "the head", self.head.config.draft_vocab_size
        )

    def save(self, folder: Path) -> None:
        """Write the head in the chosen layout."""
        save_eagle(
            without_scales(self.head),
            folder,
            target=self.target.path,
            layout=self.options.layout or "speculators",
            num_speculative_tokens=self.options.num_depths,
        )

    def target_path(self, folder: Path) -> None:
        """None: the target does not change."""

    def speculative_config(self, folder: Path) -> SpeculativeConfig:
        """A chain, so that evaluations report acceptance by position."""
        options = {"model": str(folder), "num_speculative_tokens": self.options.num_depths}
        return SpeculativeConfig(self.name, options=options)


def masked_loss(
    head: EagleHead,
    batch: TrainingBatch,
    scores: TargetScores,
    embed: Callable[[Tensor], Tensor],
    options: MaskOptions,
    seed: Seq[int],
) -> tuple[Tensor, dict[str, float]]:
    """(mean cross-entropy over the rows of all depths, agreement by depth and the nats of the first to log).

    `scores` are the target's of the draft vocabulary behind the tokens where `batch.loss_mask`, in order; `embed` is
    the target's embedding.
    """
    features = torch.cat([batch.hidden_states[layer] for layer in head.config.feature_layers], dim=-1)
    has_feature = batch.positions > 0  # a row pairs a token with the feature of the one before
    documents = batch.documents.where(has_feature, PADDING)
    place = (batch.loss_mask.flatten().cumsum(0) - 1).view_as(batch.loss_mask)
    wanted = Wanted.of(scores, head.draft_token_ids)
    total, count, metrics = features.new_zeros(()), 0, _Means()
    for rows in mask_chains(documents, batch.loss_mask & has_feature, options, seed):
        states = masked_states(head, batch, features[rows.row], embed, rows)
        depths = rows.depths[rows.learned]
        at = place[rows.row][rows.last[rows.learned]]
        can_be_drafted = wanted.top[at] >= 0
        mine = wanted.at(at[can_be_drafted])
        logits = head.logits(states[rows.learned][can_be_drafted])
        learned = int(can_be_drafted.sum())
        total = total + learned * token_loss(logits, mine)[0]
        count += learned
        with torch.no_grad():
            metrics.add(logits, mine, depths, can_be_drafted)
    return total / max(count, 1), metrics.means()


class _Means:
    """Means over the rows of a batch, by depth."""

    def __init__(self) -> None:
        self._agrees: dict[int, list[float]] = {}
        self._nats: list[float] = []

    def add(self, logits: Tensor, wanted: Wanted, depths: Tensor, can_be_drafted: Tensor) -> None:
        """`logits` and `wanted` are those of the rows that `can_be_drafted`; the others agree with nothing."""
        agrees = torch.zeros(len(depths), device=depths.device)
        agrees[can_be_drafted] = (logits.argmax(dim=-1) == wanted.top).float()
        for depth in set(depths.tolist()):
            self._agrees.setdefault(depth, []).extend(agrees[depths == depth].tolist())
        first = depths[can_be_drafted] == 0
        if first.any():
            loss, entropy, _ = token_loss(logits[first], wanted.at(first.nonzero()[:, 0]))
            self._nats.append(float(loss) - entropy)

    def means(self) -> dict[str, float]:
        found = {f"agrees_{depth + 1}": sum(each) / len(each) for depth, each in sorted(self._agrees.items())}
        return ({"nats_1": sum(self._nats) / len(self._nats)} if self._nats else {}) | found


def masked_states(
    head: EagleHead,
    batch: TrainingBatch,
    features: Tensor,
    embed: Callable[[Tensor], Tensor],
    rows: ChainRows,
) -> Tensor:
    """[n, hidden]: what the head computes for the rows; `features` [T, width] are those of their packed row."""
    assert head.mask_hidden is not None
    assert head.config.mask_token_id is not None
    masked = rows.masked
    token_ids = batch.token_ids[rows.row][rows.places].where(~masked, head.config.mask_token_id)
    read = torch.where(masked[:, None], head.mask_hidden[0], features[rows.places - 1])
    positions = batch.positions[rows.row][rows.places] - 1 + rows.depths

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=rows.seen, enable_gqa=True)
        return attended.transpose(1, 2)

    return head(embed(token_ids)[None], head.encode(read)[None], positions[None], attend)[0]  # type: ignore[no-any-return]


def _given(path: str, target: FrozenTarget) -> EagleHead:
    """The head to begin with; raises `ModelError` for another target's, `ConfigError` for another kind."""
    head = read_eagle(path, target)
    if head.config.version != 3:
        raise ConfigError(f"{path!r} is an EAGLE-1 head; begin with an EAGLE-3 or a P-EAGLE head")
    if head.embedding is not None:
        raise ConfigError(f"{path!r} has an embedding of its own; training supports only the target's")
    return head


def _continued(given: EagleHead, num_layers: int | None, mask: int, target: FrozenTarget) -> EagleHead:
    """`given` with masks, and with layers more that change nothing yet."""
    config: EagleConfig = replace(
        given.config, mask_token_id=mask, num_layers=num_layers or given.config.num_layers
    )
    if config.num_layers < given.config.num_layers:
        raise ConfigError(
            f"--num-layers {config.num_layers} is fewer than the {given.config.num_layers} of the head to begin with"
        )
    head = EagleHead(config)
    initialise(head, target)
    for layer in list(head.upper)[given.config.num_layers - 1 :]:
        new: Any = layer
        nn.init.zeros_(new.self_attn.o_proj.weight)
        nn.init.zeros_(new.mlp.down_proj.weight)
    head.load_state_dict(given.state_dict(), strict=False)
    return head
