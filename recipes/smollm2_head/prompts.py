"""The prompts that the target answers: first turns of the data, without those that the evaluation asks."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.assets.workload.reading import Question
from slipstream.train.overlap import find_overlap

SHARES = {
    "chat": 13_500,
    "creative": 2_000,
    "code": 4_500,
    "math": 4_000,
    "howto": 2_000,
    "sql": 1_500,
    "api_call": 1_500,
}
"""The most conversations of each task. What people ask a chat model is taken whole."""
MOST_TOKENS = 512
"""Longer prompts are left out."""


def write_prompts(
    chat: Path, mbpp: Path, held_out: list[Question], tokenizer: Any, file: Path, seed: int = 0
) -> None:
    """Write an .npz file: `token_ids` one after another, and their `ends`."""
    texts = [row["messages"][0]["content"] for row in _chosen(chat, seed)]
    texts += [row["text"] for row in _lines(mbpp)]
    random.Random(seed).shuffle(texts)
    partial = file.with_suffix(".jsonl")
    with partial.open("w", encoding="utf-8") as out:
        for text in texts:
            out.write(json.dumps({"messages": [{"role": "user", "content": text}]}) + "\n")
    overlap = find_overlap(held_out, [partial], tokenizer)
    left_out = {int(where.rsplit(" ", 1)[1]) for where in overlap.conversations}
    print(overlap)
    prompts = []
    for line, text in enumerate(texts, 1):
        token_ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        if line not in left_out and len(token_ids) <= MOST_TOKENS:
            prompts.append(token_ids)
    ends = np.cumsum([len(prompt) for prompt in prompts])
    np.savez_compressed(file, token_ids=np.concatenate(prompts).astype(np.int32), ends=ends)
    partial.unlink()
    print(f"{len(prompts):,} prompts, {ends[-1]:,} tokens")


def _lines(file: Path) -> list[dict[str, Any]]:
    with file.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def _chosen(chat: Path, seed: int) -> list[dict[str, Any]]:
    by_task: dict[str, list[dict[str, Any]]] = {}
    for row in _lines(chat):
        if row["messages"][0]["role"] == "user":
            by_task.setdefault(row["task"], []).append(row)
    chosen = []
    for task, most in SHARES.items():
        rows = by_task.get(task, [])
        random.Random(f"{seed} {task}").shuffle(rows)
        chosen += rows[:most]
    return chosen
