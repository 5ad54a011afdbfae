"""The training loop, the same for every student: schedule, checkpoints, log, early stop.

Stopped at any step and started again, a run continues as if it had not been stopped; with a budget in tokens, on one
process, it ends with the very weights of an uninterrupted one.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import re
import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from slipstream.config import SpeculativeConfig
from slipstream.errors import ConfigError, RequestError
from slipstream.profiling.provenance import provenance, without_folders
from slipstream.train.batches import (
    Cursor,
    TrainingBatch,
    TrainingDocument,
    TrainingRows,
    make_batch,
    row_batches,
)
from slipstream.train.features import FeatureCache
from slipstream.train.journal import Journal
from slipstream.train.muon import Muon
from slipstream.train.options import TrainOptions
from slipstream.train.plots import draw
from slipstream.train.processes import Processes
from slipstream.train.progress import format_rate
from slipstream.train.target import FrozenTarget

if TYPE_CHECKING:
    from slipstream.train.evaluation import EvaluationFigures

_OF_VOCABULARY = re.compile(r"(^|\.)(lm_head|left_to_right)\.")
CHECKPOINT, LOG, PROVENANCE = "checkpoint.pt", "log.jsonl", "training.json"


class Student(Protocol):
    """The model that is trained; each training method implements this interface."""

    name: str
    """Name of the folder in which it is saved."""
    module: nn.Module
    """The module with all weights; those that require a gradient are trained."""
    feature_layers: Seq[int]
    """The target's hidden states that `loss` reads, besides the last one."""

    def own_text(self, rows: TrainingRows, step: int) -> TrainingRows:
        """The rows to train on instead of `rows`, such as texts of its own; `rows` themselves by default."""

    def loss(self, batch: TrainingBatch) -> tuple[Tensor, dict[str, float]]:
        """(mean loss, a scalar with a gradient; other means to log, by name)."""

    def about_loss(self) -> str:
        """What the numbers of the log mean, in a sentence or two: units, what is best and what chance gives."""

    def save(self, folder: Path) -> None:
        """Write a checkpoint for the engine."""

    def speculative_config(self, folder: Path) -> SpeculativeConfig:
        """Configuration for drafting with the checkpoint in `folder`."""

    def target_path(self, folder: Path) -> str | None:
        """Path of the trained target, where training changes the target too; otherwise None."""


@dataclass
class Progress:
    """Progress of a run; with the weights and the optimizers' state it makes up a checkpoint."""

    step: int = 0
    tokens: int = 0
    """Training tokens of all processes, without padding."""
    elapsed_s: float = 0.0
    """Training time without evaluations, summed over restarts."""
    cursor: Cursor = field(default_factory=Cursor)
    num_evaluations: int = 0
    best_tau: float = 0.0
    best_step: int = 0
    evaluations_since_best: int = 0
    evaluated_s: float = 0.0
    """`elapsed_s` at the last evaluation."""
    evaluated_step: int = -1

    def fraction(self, options: TrainOptions) -> float:
        """Fraction of the budget that is spent, 0 to 1."""
        by_tokens = self.tokens / options.max_tokens if options.max_tokens else 0.0
        by_time = self.elapsed_s / (60 * options.time_limit_minutes) if options.time_limit_minutes else 0.0
        return min(1.0, max(by_tokens, by_time))


def learning_rate_factor(fraction: float, warmup: float, hold: float) -> float:
    """Warm-up from 5 %, constant, linear to zero, over the fraction of the budget that is spent."""
    rising = 0.05 + 0.95 * fraction / warmup if warmup else 1.0
    return min(1.0, rising, (1.0 - fraction) / (1.0 - hold))


