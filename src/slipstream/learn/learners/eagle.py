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

from slipstream.draft.heads.eagle_files import read_eagle, save_eagle
from slipstream.draft.heads.eagle_head import EagleHead
from slipstream.errors import ConfigError, LearnError
from slipstream.learn.learners.base import Learner, Tensors
from slipstream.learn.learners.base_draft import BaseDraft
from slipstream.learn.learners.learner_options import LearnerOptions
from slipstream.learn.learners.objective import LearnLoss, TargetRows, row_losses, weighted_loss
from slipstream.learn.learners.scoring import Hits, Scorer, drawn
from slipstream.learn.records.served import TAPS, ServedRecord
from slipstream.models.huggingface import AutoConfig
from slipstream.train.eagle_loss import TargetText, draft_states
from slipstream.train.target import load_model


class TargetTable:
    """What a head shares with its target: sizes, embedding and output layer, which are read where they are needed."""

    def __init__(self, path: str) -> None:
        config = AutoConfig.from_pretrained(path).get_text_config()
        self.path = path
        self.hidden_size = int(config.hidden_size)
        self.vocab_size = int(config.vocab_size)
        self.num_layers = int(config.num_hidden_layers)
        self.context_length = int(config.max_position_embeddings)
        self._table: Tensor | None = None
        self._output: nn.Linear | None = None

    def embed(self, token_ids: Tensor) -> Tensor:
        """int64 [...] -> float32 [..., hidden]"""
        self._load()
        assert self._table is not None
        return self._table[token_ids]

    def project(self, hidden: Tensor) -> Tensor:
        """float32 [..., hidden] -> [..., vocab], by the target's own output layer."""
        self._load()
        assert self._output is not None
        logits: Tensor = self._output(hidden)
        return logits

    def _load(self) -> None:
        if self._table is None:
            model = load_model(self.path, torch.device("cpu")).requires_grad_(False)
            self._table = model.get_input_embeddings().weight.detach().clone()
            self._output = model.get_output_embeddings()


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
    is_drafted: NDArray[np.bool_]
    """[n]: False for an answer's first token, which comes with the prompt."""
    temperature: float

    @classmethod
    def of(cls, record: ServedRecord, length: int) -> HeadExample | None:
        """Return at most `length` tokens, the latest; None for a record without hidden states or rows."""
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
            rows.positions[own] > 0,
            record.temperature,
        )


@dataclass(frozen=True)
class HeadBatch:
    """Texts, and the target's rows behind the places where `text.learns`, in order."""

    text: TargetText
    token_ids: Tensor
    """int64 [B, L]"""
    target: TargetRows


