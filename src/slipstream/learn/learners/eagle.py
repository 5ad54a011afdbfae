"""An EAGLE-3 head learns from the hidden states that the target computed while it served."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoConfig

from slipstream.draft.heads.eagle_files import read_eagle, save_eagle
from slipstream.draft.heads.eagle_head import EagleHead
from slipstream.errors import LearnError
from slipstream.learn.learners.base import Learner, Tensors
from slipstream.learn.objective import LEAST_TEMPERATURE, LearnLoss
from slipstream.learn.options import LearnerOptions
from slipstream.learn.records import TAPS, ServedRecord
from slipstream.learn.scoring import Hits, Scorer, drawn
from slipstream.train.eagle_loss import TargetText, draft_states, training_time_test
from slipstream.train.target import load_model

_DECAY = 0.8
"""Ratio of each step's weight to the step's before, as the head was trained."""


class TargetTable:
    """What a head shares with its target: sizes and the embedding, which is read where it is needed first."""

    def __init__(self, path: str) -> None:
        config = AutoConfig.from_pretrained(path).get_text_config()
        self.path = path
        self.hidden_size = int(config.hidden_size)
        self.vocab_size = int(config.vocab_size)
        self.num_layers = int(config.num_hidden_layers)
        self.context_length = int(config.max_position_embeddings)
        self._table: Tensor | None = None

    def embed(self, token_ids: Tensor) -> Tensor:
        """int64 [...] -> float32 [..., hidden]"""
        if self._table is None:
            model = load_model(self.path, torch.device("cpu"))
            self._table = model.get_input_embeddings().weight.detach().clone()
        return self._table[token_ids]


@dataclass(frozen=True)
class HeadExample:
    """A record as a head reads it: L tokens, of which the target's distribution is known behind n."""

    tokens: NDArray[np.int64]
    """[L]"""
    features: NDArray[np.float16]
    """[L, width]"""
    places: NDArray[np.int64]
    """[n], ascending: the tokens whose next one is learned."""
    top_ids: NDArray[np.int64]
    """[n, k]"""
    top_log_probs: NDArray[np.float32]
    """[n, k]"""
    temperature: float

    @classmethod
    def of(cls, record: ServedRecord, length: int) -> HeadExample | None:
        """At most `length` tokens, the latest; None for a record without hidden states or rows."""
        rows, prompt = record.rows, len(record.prompt_ids)
        text = record.text_ids[:-1].astype(np.int64)  # the last one is never read
        features = record.features.get(TAPS)
        if features is None or len(features) != len(text) or not rows.width:
            return None
        cut = max(0, len(text) - length)
        own = np.flatnonzero(
            (rows.path_lengths() == 0)
            & (rows.positions < len(record.token_ids))
            & (prompt + rows.positions - 1 >= cut)
        )
        places, first = np.unique(prompt + rows.positions[own] - 1 - cut, return_index=True)
        if not len(places):
            return None
        own = own[first]
        return cls(
            text[cut:],
            features[cut:],
            places.astype(np.int64),
            rows.top_ids[own].astype(np.int64),
            np.minimum(rows.top_log_probs[own].astype(np.float32), 0.0),
            record.temperature,
        )

    def logits(self, vocab_size: int) -> Tensor:
        """float32 [n, vocab]: the target's, up to a constant; tokens that were not kept share what is left."""
        top_ids, top = torch.from_numpy(self.top_ids), torch.from_numpy(self.top_log_probs)
        others = max(1, vocab_size - top_ids.shape[1])
        tail = (1 - top.exp().sum(-1)).clamp(min=1e-12) / others
        full = tail.log()[:, None].repeat(1, vocab_size)
        temperature = min(max(self.temperature, LEAST_TEMPERATURE), 1.0)
        return full.scatter_(1, top_ids, top) / temperature


