"""Train one model of the pair; stopped at any step and started again, it goes on as if never stopped."""

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from slipstream.train.batches import TrainingRows, pack
from slipstream.train.muon import Muon

from .data import Piece, RecipeError, mix_pieces
from .model import SHAPES, build_model, load_model, to_batch, token_losses


@dataclass(frozen=True)
class TrainConfig:
    """What a run depends on. Its budget is tokens, time, or both: the nearer to spent sets the schedule."""

    name: str  # a key of SHAPES
    init: Path | None = None  # checkpoint folder to continue from; fresh weights where None
    max_tokens: int | None = None
    time_limit_minutes: float | None = None
    batch_rows: int = 12
    row_length: int = 512
    muon_lr: float = 0.02
    adam_lr: float = 0.004
    warmup_fraction: float = 0.02  # of the budget; then constant
    hold_fraction: float = 0.5  # from here on linear to zero
    user_weight: float = 0.5  # loss weight of tokens that the assistant did not write
    mix: dict[str, float] = field(default_factory=dict)  # task to copies of each conversation an epoch
    dtype: str = "float32"  # of matrix products; weights stay float32
    device: str = "cpu"
    seed: int = 0
    log_every_s: float = 30.0
    checkpoint_every_s: float = 180.0

    def __post_init__(self) -> None:
        if self.max_tokens is None and self.time_limit_minutes is None:
            raise RecipeError("a run needs a budget: give --max-tokens, --time-limit-minutes or both")


@dataclass
class Progress:
    """Where a run stands; with the weights and the optimizers' state this is the whole checkpoint."""

    step: int = 0
    tokens: int = 0  # trained on, padding not counted
    elapsed_s: float = 0.0  # in training, summed over restarts
    epoch: int = 0
    row: int = 0  # first row of the epoch not yet trained on

    def fraction(self, config: TrainConfig) -> float:
        """Share of the budget that is spent, 0 to 1."""
        by_tokens = self.tokens / config.max_tokens if config.max_tokens else 0.0
        by_time = self.elapsed_s / (60 * config.time_limit_minutes) if config.time_limit_minutes else 0.0
        return min(1.0, max(by_tokens, by_time))


def learning_rate_factor(fraction: float, warmup: float, hold: float) -> float:
    """Warm-up from 5 %, constant, linear to zero, over the fraction of the budget that is spent."""
    return min(1.0, 0.05 + 0.95 * fraction / warmup, (1.0 - fraction) / (1.0 - hold))


def epoch_rows(pieces: list[Piece], config: TrainConfig, pad: int, epoch: int) -> TrainingRows:
    """The rows of one epoch: the same for the same seed and epoch, so a checkpoint need not hold them."""
    rng = np.random.default_rng([config.seed, epoch])
    return pack(mix_pieces(pieces, config.mix, rng), config.row_length, pad, rng)


def batches(pieces: list[Piece], config: TrainConfig, pad: int, progress: Progress) -> Iterator[TrainingRows]:
    """Batches from where `progress` stands, epoch after epoch; moves `progress` past each batch it yields."""
    while True:
        rows = epoch_rows(pieces, config, pad, progress.epoch)
        while progress.row + config.batch_rows <= len(rows.tokens):
            span = slice(progress.row, progress.row + config.batch_rows)
            progress.row = span.stop
            yield rows.take(span)
        if len(rows.tokens) < config.batch_rows:
            raise RecipeError(
                f"the data fill {len(rows.tokens)} rows of {config.row_length} tokens, too few for a batch of "
                f"{config.batch_rows}; lower --batch-rows or --row-length"
            )
        progress.epoch, progress.row = progress.epoch + 1, 0


def make_optimizers(model: LlamaForCausalLM, config: TrainConfig) -> tuple[Muon, torch.optim.AdamW]:
    """Muon on the layers' matrices, AdamW on the embedding and the norms."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    taken = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in taken]
    muon = Muon(matrices, lr=config.muon_lr, dtype=getattr(torch, config.dtype))
    return muon, torch.optim.AdamW(rest, lr=config.adam_lr, betas=(0.9, 0.95), weight_decay=0.0)


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write in one move, so that being killed half-way leaves the checkpoint before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    partial.replace(path)


def log(config: TrainConfig, progress: Progress, tokens_per_s: float, loss: float, factor: float) -> None:
    """One line to stderr. `loss` is in nats a token since the last line, with every token counted alike."""
    spent = progress.fraction(config)
    eta_min = progress.elapsed_s * (1 / spent - 1) / 60
    print(
        f"{time.strftime('%H:%M:%S')} {config.name} step {progress.step} {spent:6.1%} epoch {progress.epoch} "
        f"{progress.tokens:,} tokens {tokens_per_s:,.0f} tokens/s loss {loss:.3f} lr x{factor:.2f} "
        f"eta {eta_min:.0f} min",
        file=sys.stderr,
        flush=True,
    )


def train(
    config: TrainConfig,
    pieces: list[Piece],
    tokenizer: PreTrainedTokenizerBase,
    checkpoint: Path,
    stop: Callable[[Progress], bool] = lambda progress: False,
) -> tuple[LlamaForCausalLM, Progress]:
    """Train until the budget is spent or `stop` says so, from `checkpoint` where that file exists.

    Returns the float32 model and where it stands. On one machine, with a budget in tokens, an interrupted and
    resumed run ends with the very weights of an uninterrupted one.
    """
    device, dtype = torch.device(config.device), getattr(torch, config.dtype)
    torch.manual_seed(config.seed)
    model = load_model(config.init) if config.init else build_model(SHAPES[config.name], tokenizer)
    model.to(device).train()
    optimizers = make_optimizers(model, config)
    progress = Progress()
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        progress = Progress(**state["progress"])

    def save() -> None:
        optimizer_states = [optimizer.state_dict() for optimizer in optimizers]
        saved = {"model": model.state_dict(), "optimizers": optimizer_states, "progress": asdict(progress)}
        save_checkpoint(checkpoint, saved)

    clock = logged = saved_at = time.monotonic()
    loss_sum, loss_count, logged_tokens = 0.0, 0, progress.tokens
    stream = batches(pieces, config, tokenizer.pad_token_id, progress)
    while (fraction := progress.fraction(config)) < 1.0 and not stop(progress):
        factor = learning_rate_factor(fraction, config.warmup_fraction, config.hold_fraction)
        for optimizer, lr in zip(optimizers, (config.muon_lr, config.adam_lr), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = lr * factor

        batch = to_batch(next(stream), device, dtype)
        has_label = batch.labels >= 0
        weights = torch.where(batch.is_answer, 1.0, config.user_weight) * has_label
        losses = token_losses(model, batch, dtype)
        ((losses * weights).sum() / weights.sum()).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

        num_tokens = int(has_label.sum())
        loss_sum, loss_count = loss_sum + float(losses.detach().sum()), loss_count + num_tokens
        now = time.monotonic()
        progress.step += 1
        progress.tokens += num_tokens
        progress.elapsed_s, clock = progress.elapsed_s + now - clock, now
        if now - logged >= config.log_every_s:
            tokens_per_s = (progress.tokens - logged_tokens) / (now - logged)
            log(config, progress, tokens_per_s, loss_sum / loss_count, factor)
            loss_sum, loss_count, logged, logged_tokens = 0.0, 0, now, progress.tokens
        if now - saved_at >= config.checkpoint_every_s:
            save()
            saved_at = now
    save()
    return model, progress
