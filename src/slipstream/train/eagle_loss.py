"""The loss of EAGLE heads: the training-time test.

When drafting, a head reads its own output, so it is trained on that too: step 0 reads the target's true features, each
later step the head's state of the step before, one token further on (Li et al., "EAGLE-3", NeurIPS 2025). The attention
of a later step sees the true rows up to the root of its draft, and after them that draft's own rows.

EAGLE-1 is step 0 alone, with a loss on the features added to the one on the tokens (Li et al., ICML 2024).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.draft.heads.eagle_head import EagleHead
from slipstream.train.batches import TargetScores


@dataclass(frozen=True)
class TargetText:
    """Packed rows and the target's features for them, without gradients."""

    embeds: Tensor
    """[B, L, hidden]: the embedding of each token."""
    features: Tensor
    """[B, L, feature layers * target hidden]"""
    positions: Tensor
    """[B, L]: position of each token in its own document."""
    documents: Tensor
    """[B, L]: document number of each token; -1 is padding."""
    learns: Tensor
    """bool [B, L]: True where the token after this one is learned."""


@dataclass
class TrainingTimeTest:
    """The result of a training-time test."""

    loss: Tensor
    agreement: list[float] = field(default_factory=list)
    """By step: share of rows in which the head's and the target's most probable tokens agree."""
    nats: list[float] = field(default_factory=list)
    """By step: mean divergence of the head's distribution from the target's over the draft vocabulary, KL(p || q), in
    nats a token; 0 is the target's own distribution."""


def training_time_test(
    head: EagleHead,
    text: TargetText,
    scores: TargetScores,
    project: Callable[[Tensor], Tensor] | None = None,
    *,
    num_steps: int = 5,
    decay: float = 0.8,
    feature_weight: float = 10.0,
) -> TrainingTimeTest:
    """Cross-entropy with the target's distribution over the draft vocabulary, step `s` weighted by `decay ** s`.

    `scores` are the target's of the draft vocabulary, behind the tokens where `text.learns`, in order. EAGLE-1 needs
    the target's output layer, `project`; its loss on the features is weighted by `feature_weight`.
    """
    learns = text.learns.flatten()
    place = learns.cumsum(0) - 1  # index of a token's scores
    wanted = Wanted.of(scores, head.draft_token_ids)
    result = TrainingTimeTest(text.features.new_zeros(()))
    for step, later, state in draft_states(head, text, num_steps if head.config.version == 3 else 1):
        learned = learns[later]
        if not learned.any():
            break
        rows = place[later[learned]]
        can_be_drafted = wanted.top[rows] >= 0
        if head.config.version == 1:
            assert project is not None, "EAGLE-1 drafts with the target's own output layer"
            features = text.features.flatten(0, 1)[later[learned]]
            result.loss = result.loss + feature_weight * F.smooth_l1_loss(state[learned], features)
            draft_logits = project(state[learned][can_be_drafted])
        else:
            draft_logits = head.logits(state[learned][can_be_drafted])
        loss, entropy, agreement = token_loss(draft_logits, wanted.at(rows[can_be_drafted]))
        result.loss = result.loss + decay**step * loss
        result.agreement.append(agreement * float(can_be_drafted.float().mean()))
        result.nats.append(float(loss.detach()) - entropy)
    return result