class EagleLearner(Learner):
    """All weights of an EAGLE-3 head, by the training-time test (`train.eagle_loss`), on captured hidden states."""

    name = "eagle"

    def __init__(self, floor: Path, options: LearnerOptions, target: str = "") -> None:
        """`target` is the folder of the model that the head drafts for."""
        super().__init__(floor, options)
        self.target = TargetTable(target)

    def begin(self, start: Tensors | None) -> tuple[Any, list[nn.Parameter]]:
        head = self._head(start)
        return head, list(head.parameters())

    def batches(self, records: Seq[ServedRecord], anchor: Seq[ServedRecord]) -> Iterator[Any]:
        options = self.options
        parts = [
            [one for record in part if (one := HeadExample.of(record, options.row_length)) is not None]
            for part in (records, anchor)
        ]
        if not parts[0]:
            raise LearnError(f"none of {len(records)} records has hidden states of the target to learn from")
        return self._endless(parts)

    def _endless(self, parts: list[list[HeadExample]]) -> Iterator[TargetText]:
        rng = np.random.default_rng(self.options.seed)
        rows = self.options.batch_rows
        shares = [rows - rows // 2, rows // 2] if parts[1] and rows > 1 else [rows, 0]
        orders: list[list[HeadExample]] = [[], []]
        while True:
            chosen = []
            for part, order, share in zip(parts, orders, shares, strict=True):
                for _ in range(share):
                    if not order:
                        order += [part[number] for number in rng.permutation(len(part))]
                    chosen.append(order.pop())
            yield self._text(chosen)

    def _text(self, examples: Seq[HeadExample]) -> TargetText:
        """The examples, a row each."""
        width = max(len(one.tokens) for one in examples)
        tokens = torch.zeros(len(examples), width, dtype=torch.int64)
        documents = torch.full((len(examples), width), -1)
        learns = torch.zeros(len(examples), width, dtype=torch.bool)
        features = torch.zeros(len(examples), width, examples[0].features.shape[1])
        for row, one in enumerate(examples):
            num = len(one.tokens)
            tokens[row, :num] = torch.from_numpy(one.tokens)
            documents[row, :num] = row
            learns[row, torch.from_numpy(one.places)] = True
            features[row, :num] = torch.from_numpy(one.features.astype(np.float32))
        logits = torch.cat([one.logits(self.target.vocab_size) for one in examples])
        positions = torch.arange(width).expand(len(examples), width)
        return TargetText(self.target.embed(tokens), features, positions, documents, learns, logits)

    def num_tokens(self, batch: Any) -> int:
        return int(batch.documents.numel())

    def loss(self, model: Any, batch: Any) -> LearnLoss:
        """Its overlap is the agreement of the most probable tokens, its divergence the cross-entropy, of all steps."""
        found = training_time_test(model, batch, num_steps=self.options.depth, decay=_DECAY)
        agreement = sum(found.agreement) / max(1, len(found.agreement))
        return LearnLoss(found.loss, agreement, float(found.loss.detach()))

    def tensors(self, model: Any) -> dict[str, Tensor]:
        return {name: one.detach().half() for name, one in model.named_parameters()}

    def scorer(self, tensors: Tensors | None) -> Scorer:
        return HeadScorer(self._head(tensors), self)

    def checkpoint(self, tensors: Tensors, folder: Path) -> None:
        save_eagle(self._head(tensors), folder, target=self.target.path)

    def _head(self, tensors: Tensors | None) -> EagleHead:
        head = read_eagle(str(self.floor), self.target)
        if head.config.version != 3 or head.embedding is not None:
            raise LearnError("only EAGLE-3 heads with the target's own embedding learn while they serve")
        if tensors is not None:
            own = dict(head.named_parameters())
            if {name: one.shape for name, one in tensors.items()} != {
                name: one.shape for name, one in own.items()
            }:
                raise LearnError(
                    "a version of eagle has other weights than its floor; it belongs to another head"
                )
            for name, one in own.items():
                one.data.copy_(tensors[name])
        return head


class HeadScorer:
    """A head on recorded answers: what it would have drafted at every place, by how far its chain had come."""

    def __init__(self, head: EagleHead, learner: EagleLearner) -> None:
        self._head, self._learner = head.eval(), learner

    @torch.no_grad()
    def hits(self, records: Seq[ServedRecord]) -> list[Hits]:
        """[depth, n] of each; nothing is right of a record without hidden states."""
        return [self._of(record) for record in records]

    def _of(self, record: ServedRecord) -> Hits:
        depth, target = self._learner.options.depth, self._learner.target
        first, num = len(record.prompt_ids), len(record.token_ids)
        found = np.zeros((depth, num), bool)
        text = torch.from_numpy(record.text_ids[:-1].astype(np.int64))[None]
        features = record.features.get(TAPS)
        if features is None or len(features) != text.shape[1]:
            return found
        is_answer = torch.arange(text.shape[1]) >= first - 1  # the token after it is the answer's
        given = TargetText(
            target.embed(text),
            torch.from_numpy(features.astype(np.float32))[None],
            torch.arange(text.shape[1])[None],
            torch.zeros_like(text),
            is_answer[None],
            torch.empty(0, target.vocab_size),
        )
        for step, later, states in draft_states(self._head, given, depth):
            wanted = is_answer[later]
            places = (later[wanted] + 1 - first).tolist()
            if not places:
                break
            logits = self._head.logits(states[wanted]).float()
            full = logits.new_full((len(logits), target.vocab_size), float("-inf"))
            full[:, self._head.draft_token_ids] = logits
            found[step, places] = drawn(full, record, places) == record.token_ids[places]
        return found
