"""What a learner is: from records to tensors, and from tensors to a drafter that can be scored and served."""

from __future__ import annotations

import contextlib
import math
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging

from slipstream.errors import LearnError
from slipstream.learn.learners.base_draft import BaseDraft
from slipstream.learn.learners.batches import LearnBatch, batches
from slipstream.learn.learners.learner_options import LearnerOptions
from slipstream.learn.learners.objective import LearnLoss, learn_loss
from slipstream.learn.learners.scoring import Scorer
from slipstream.learn.records.served import ServedRecord

BeforeStep = Callable[[int, int], None]
"""(steps done, all steps): called before each step; it may wait, and what it raises ends the learning."""
Tensors = Mapping[str, Tensor]

_WARMUP = 0.1
_MAX_GRAD_NORM = 1.0
_WINDOW = 10
"""Steps whose mean is reported."""


@dataclass(frozen=True)
class LearnedWeights:
    """What a learner made."""

    tensors: dict[str, Tensor]
    """What a version holds. With the base drafter they are all that is needed."""
    figures: dict[str, Any]
    """What it saw while it learned, and what that cost; plain values."""
    settings: dict[str, Any]
    """The options it had."""


def no_rest(done: int, total: int) -> None:
    """A learner that need not wait for anything."""


class Learner(ABC):
    """Learns on top of a drafter with weights, the base drafter, whose tokens are the target's."""

    name: str

    def __init__(self, base: BaseDraft, options: LearnerOptions) -> None:
        self.base, self.options = base, options

    @abstractmethod
    def begin(self, start: Tensors | None) -> tuple[Any, list[nn.Parameter]]:
        """A model to train, the base drafter's or that of the tensors `start`, and what of it learns."""

    def logits(self, model: Any, batch: LearnBatch) -> Tensor:
        """float32 [n, vocab]: the draft's logits at the batch's places."""
        return hidden_logits(model, batch)

    def batches(self, records: Seq[ServedRecord], older: Seq[ServedRecord]) -> Iterator[Any]:
        """What `loss` reads, without end; raises `LearnError` where there is nothing to learn."""
        options = self.options
        return batches(records, older, rows=options.batch_rows, length=options.row_length, seed=options.seed)

    def num_tokens(self, batch: Any) -> int:
        """Return the number of tokens of a batch, padding included."""
        return int(batch.token_ids.numel())

    def loss(self, model: Any, batch: Any) -> LearnLoss:
        """What is made small."""
        options = self.options
        return learn_loss(self.logits(model, batch), batch.target, options.depth, options.overlap_weight)

    @abstractmethod
    def tensors(self, model: Any) -> dict[str, Tensor]:
        """What a version holds of a model."""

    @abstractmethod
    def scorer(self, tensors: Tensors | None) -> Scorer:
        """What scores a version's tensors on records; None is the base drafter."""

    @abstractmethod
    def checkpoint(self, tensors: Tensors, folder: Path) -> None:
        """Write the draft model of `tensors` as a checkpoint, which `method: draft_model` loads."""

    def version_options(self, tensors: Tensors, folder: Path) -> dict[str, str]:
        """Write what the drafter of the version loads into `folder`; returns the options that differ from the
        base's."""
        self.checkpoint(tensors, folder)
        return {"model": str(folder)}

    def learn(
        self,
        records: Seq[ServedRecord],
        older: Seq[ServedRecord] = (),
        *,
        start: Tensors | None = None,
        before_step: BeforeStep = no_rest,
    ) -> LearnedWeights:
        """Learn from `records`; half of each batch is from `older`, so that what is in it is not forgotten.

        It begins with the base drafter, or with the tensors `start`. Deterministic for its options and threads. Raises
        `LearnError` where the records have nothing to learn, or the loss is no number.
        """
        options, started_s = self.options, time.monotonic()
        torch.manual_seed(options.seed)
        model, parameters = self.begin(start)
        optimizer = torch.optim.AdamW(parameters, lr=options.learning_rate, weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self._rate)
        source = self.batches(records, older)
        seen: list[tuple[float, float, float]] = []
        num_tokens, busy_s = 0, 0.0
        for step in range(options.num_steps):
            before_step(step, options.num_steps)
            step_started_s = time.monotonic()
            batch = next(source)
            found = self.loss(model, batch)
            if not math.isfinite(float(found.loss.detach())):
                raise LearnError(f"the loss of {self.name} is no number at step {step + 1}; nothing is kept")
            optimizer.zero_grad(set_to_none=True)
            found.loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(parameters, _MAX_GRAD_NORM)
            optimizer.step()
            schedule.step()
            seen.append((float(found.loss.detach()), found.overlap, found.divergence))
            num_tokens += self.num_tokens(batch)
            busy_s += time.monotonic() - step_started_s
        figures = {
            "overlap_first": _mean(seen[:_WINDOW], 1),
            "overlap_last": _mean(seen[-_WINDOW:], 1),
            "divergence_first": _mean(seen[:_WINDOW], 2),
            "divergence_last": _mean(seen[-_WINDOW:], 2),
            "num_records": len(records),
            "num_older": len(older),
            "num_tokens": num_tokens,
            "num_parameters": sum(one.numel() for one in parameters),
            "busy_s": busy_s,
            "elapsed_s": time.monotonic() - started_s,
        }
        return LearnedWeights(self.tensors(model), figures, asdict(options))

    def _rate(self, step: int) -> float:
        """Rises over the first tenth, then falls linearly towards zero."""
        total = self.options.num_steps
        rise = max(1, round(total * _WARMUP))
        return min((step + 1) / rise, (total - step) / max(1, total - rise), 1.0)


def hidden_logits(model: Any, batch: LearnBatch) -> Tensor:
    """float32 [n, vocab]: a causal language model's logits at the batch's places."""
    hidden = model.base_model(
        input_ids=batch.token_ids,
        position_ids=batch.positions,
        attention_mask=batch.attention_mask,
        use_cache=False,
    ).last_hidden_state
    logits: Tensor = model.get_output_embeddings()(hidden[batch.places]).float()
    return logits


def write_checkpoint(model: Any, base: Path, folder: Path) -> None:
    """A float16 checkpoint with the base drafter's tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    model.half()
    model.config._attn_implementation = None
    with _no_progress_bar():
        model.save_pretrained(folder)
    for file in base.iterdir():
        if (
            file.is_file()
            and not (folder / file.name).exists()
            and file.suffix in (".json", ".jinja", ".model", ".txt")
        ):
            shutil.copy(file, folder / file.name)


@contextlib.contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Transformers draws none within the body, in a server's log."""
    if not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _mean(seen: Seq[tuple[float, float, float]], which: int) -> float:
    return sum(one[which] for one in seen) / max(1, len(seen))
