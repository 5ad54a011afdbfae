"""The target's own answers, in batches of hundreds: half of them greedy, half drawn at temperature 0.8."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recipes.smollm2_head.target import Target

TEMPERATURE = 0.8
"""Of every second prompt; the others are answered greedily."""
_EXACT_CANDIDATES = 8
"""How many of the best tokens of a 16-bit output layer are compared again in float32."""
_PART = 64
"""Neighbouring prompts that one process takes."""
_COMPACT = 0.125
"""Texts that have ended are taken out of a batch once they are so large a share of it."""


@dataclass
class _Text:
    index: int
    prompt: list[int]
    is_greedy: bool


def write_answers(
    target: Target,
    prompts: list[list[int]],
    file: Path,
    *,
    batch: int,
    max_tokens: int,
    minutes: float,
    part: tuple[int, int] = (0, 1),
) -> None:
    """Append a line an answer to `file`, as `slipstream train` reads them: `token_ids` of prompt and answer, and
    `answer_spans`; also `index` of the prompt, and whether it was answered greedily.

    Prompts that have an answer there are left out, and of the rest each of several processes takes its `part`, (number,
    of how many). A new batch begins until `minutes` are over.
    """
    began = time.monotonic()
    done = {row["index"] for row in read_rows(file)}
    number, of = part
    mine = [at for at in range(len(prompts)) if at // _PART % of == number]
    texts = [_Text(at, prompts[at], at % 2 == 0) for at in mine if at not in done]
    num_tokens, finished = 0, len(done)
    with file.open("a", encoding="utf-8") as out:
        for texts_of_batch in _batches(texts, batch):
            if time.monotonic() - began > 60 * minutes:
                break
            torch.manual_seed(texts_of_batch[0].index)
            for text, token_ids in _answer(target, texts_of_batch, max_tokens):
                whole = text.prompt + token_ids
                row = {"index": text.index, "greedy": text.is_greedy, "token_ids": whole}
                row["answer_spans"] = [[len(text.prompt), len(whole)]]
                out.write(json.dumps(row) + "\n")
                num_tokens, finished = num_tokens + len(token_ids), finished + 1
            out.flush()
            rate = num_tokens / (time.monotonic() - began)
            print(f"{finished:,} of {len(mine):,} answers, {rate:,.0f} tokens a second", flush=True)


def read_rows(file: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a file of answers, which may not exist; a process that was stopped leaves a half one."""
    if file.exists():
        with file.open(encoding="utf-8") as lines:
            for line in lines:
                if line.endswith("\n"):
                    yield json.loads(line)


def _batches(texts: list[_Text], batch: int) -> Iterator[list[_Text]]:
    """Batches of prompts of about one length, from chunks that keep the order of the file."""
    chunk = 16 * batch
    for begin in range(0, len(texts), chunk):
        some = sorted(texts[begin : begin + chunk], key=lambda text: len(text.prompt))
        yield from (some[at : at + batch] for at in range(0, len(some), batch))


@torch.inference_mode()
def _answer(target: Target, texts: list[_Text], max_tokens: int) -> list[tuple[_Text, list[int]]]:
    longest = max(len(text.prompt) for text in texts)
    cache = target.new_cache(len(texts), longest + max_tokens)
    token_ids = torch.zeros(len(texts), longest, dtype=torch.long)
    for row, text in enumerate(texts):
        token_ids[row, longest - len(text.prompt) :] = torch.tensor(text.prompt)
        cache.seen[row, longest - len(text.prompt) :] = True
    lengths = torch.tensor([len(text.prompt) for text in texts], device=target.device)
    positions = torch.arange(longest, device=target.device) - (longest - lengths[:, None])
    states = target.forward(token_ids.to(target.device), positions.clamp(min=0), cache)
    states = states[:, -1]
    greedy = torch.tensor([text.is_greedy for text in texts], device=target.device)
    alive = torch.arange(len(texts), device=target.device)
    written = torch.zeros(len(texts), max_tokens, dtype=torch.long, device=target.device)
    ends = torch.full((len(texts),), max_tokens, device=target.device)
    for step in range(max_tokens):
        chosen = _choose(target, states, greedy[alive])
        written[alive, step] = chosen
        ended = chosen == target.eos_token_id
        ends[alive] = torch.where(ended, ends[alive].clamp(max=step + 1), ends[alive])
        going = ends[alive] > step + 1
        if step + 1 == max_tokens or not going.any():
            break
        if (~going).float().mean() >= _COMPACT:
            rows = going.nonzero()[:, 0]
            cache.keep(rows)
            alive, chosen = alive[rows], chosen[rows]
        cache.seen[:, cache.length] = True
        states = target.forward(chosen[:, None], (lengths[alive] + step)[:, None], cache)
        states = states[:, 0]
    answers = written.cpu().numpy()
    return [(text, answers[row, : int(ends[row])].tolist()) for row, text in enumerate(texts)]


def _choose(target: Target, states: Tensor, greedy: Tensor) -> Tensor:
    """[B, hidden] -> the next tokens [B]"""
    logits = target.logits(states)
    # Several tokens can share the highest logit of 16 bits.
    best = logits.topk(_EXACT_CANDIDATES, dim=-1).indices
    exact = torch.einsum("bh,bch->bc", states.float(), target.embedding[best].float())
    chosen = best.gather(1, exact.argmax(-1, keepdim=True))[:, 0]
    drawn = (~greedy).nonzero()[:, 0]
    if len(drawn):
        below = torch.softmax(logits[drawn].float() / TEMPERATURE, dim=-1).cumsum(-1)
        heights = torch.rand(len(drawn), 1, device=logits.device) * below[:, -1:]
        last = logits.shape[1] - 1
        chosen[drawn] = torch.searchsorted(below, heights)[:, 0].clamp(max=last)
    return chosen


def read_prompts(file: Path) -> list[list[int]]:
    """The token ids of all prompts in an .npz file of `prompts`."""
    with np.load(file) as data:
        return [part.tolist() for part in np.split(data["token_ids"], data["ends"][:-1])]
