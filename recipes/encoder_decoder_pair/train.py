"""Train one model of a pair."""

from __future__ import annotations

import random
import sys
import time
from statistics import mean
from typing import Any

import torch
from torch import nn

from slipstream.train.muon import Muon

from .plans import Plan
from .records import Records
from .tones import Tones

Task = Records | Tones
TASKS: dict[str, type[Task]] = {"t5": Records, "whisper": Tones}
WARMUP_STEPS = 20
LOG_EVERY_S = 20.0
ENOUGH_BATCHES = 8
"""So many batches in a row."""


def rate_factor(plan: Plan, step: int) -> float:
    """Warm-up, constant, and linear to zero over the second half."""
    return min(1.0, (step + 1) / WARMUP_STEPS, 2 * (plan.num_steps - step) / plan.num_steps)


def train(task: Task, plan: Plan, name: str, seed: int = 0) -> Any:
    """The trained model, in float32."""
    torch.manual_seed(seed)
    rng = random.Random(f"{name} {seed}")
    model = task.model(plan.shape).train()
    optimizers = _optimizers(model, plan)
    logged, right = time.monotonic(), list[float]()
    for step in range(plan.num_steps):
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group.setdefault("full", group["lr"]) * rate_factor(plan, step)
        batch = task.batch(rng, plan.batch_size)
        output = model(**batch)
        output.loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        is_labelled = batch["labels"] >= 0
        right.append(float((output.logits.argmax(-1) == batch["labels"])[is_labelled].float().mean()))
        is_done = step + 1 == plan.num_steps or mean(right[-ENOUGH_BATCHES:]) >= plan.enough
        if is_done or time.monotonic() - logged >= LOG_EVERY_S:
            logged = time.monotonic()
            print(
                f"{time.strftime('%H:%M:%S')} {name} step {step + 1} of at most {plan.num_steps}: "
                f"loss {float(output.loss.detach()):.4f}, {right[-1]:.1%} of tokens",
                file=sys.stderr,
                flush=True,
            )
        if is_done:
            break
    return model.eval()


def _optimizers(model: Any, plan: Plan) -> list[torch.optim.Optimizer]:
    """Muon on the layers' matrices, AdamW on embeddings, convolutions and norms."""
    parts = (
        part
        for part in model.modules()
        if isinstance(part, nn.Linear) and part is not model.get_output_embeddings()
    )
    matrices: Any = [part.weight for part in parts]
    taken = {id(matrix) for matrix in matrices}
    rest = [each for each in model.parameters() if id(each) not in taken and each.requires_grad]
    return [
        Muon(matrices, lr=plan.muon_rate),
        torch.optim.AdamW(rest, lr=plan.adam_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]