@dataclass
class Trainer:
    """One run of one student. `output` receives its checkpoint, log, plot and the trained model."""

    student: Student
    target: FrozenTarget
    documents: Seq[TrainingDocument]
    pad_token_id: int
    options: TrainOptions
    output: Path
    made_with: Mapping[str, Any]
    """Further settings of the run, for its provenance; a run can be continued only with the same ones."""
    evaluate: Callable[[SpeculativeConfig, str | None], EvaluationFigures] | None = None
    say: Callable[[str], None] = lambda line: None
    stop: Callable[[Progress], bool] = lambda progress: False
    """Called before each step; True ends the run, which can be continued later."""
    processes: Processes = field(default_factory=Processes)
    features: FeatureCache | None = None
    """Where the target's hidden states are kept; without it they are computed for each batch."""

    def run(self) -> Progress:
        """Train until the budget is spent, `stop` says so or τ no longer rises; writes the student to `output`.

        Raises `ConfigError` where `output` belongs to another run, cannot be written, or the loss is not finite.
        """
        options, progress = self.options, Progress()
        if options.batch_rows % self.processes.count:
            raise ConfigError(f"--batch-rows must be a multiple of the {self.processes.count} processes")
        torch.manual_seed(options.seed)
        self.student.module.to(self.target.device).train()
        self._optimizers = make_optimizers(self.student.module, self.target.vocab_size, options)
        try:
            self.output.mkdir(parents=True, exist_ok=True)
            progress = self._resume() or progress
            self._log = Journal(self.output / LOG) if self.processes.is_main else None
            try:
                self._train(progress)
            finally:
                if self._log is not None:
                    self._log.close()
        except OSError as error:
            raise ConfigError(f"cannot write to {str(self.output)!r}: {error.strerror or error}") from None
        return progress

    def _train(self, progress: Progress) -> None:
        options, main = self.options, self.processes.is_main
        stream = row_batches(
            self.documents,
            options.batch_rows,
            options.row_length,
            self.pad_token_id,
            options.seed,
            progress.cursor,
        )
        if progress.step == 0 and self.evaluate is not None:
            self._evaluate(progress)  # before training
        clock = logged = saved = time.monotonic()
        window, factor = _Window(), 0.0
        while (fraction := self.processes.largest(progress.fraction(options))) < 1.0 and not self._ends(
            progress
        ):
            factor = learning_rate_factor(fraction, options.warmup_fraction, options.hold_fraction)
            loss, metrics, num_tokens = self._step(stream, progress, fraction, factor)
            progress.step += 1
            progress.tokens += num_tokens
            window.add(loss, metrics, num_tokens)
            now = time.monotonic()
            progress.elapsed_s, clock = progress.elapsed_s + now - clock, now
            if not math.isfinite(loss):
                raise ConfigError(
                    f"the loss is {loss} at step {progress.step}; lower --learning-rate, "
                    f"the last checkpoint in {str(self.output)!r} is whole"
                )
            if now - logged >= options.log_every_s or progress.step == 1:
                self._log_training(progress, window, factor)
                window, logged = _Window(), now
            if self._evaluation_is_due(progress):
                if window.num_steps:
                    self._log_training(progress, window, factor)
                self._evaluate(progress)
                window = _Window()
                now = clock = logged = time.monotonic()
            if main and now - saved >= options.checkpoint_every_s:
                self._save_checkpoint(progress)
                saved = now
        if window.num_steps:
            self._log_training(progress, window, factor)
        if progress.fraction(options) >= 1.0 and self.evaluate and progress.evaluated_step < progress.step:
            self._evaluate(progress)
        if main:
            self._save_checkpoint(progress)
            self._export(self.output / self.student.name, progress)

    def _ends(self, progress: Progress) -> bool:
        patience = self.options.patience
        return self.stop(progress) or bool(patience and progress.evaluations_since_best >= patience)

    def _step(
        self, stream: Iterator[TrainingRows], progress: Progress, fraction: float, factor: float
    ) -> tuple[float, dict[str, float], int]:
        """One optimizer step; returns the mean loss, the means of the metrics and the number of training tokens."""
        options, processes = self.options, self.processes
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["highest_lr"] * factor
        window = _Window()
        for part in range(options.accumulation):
            rows = next(stream).take(slice(processes.rank, None, processes.count))
            number = progress.step * options.accumulation + part
            rows = self.student.own_text(rows, number)
            batch = make_batch(rows, self.target, self.student.feature_layers, self.features)
            batch = replace(batch, step=number, fraction=fraction)
            dtype = self.target.dtype
            with torch.autocast(self.target.device.type, dtype, enabled=dtype != torch.float32):
                loss, metrics = self.student.loss(batch)
            if loss.requires_grad:  # a batch may have no token to learn
                (loss / options.accumulation).backward()  # type: ignore[no-untyped-call]
            window.add(float(loss.detach()), metrics, int((batch.documents >= 0).sum()))
        weights = [weight for weight in self.student.module.parameters() if weight.requires_grad]
        if processes.count > 1:  # all must average the same weights, even without gradients of their own
            for weight in weights:
                weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
        weights = [weight for weight in weights if weight.grad is not None]
        processes.average([weight.grad for weight in weights if weight.grad is not None])
        nn.utils.clip_grad_norm_(weights, options.max_grad_norm)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()
        means = window.means()
        return means.pop("loss"), means, processes.total(window.num_tokens)

    def _log_training(self, progress: Progress, window: _Window, factor: float) -> None:
        if self._log is None:
            return
        means = window.means()
        self._log.append({"event": "train", **_where(progress), "factor": factor, **means})
        spent = progress.fraction(self.options)
        left = progress.elapsed_s * (1 / spent - 1) / 60 if spent else 0.0
        speed = format_rate(window.num_tokens, time.monotonic() - window.began_s)
        others = " ".join(f"{name} {value:.3f}" for name, value in means.items() if name != "loss")
        self.say(
            f"step {progress.step} {spent:.1%} epoch {progress.cursor.epoch} {progress.tokens:,} tokens "
            f"{speed} loss {means['loss']:.4f} {others} lr x{factor:.2f} {left:.0f} min left"
        )

    def _evaluation_is_due(self, progress: Progress) -> bool:
        options = self.options
        if self.evaluate is None:
            return False
        minutes, steps = options.evaluate_every_minutes, options.evaluate_every_steps
        due = minutes is not None and progress.elapsed_s - progress.evaluated_s >= 60 * minutes
        due = due or (steps is not None and progress.step % steps == 0)
        return self.processes.largest(float(due)) > 0

    def _evaluate(self, progress: Progress) -> None:
        """Save the student to a temporary folder and evaluate it with the engine."""
        tau = 0.0
        if self._log is not None and self.evaluate is not None:
            folder = self.output / f"{self.student.name}.evaluated"
            self._export(folder, progress)
            student = self.student
            self.say(f"step {progress.step}: evaluating …")
            figures = self.evaluate(student.speculative_config(folder), student.target_path(folder))
            tau = figures.greedy.tau
            self._log.append({"event": "evaluation", **_where(progress), **figures.as_json()})
            self.say(f"step {progress.step}: {figures}")
            draw(self.output)
        tau = self.processes.largest(tau)
        progress.num_evaluations += 1
        progress.evaluated_s, progress.evaluated_step = progress.elapsed_s, progress.step
        progress.evaluations_since_best += 1
        if tau > progress.best_tau:
            progress.best_tau, progress.best_step, progress.evaluations_since_best = tau, progress.step, 0
            if self.processes.is_main:
                self._export(self.output / f"{self.student.name}.best", progress)
        self.student.module.train()

    def _export(self, folder: Path, progress: Progress) -> None:
        self.student.save(folder)
        _write(folder / PROVENANCE, json.dumps(self._provenance(progress), indent=1, default=_name) + "\n")

    def _provenance(self, progress: Progress) -> dict[str, Any]:
        made_with = {**_without_folders(self.made_with), "options": asdict(self.options)}
        return {"made_with": made_with, "progress": asdict(progress), "run": provenance()}

    def _save_checkpoint(self, progress: Progress) -> None:
        """Write the checkpoint atomically, so that a killed run keeps the one before."""
        state = {
            "module": self.student.module.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "progress": asdict(progress),
            "identity": self._identity(),
        }
        partial = self.output / f"{CHECKPOINT}.partial"
        torch.save(state, partial)
        partial.replace(self.output / CHECKPOINT)
        _write(
            self.output / PROVENANCE, json.dumps(self._provenance(progress), indent=1, default=_name) + "\n"
        )
        draw(self.output)

    def _resume(self) -> Progress | None:
        """Continue from the checkpoint in `output`; None without one."""
        file = self.output / CHECKPOINT
        if not file.exists():
            return None
        try:
            state = torch.load(file, map_location=self.target.device, weights_only=True)
        except (RuntimeError, EOFError, ValueError, LookupError, pickle.UnpicklingError) as error:
            raise ConfigError(f"cannot read the checkpoint {str(file)!r}: {error}") from None
        identity = self._identity()
        changed = [name for name, value in identity.items() if state["identity"].get(name) != value]
        if changed:
            raise ConfigError(
                f"{str(self.output)!r} holds a run with another {changed[0]}: "
                f"{state['identity'].get(changed[0])}, not {identity[changed[0]]}; choose another --output"
            )
        try:
            self.student.module.load_state_dict(state["module"])
            for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
        except (RuntimeError, ValueError):
            raise ConfigError(
                f"the checkpoint {str(file)!r} is of another version of Slipstream; choose another --output"
            ) from None
        cursor = Cursor(**state["progress"].pop("cursor"))
        progress = Progress(**state["progress"], cursor=cursor)
        if self.processes.is_main:
            _forget_after(self.output / LOG, progress.step)
        self.say(f"continues at step {progress.step}, {progress.tokens:,} tokens")
        return progress

    def _identity(self) -> dict[str, str]:
        """Settings that must be the same when a run is continued: all but the budget and the monitoring."""
        fixed = replace(
            self.options,
            max_tokens=1,
            time_limit_minutes=None,
            log_every_s=1,
            checkpoint_every_s=1,
            evaluate_every_minutes=None,
            evaluate_every_steps=None,
            patience=0,
        )
        values = {**self.made_with, **asdict(fixed)}
        return {name: json.dumps(value, default=_name, sort_keys=True) for name, value in values.items()}