def draft_states(head: EagleHead, text: TargetText, num_steps: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """What the head computes step by step when it drafts behind every place of a text.

    Each is (step, int64 [n]: flat indices of the tokens that were read last, [n, hidden]: the states behind them, which
    predict the next token). A draft that began `step` tokens earlier read the text's own tokens since.
    """
    length = text.documents.shape[1]
    documents, learns = text.documents.flatten(), text.learns.flatten()
    embeds = text.embeds.flatten(0, 1)
    state = head.encode(text.features).flatten(0, 1)
    roots = torch.arange(
        len(documents), device=state.device
    )  # flat indices of the tokens that drafts start from
    entries: list[_Entries] = []
    for step in range(num_steps):
        later = roots + 1 + step
        continues = roots % length + 1 + step < length
        later = later.clamp(max=len(documents) - 1)
        continues &= (documents[later] == documents[roots]) & (documents[roots] >= 0)
        if step > 0:  # step 0's rows are context for the others; drafts begin only where a token is learned
            continues &= learns[roots.clamp(max=len(learns) - 2) + 1] & learns[later]
        roots, later, state = roots[continues], later[continues], state[continues]
        attention = _DraftAttention(documents, length, entries, roots)
        positions = text.positions.flatten()[roots] + step
        state = head(embeds[later][None], state[None], positions[None], attention)[0]
        yield step, later, state


@dataclass(frozen=True)
class Wanted:
    """What a head learns at each of n tokens."""

    probabilities: Tensor
    """[n, draft vocab]: the target's distribution over the draft vocabulary."""
    entropy: Tensor
    """[n]: of that distribution, in nats."""
    top: Tensor
    """[n]: index in the draft vocabulary of the target's most probable token, -1 where it is not there; those rows are
    not learned."""

    @classmethod
    def of(cls, scores: TargetScores, draft_token_ids: Tensor) -> Wanted:
        """`scores` of the tokens `draft_token_ids`."""
        log_probabilities = torch.log_softmax(scores.logits, dim=-1)
        probabilities = log_probabilities.exp()
        entropy = -torch.linalg.vecdot(probabilities, log_probabilities)
        ordered, order = draft_token_ids.sort()
        index = torch.searchsorted(ordered, scores.top).clamp(max=len(ordered) - 1)
        return cls(probabilities, entropy, order[index].where(ordered[index] == scores.top, -1))

    def at(self, rows: Tensor) -> Wanted:
        """Some of the rows."""
        return Wanted(self.probabilities[rows], self.entropy[rows], self.top[rows])


def token_loss(draft_logits: Tensor, wanted: Wanted) -> tuple[Tensor, float, float]:
    """(mean cross-entropy, the target's mean entropy, agreement of the most probable tokens) of rows that are learned;
    `draft_logits` [n, draft vocab]."""
    count = max(len(draft_logits), 1)
    losses = F.cross_entropy(draft_logits.float(), wanted.probabilities, reduction="sum")
    with torch.no_grad():
        hits = draft_logits.gather(-1, wanted.top[:, None])[:, 0] >= draft_logits.amax(dim=-1)
    return losses / count, float(wanted.entropy.sum()) / count, float(hits.sum()) / count


@dataclass(frozen=True)
class _Entries:
    """The keys and values, [n, kv_heads, dim], of one step's rows."""

    roots: Tensor
    """[n], ascending"""
    keys: Tensor
    values: Tensor


class _DraftAttention:
    """Each row sees the true rows of its document up to its root, then its own draft's rows so far."""

    def __init__(self, documents: Tensor, length: int, entries: list[_Entries], roots: Tensor) -> None:
        self.documents, self.length, self.entries, self.roots = documents, length, entries, roots

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `eagle_head.Attend`; B is 1, and so is the number of layers."""
        self.entries.append(_Entries(self.roots, key[0].transpose(0, 1), value[0].transpose(0, 1)))
        queries = query[0].transpose(0, 1)  # [n, heads, dim]
        repeats = queries.shape[1] // self.entries[0].keys.shape[1]
        starts = torch.arange(0, len(self.documents), self.length, device=queries.device)
        bounds = [*torch.searchsorted(self.roots, starts).tolist(), len(self.roots)]
        true_bounds = [
            *torch.searchsorted(self.entries[0].roots, starts).tolist(),
            len(self.entries[0].roots),
        ]
        outputs = [
            self._row(queries[a:b], self.roots[a:b], c, d, repeats)
            for a, b, c, d in zip(bounds, bounds[1:], true_bounds, true_bounds[1:], strict=False)
            if b > a
        ]
        return torch.cat(outputs)[None]

    def _row(self, queries: Tensor, roots: Tensor, begin: int, end: int, repeats: int) -> Tensor:
        """One packed row's queries [n, heads, dim] over its true rows `begin` to `end`, and their own drafts."""
        true = self.entries[0]
        seen = true.roots[begin:end]
        keys = true.keys[begin:end].repeat_interleave(repeats, dim=1)  # [m, heads, dim]
        values = true.values[begin:end].repeat_interleave(repeats, dim=1)
        queries = queries * queries.shape[-1] ** -0.5
        scores = torch.einsum("nhd,mhd->hnm", queries, keys)
        visible = (seen[None] <= roots[:, None]) & (
            self.documents[seen][None] == self.documents[roots][:, None]
        )
        scores = scores.masked_fill(~visible, float("-inf"))
        own_values = []
        for entry in self.entries[1:]:
            index = torch.searchsorted(entry.roots, roots)
            own = entry.keys[index].repeat_interleave(repeats, dim=1)  # [n, heads, dim]
            scores = torch.cat([scores, (queries * own).sum(dim=-1).transpose(0, 1)[..., None]], dim=-1)
            own_values.append(entry.values[index].repeat_interleave(repeats, dim=1))
        weights = torch.softmax(scores, dim=-1)
        output = torch.einsum("hnm,mhd->nhd", weights[..., : end - begin], values)
        for i, value in enumerate(own_values):
            output = output + weights[..., end - begin + i].transpose(0, 1)[..., None] * value
        return output