class EagleLearner(Learner):
    """All weights of an EAGLE-3 head, on captured hidden states: each step reads what the step before made, as in the
    training-time test (`train.eagle_loss`), and what is made small is what chains lose (`objective`)."""

    name = "eagle"

    def __init__(self, base: BaseDraft, options: LearnerOptions) -> None:
        """Raises `ConfigError` for a base drafter without the target that it drafts for."""
        super().__init__(base, options)
        if base.target is None:
            raise ConfigError(f"learner {self.name!r} needs the target that the head drafts for")
        self.target = TargetTable(base.target)

    def begin(self, start: Tensors | None) -> tuple[Any, list[nn.Parameter]]:
        head = self._head(start)
        return head, list(head.parameters())

    def logits_behind(self, model: Any, states: Tensor, previous: Tensor) -> Tensor:
        """float32 [n, draft vocab]: of the head's `states` [n, hidden] behind the tokens `previous`, int64 [n]."""
        logits: Tensor = model.logits(states).float()
        return logits

    def batches(self, records: Seq[ServedRecord], older: Seq[ServedRecord]) -> Iterator[Any]:
        options = self.options
        parts = [
            [one for record in part if (one := HeadExample.of(record, options.row_length)) is not None]
            for part in (records, older)
        ]
        if not parts[0]:
            raise LearnError(f"none of {len(records)} records has hidden states of the target to learn from")
        return self._endless(parts)

    def _endless(self, parts: list[list[HeadExample]]) -> Iterator[HeadBatch]:
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
            yield self._batch(chosen)

    def _batch(self, examples: Seq[HeadExample]) -> HeadBatch:
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
        positions = torch.arange(width).expand(len(examples), width)
        text = TargetText(self.target.embed(tokens), features, positions, documents, learns)
        kept = min(
            one.top_ids.shape[1] for one in examples
        )  # records of another setting may keep fewer tokens
        num_rows = [len(one.places) for one in examples]
        target = TargetRows(
            torch.cat([torch.from_numpy(one.top_ids[:, :kept]) for one in examples]),
            torch.cat([torch.from_numpy(one.top_log_probs[:, :kept]) for one in examples]),
            torch.tensor([one.temperature for one in examples]).repeat_interleave(torch.tensor(num_rows)),
            torch.cat([torch.from_numpy(one.is_drafted) for one in examples]).float(),
            torch.zeros(sum(num_rows), dtype=torch.int64),
        )
        return HeadBatch(text, tokens, target)

    def num_tokens(self, batch: Any) -> int:
        return int(batch.text.documents.numel())

    def loss(self, model: Any, batch: Any) -> LearnLoss:
        """Return the loss of chains behind every token of an answer: a row weighs as much as its chain comes that far,
        by the head's own overlaps with the target before."""
        head = self._head_of(model)
        learns, token_ids = batch.text.learns.flatten(), batch.token_ids.flatten()
        row_of = learns.cumsum(0) - 1
        draft_ids = torch.full((self.target.vocab_size,), -1)
        draft_ids[head.draft_token_ids] = torch.arange(len(head.draft_token_ids))
        reached = torch.zeros(len(learns))  # by the place at which a chain begins
        divergences, overlaps, weights = [], [], []
        for step, later, states in draft_states(head, batch.text, self.options.depth):
            learned = learns[later]
            rows = batch.target.at(row_of[later[learned]])
            begins = later[learned] - 1 - step
            if step == 0:
                reached[begins] = rows.weights
            logits = self.logits_behind(model, states[learned], token_ids[later[learned]])
            divergence, overlap = row_losses(logits, rows, draft_ids)
            divergences.append(divergence)
            overlaps.append(overlap)
            weights.append(reached[begins])
            reached[begins] = reached[begins] * overlap.detach()
        return weighted_loss(divergences, overlaps, weights, self.options.overlap_weight)

    def tensors(self, model: Any) -> dict[str, Tensor]:
        return {name: one.detach().half() for name, one in model.named_parameters()}

    def scorer(self, tensors: Tensors | None) -> Scorer:
        head = self._head(tensors)
        return HeadScorer(head, self, head)

    def _head_of(self, model: Any) -> EagleHead:
        """The head of what `begin` gave."""
        head: EagleHead = model
        return head

    def checkpoint(self, tensors: Tensors, folder: Path) -> None:
        save_eagle(self._head(tensors), folder, target=self.target.path)

    def _head(self, tensors: Tensors | None) -> EagleHead:
        head = self._read_head()
        if head.config.version != 3:
            raise LearnError(
                "the weights of EAGLE-3 heads alone learn; --learner corrective learns a layer behind this one"
            )
        if tensors is not None:
            own = dict(head.named_parameters())
            if {name: one.shape for name, one in tensors.items()} != {
                name: one.shape for name, one in own.items()
            }:
                raise LearnError(
                    "a version of eagle has other weights than its base drafter; it belongs to another head"
                )
            for name, one in own.items():
                one.data.copy_(tensors[name])
        return head

    def _read_head(self) -> EagleHead:
        """The base drafter's head, as it is on disk."""
        head = read_eagle(self.base.model, self.target)
        if head.embedding is not None:
            raise LearnError("only heads with the target's own embedding learn while they serve")
        if head.config.num_layers > 1 or head.config.mask_token_id is not None:
            raise LearnError("only heads of one layer that read no masks learn while they serve")
        return head


class HeadScorer:
    """A head on recorded answers: what it would have drafted at every place, by how far its chain had come."""

    def __init__(self, model: Any, learner: EagleLearner, head: EagleHead) -> None:
        """`model` is what the learner computes logits with, and `head` the head in it."""
        self._model, self._learner, self._head = model, learner, head.eval()

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
        )
        for step, later, states in draft_states(self._head, given, depth):
            wanted = is_answer[later]
            places = (later[wanted] + 1 - first).tolist()
            if not places:
                break
            logits = self._learner.logits_behind(self._model, states[wanted], text.flatten()[later[wanted]])
            full = logits.new_full((len(logits), target.vocab_size), float("-inf"))
            full[:, self._head.draft_token_ids] = logits
            found[step, places] = drawn(full, record, places) == record.token_ids[places]
        return found