@dataclass
class _Window:
    """Means of metrics over several steps."""

    num_steps: int = 0
    num_tokens: int = 0
    began_s: float = field(default_factory=time.monotonic)
    _sums: dict[str, list[float]] = field(default_factory=dict)

    def add(self, loss: float, metrics: Mapping[str, float], num_tokens: int) -> None:
        self.num_steps += 1
        self.num_tokens += num_tokens
        for name, value in {"loss": loss, **metrics}.items():
            self._sums.setdefault(name, []).append(value)

    def means(self) -> dict[str, float]:
        return {name: sum(values) / len(values) for name, values in self._sums.items()}


def make_optimizers(module: nn.Module, vocab_size: int, options: TrainOptions) -> list[torch.optim.Optimizer]:
    """AdamW for all trained weights; with `optimizer` muon, Muon for matrices without a vocabulary dimension."""
    named = {name: weight for name, weight in module.named_parameters() if weight.requires_grad}
    learning = list(named.values())
    if not learning:
        raise ConfigError("the student has no weights that learn")
    optimizers: list[torch.optim.Optimizer] = []
    if options.optimizer == "muon":
        # A pruned vocabulary may have the size of a layer, so its parts are known by their names.
        matrices = [
            weight
            for name, weight in named.items()
            if weight.ndim == 2 and vocab_size not in weight.shape and not _OF_VOCABULARY.search(name)
        ]
        taken = set(map(id, matrices))
        learning = [weight for weight in learning if id(weight) not in taken]
        if matrices:
            optimizers.append(Muon(matrices, options.muon_learning_rate, dtype=getattr(torch, options.dtype)))
    if learning:
        adamw = torch.optim.AdamW(
            learning,
            options.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=options.weight_decay,
            fused=True,  # one pass over the weights instead of ten
        )
        optimizers.append(adamw)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["highest_lr"] = group["lr"]
    return optimizers


def _where(progress: Progress) -> dict[str, Any]:
    return {
        "step": progress.step,
        "tokens": progress.tokens,
        "epoch": progress.cursor.epoch,
        "elapsed_s": round(progress.elapsed_s, 1),
    }


def _forget_after(file: Path, step: int) -> None:
    """Cut the log after the checkpoint's step, since later steps are repeated."""
    journal = Journal(file)
    journal.close()
    try:
        kept = [row for row in journal.rows if row["step"] <= step]
    except KeyError:
        raise RequestError(f"{file} is not the log of a training run; choose another --output") from None
    _write(file, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept))


def _write(file: Path, text: str) -> None:
    partial = file.with_name(f"{file.name}.{os.getpid()}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(file)


def _without_folders(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with folders removed from texts, also inside mappings."""
    return {
        name: _without_folders(value)
        if isinstance(value, Mapping)
        else without_folders(value)
        if isinstance(value, str)
        else value
        for name, value in values.items()
    }


def _name(path: Path) -> str:
    """The last part of a path, so that published models name no local folders."""
    return path.name
