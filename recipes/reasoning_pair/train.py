"""Train one model of the pair; stopped at any step and started again, it goes on where it was."""

import itertools
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from slipstream.train.muon import Muon

from .problems import DRAFT_WRITER, TARGET_WRITER, Example, Writer, examples
from .tokenizer import MAX_POSITIONS

LOG_EVERY_S = 20.0
SAVE_EVERY_S = 60.0


@dataclass(frozen=True)
class Plan:
    """One model: its shape, how it writes, how much it learns. `check_share` is the share of texts that ask whether a
    step is right."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    writer: Writer
    check_share: float
    num_steps: int
    batch_rows: int = 24
    muon_lr: float = 0.02
    adam_lr: float = 0.005
    hold_fraction: float = 0.5
    """Of the steps; from there the rate falls to zero."""
    seed: int = 0


PLANS = {
    "target": Plan(4, 96, 256, 3, TARGET_WRITER, 0.3, 2400),
    "draft": Plan(2, 64, 192, 2, DRAFT_WRITER, 0.0, 1200, seed=1),
}


@dataclass(frozen=True)
class Batch:
    """Padded rows; `labels` are the next tokens, -100 where none counts."""

    token_ids: torch.Tensor
    """int64 [B, T]"""
    labels: torch.Tensor
    """int64 [B, T]"""


def build_model(plan: Plan, tokenizer: PreTrainedTokenizerBase) -> LlamaForCausalLM:
    """A float32 Llama of this shape with fresh weights from torch's global generator."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=plan.hidden_size,
            intermediate_size=plan.intermediate_size,
            num_hidden_layers=plan.num_layers,
            num_attention_heads=plan.num_heads,
            max_position_embeddings=MAX_POSITIONS,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def to_batch(tokenizer: PreTrainedTokenizerBase, rows: list[Example]) -> Batch:
    """Tokenized rows; a text ends with the end token, and tokens that begin before `Example.begin` do not count."""
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    encoded = tokenizer([row.text for row in rows], return_offsets_mapping=True)
    tokens = [[*ids, end] for ids in encoded["input_ids"]]
    width = max(map(len, tokens))
    token_ids = torch.full((len(rows), width), pad)
    labels = torch.full((len(rows), width), -100)
    for number, (row, ids, offsets) in enumerate(zip(rows, tokens, encoded["offset_mapping"], strict=True)):
        token_ids[number, : len(ids)] = torch.tensor(ids)
        first = sum(begin < row.begin for begin, _ in offsets)
        labels[number, first - 1 : len(ids) - 1] = torch.tensor(ids[first:])
    return Batch(token_ids, labels)


def batches(plan: Plan, tokenizer: PreTrainedTokenizerBase, done: int) -> Iterator[Batch]:
    """The batches from number `done` on."""
    stream = itertools.islice(
        examples(plan.seed, plan.writer, plan.check_share), done * plan.batch_rows, None
    )
    while True:
        yield to_batch(tokenizer, list(itertools.islice(stream, plan.batch_rows)))


def rate_factor(plan: Plan, step: int) -> float:
    """Warm-up over 20 steps, constant, then linear to zero."""
    left = (plan.num_steps - step) / (plan.num_steps * (1 - plan.hold_fraction))
    return min(1.0, (step + 1) / 20, left)


def train(plan: Plan, name: str, tokenizer: PreTrainedTokenizerBase, checkpoint: Path) -> LlamaForCausalLM:
    """The trained model; `checkpoint` is written every minute and gone on from where it exists."""
    torch.manual_seed(plan.seed)
    model = build_model(plan, tokenizer).train()
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    taken = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in taken]
    muon = Muon(matrices, lr=plan.muon_lr)
    optimizers = [muon, torch.optim.AdamW(rest, lr=plan.adam_lr, betas=(0.9, 0.95), weight_decay=0.0)]
    step, elapsed_s = 0, 0.0
    if checkpoint.exists():
        state: dict[str, Any] = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        step, elapsed_s = state["step"], state["elapsed_s"]
    started = logged = saved_at = time.monotonic()
    recent = list[float]()
    for batch in batches(plan, tokenizer, step):
        if step >= plan.num_steps:
            break
        factor = rate_factor(plan, step)
        for optimizer, rate in zip(optimizers, (plan.muon_lr, plan.adam_lr), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
        logits = model(input_ids=batch.token_ids, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), batch.labels.flatten(), ignore_index=-100)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        recent.append(float(loss.detach()))
        step += 1
        now = time.monotonic()
        if now - logged >= LOG_EVERY_S or step == plan.num_steps:
            _log(name, plan, step, sum(recent) / len(recent), elapsed_s + now - started)
            recent, logged = [], now
        if now - saved_at >= SAVE_EVERY_S or step == plan.num_steps:
            states = [optimizer.state_dict() for optimizer in optimizers]
            _save(
                checkpoint,
                {
                    "model": model.state_dict(),
                    "optimizers": states,
                    "step": step,
                    "elapsed_s": elapsed_s + now - started,
                },
            )
            saved_at = now
    return model.eval()


def provenance(plan: Plan) -> dict[str, Any]:
    """What the model was trained with, as JSON."""
    return asdict(plan)


def _log(name: str, plan: Plan, step: int, loss: float, seconds: float) -> None:
    left_min = seconds * (plan.num_steps / step - 1) / 60
    print(
        f"{time.strftime('%H:%M:%S')} {name} step {step} of {plan.num_steps} loss {loss:.4f} eta {left_min:.0f} min",
        file=sys.stderr,
        flush=True,
    )


def _save(path: Path, state: dict[str, Any]) -> None:
    """In one move, so that being killed half-way leaves the checkpoint before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    partial.replace(path)
