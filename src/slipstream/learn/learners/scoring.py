"""What a draft would have drafted on recorded answers, without a pass of the target.

Under the coupled verifier draft and target draw with the same noise, and the noise follows from the record's seed. So
whether a draft token would have been right is known of every place of an answer.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.learn.records.served import ServedRecord
from slipstream.sampling.noise import Noise
from slipstream.sampling.params import SamplingParams
from slipstream.sampling.processors import LogitsProcessor

Hits = NDArray[np.bool_]
"""[n]: whether the draft token at each place of an answer of n tokens is the answer's; or [depth, n] where it matters
how many draft tokens came before in the chain, row 0 for none."""

_PASS_TOKENS = 4096


class Scorer(Protocol):
    """One version of a draft."""

    def hits(self, records: Seq[ServedRecord]) -> list[Hits]:
        """For each record, where the draft would have been right, the text before being the answer's own."""


@dataclass(frozen=True, slots=True)
class RedraftedAnswer:
    """How an answer would have been decoded with chains of a fixed length."""

    num_tokens: int
    """Tokens of the answer but the first, which comes with the prompt."""
    num_steps: int
    reached: tuple[int, ...]
    """By depth: draft tokens whose forerunners in the chain were all right."""
    accepted: tuple[int, ...]

    def seconds(self, cost: float) -> float:
        """In passes of the target, for drafts that cost `cost` passes a step."""
        return self.num_steps * (1 + cost)


def replayed(hits: Hits, depth: int) -> RedraftedAnswer:
    """Decode the answer again with chains of `depth` draft tokens, from where they are right."""
    reached, accepted = [0] * depth, [0] * depth
    by_level = np.broadcast_to(hits, (depth, hits.shape[-1])) if hits.ndim == 1 else hits
    at, steps, end = 1, 0, by_level.shape[1]
    while at < end:
        steps += 1
        for level in range(depth):
            if at >= end:
                break
            reached[level] += 1
            at += 1
            if not by_level[level, at - 1]:  # the target's own token takes its place
                break
            accepted[level] += 1
        else:
            at += 1  # all were right: the target's next token comes free
    return RedraftedAnswer(max(0, end - 1), steps, tuple(reached), tuple(accepted))


class ModelScorer:
    """A draft that reads the text alone, with a layer on its logits or without."""

    def __init__(self, model: Any, layer: Callable[[Tensor, Tensor], Tensor] | None = None) -> None:
        self._model, self._layer = model.eval(), layer

    @torch.no_grad()
    def hits(self, records: Seq[ServedRecord]) -> list[Hits]:
        found: dict[int, Hits] = {}
        order = sorted(range(len(records)), key=lambda number: -len(records[number].text_ids))
        while order:
            width = max(1, len(records[order[0]].text_ids))
            group, order = order[: max(1, _PASS_TOKENS // width)], order[max(1, _PASS_TOKENS // width) :]
            found.update(zip(group, self._group([records[number] for number in group]), strict=True))
        return [found[number] for number in range(len(records))]

    def _group(self, records: Seq[ServedRecord]) -> list[Hits]:
        width = max(len(one.text_ids) for one in records)
        tokens = torch.zeros(len(records), width, dtype=torch.int64)
        for row, one in enumerate(records):
            tokens[row, : len(one.text_ids)] = torch.from_numpy(one.text_ids.astype(np.int64))
        causal = torch.full((width, width), -3e4).triu(1)[None, None].expand(len(records), 1, width, width)
        hidden = self._model.base_model(
            input_ids=tokens,
            position_ids=torch.arange(width).expand_as(tokens),
            attention_mask=causal,
            use_cache=False,
        ).last_hidden_state
        output = self._model.get_output_embeddings()
        hits = []
        for row, one in enumerate(records):
            begin = len(one.prompt_ids) - 1
            span = slice(begin, begin + len(one.token_ids))
            logits = output(hidden[row, span]).float()
            if self._layer is not None:
                logits = self._layer(logits, tokens[row, span])
            hits.append(drawn(logits, one) == one.token_ids)
        return hits


def drawn(logits: Tensor, record: ServedRecord, places: Seq[int] | None = None) -> NDArray[np.int64]:
    """int64 [n]: the draft tokens that the answer's own noise chooses from `logits` [n, vocab], at its first n places
    or at `places`.

    Masks and penalties are not in a record: answers that had them are judged as if they had none.
    """
    params = SamplingParams(temperature=record.temperature, top_p=record.top_p, top_k=record.top_k)
    if params.greedy:
        chosen: NDArray[np.int64] = logits.argmax(-1).numpy()
        return chosen
    processor = LogitsProcessor(params, [], [], [], logits.shape[1])
    log_probs = processor.log_probs(logits, [], [()] * len(logits))
    first = len(record.prompt_ids)
    noise = Noise(record.seed, first, nonce=record.nonce)
    places = range(len(logits)) if places is None else places
    chosen = noise.choose(log_probs, [first + place for place in places]).numpy()
    return np.asarray(chosen)
