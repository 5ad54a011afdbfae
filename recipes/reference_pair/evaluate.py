"""Measure a checkpoint: loss on the validation conversations, and how its greedy answers end."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedTokenizerBase

from slipstream.train.batches import pack

from .data import Conversation, repeats, to_pieces
from .model import load_model, to_batch, token_losses

MAX_NEW_TOKENS = 256


def by_task(conversations: Sequence[Conversation]) -> dict[str, list[Conversation]]:
    """Group conversations, tasks in alphabetical order."""
    tasks = sorted({c["task"] for c in conversations})
    return {task: [c for c in conversations if c["task"] == task] for task in tasks}


@torch.inference_mode()
def losses(
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[Conversation],
    device: torch.device,
    row_length: int = 1024,
    batch_rows: int = 8,
) -> dict[str, dict[str, float]]:
    """Nats a token, overall and by task, over all tokens and over the assistant's own; float32."""
    model = load_model(folder).to(device).eval()
    sums: dict[str, np.ndarray] = {}
    for task, part in by_task(conversations).items():
        pieces = to_pieces(part, tokenizer, row_length)
        rows = pack(pieces, row_length, tokenizer.pad_token_id, np.random.default_rng(0))
        total = np.zeros(4)  # loss and tokens of all, loss and tokens of answers
        for start in range(0, len(rows.tokens), batch_rows):
            chunk = rows.take(slice(start, start + batch_rows))
            batch = to_batch(chunk, device, torch.float32)
            loss = token_losses(model, batch, torch.float32)
            answer = batch.is_answer & (batch.labels >= 0)
            total += [
                float(loss.sum()),
                int((batch.labels >= 0).sum()),
                float(loss[answer].sum()),
                int(answer.sum()),
            ]
        sums[task] = total
    sums = {"overall": sum(sums.values(), np.zeros(4)), **sums}
    return {
        task: {"loss_nats": s[0] / s[1], "answer_loss_nats": s[2] / s[3], "num_tokens": int(s[1])}
        for task, s in sums.items()
    }


def greedy_answers(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], batch_size: int = 32
) -> list[list[int]]:
    """Greedy answers, at most `MAX_NEW_TOKENS` long with the closing <|end|>, to single user messages."""
    answers: list[list[int]] = []
    for start in range(0, len(prompts), batch_size):
        texts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
            )
            for prompt in prompts[start : start + batch_size]
        ]
        inputs = tokenizer(
            texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False
        ).to(model.device)
        output = model.generate(**inputs, do_sample=False, max_new_tokens=MAX_NEW_TOKENS)
        for row in output[:, inputs["input_ids"].shape[1] :].tolist():
            ended = row.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in row else len(row)
            answers.append(row[:ended])
    return answers


@torch.inference_mode()
def endings(
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[Conversation],
    device: torch.device,
    prompts_per_task: int,
) -> dict[str, dict[str, float]]:
    """How greedy answers to the first user message end, overall and by task, as shares of the prompts.

    `unfinished_rate`: no <|end|> within 256 tokens; `loop_rate`: a run of 16 tokens occurs three times or
    more; `reference_loop_rate`: the same of the first 256 tokens of the data's own answers, for comparison.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    end = tokenizer.eos_token_id
    rows: dict[str, list[tuple[bool, bool, bool, int]]] = {}
    for task, part in by_task(conversations).items():
        part = part[:prompts_per_task]
        answers = greedy_answers(model, tokenizer, [c["messages"][0]["content"] for c in part])
        references = tokenizer([c["messages"][1]["content"] for c in part], add_special_tokens=False)[
            "input_ids"
        ]
        rows[task] = [
            (answer[-1] != end, repeats(answer), repeats(reference[:MAX_NEW_TOKENS]), len(answer))
            for answer, reference in zip(answers, references, strict=True)
        ]
    rows = {"overall": [row for part in rows.values() for row in part], **rows}
    names = ("unfinished_rate", "loop_rate", "reference_loop_rate", "mean_answer_tokens")
    return {
        task: {**dict(zip(names, np.mean(part, axis=0).tolist(), strict=True)), "num_prompts": len(part)}
        for task, part in rows.items()
    }


def evaluate(
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    valid: Sequence[Conversation],
    test: Sequence[Conversation],
    device: str = "cpu",
    prompts_per_task: int = 24,
) -> dict[str, Any]:
    """Both measurements of one checkpoint, ready for JSON."""
    place = torch.device(device)
    return {
        "validation": losses(folder, tokenizer, valid, place),
        "greedy_endings": endings(folder, tokenizer, test, place, prompts_per_task),
    }
