"""Answers by the thousand from an engine that has a fault, or none."""

from __future__ import annotations

import random
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import nullcontext
from dataclasses import replace

from benchmarks.audit.faults import Answered, Fault
from slipstream import LLM
from slipstream.assets import EMBEDDED_TARGET, sample_prompts
from slipstream.models import load_tokenizer
from slipstream.sampling.params import SamplingParams
from slipstream.text.prompts import encode_chat

MAX_TOKENS = 64
PLAIN = SamplingParams(temperature=0.8, max_tokens=MAX_TOKENS)
NUCLEUS = SamplingParams(temperature=0.8, top_p=0.9, max_tokens=MAX_TOKENS)
GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
KV_BYTES = 700_000_000
"""More than 64 answers with their prompts need, for target and draft."""
CHUNK = 50
"""Answers that are made at once at most."""
EARLY = (5, 30)
"""The first ones are made in smaller parts: an audit that has found its fault needs no more."""
_SEED_STEP = 1_000_003


class Service:
    """One engine and what stands in front of it."""

    def __init__(self, fault: Fault | None) -> None:
        """None is the engine without speculation."""
        self._fault = fault
        options = {} if fault is None else fault.engine
        speculation = None if fault is None else fault.speculation
        self.llm = LLM(
            speculative_config=speculation, max_num_seqs=64, kv_cache_bytes=KV_BYTES, seed=1, **options
        )

    def answers(
        self, prompts: Seq[Seq[int]], params: Seq[SamplingParams], seed: int, numbers: range
    ) -> list[Answered]:
        """The answers of these numbers, prompts and parameters in turn: number i to prompt i mod prompts, all prompts
        with one set of parameters before the next. Number i has the seed (seed, i) whoever answers."""
        asked = []
        for number in numbers:
            lap, place = divmod(number, len(prompts))
            asked.append((place, replace(params[lap % len(params)], seed=seed * _SEED_STEP + number)))
        chances = [random.Random(f"{seed} {number}") for number in numbers]
        served = [(prompts[place], one) for place, one in asked]
        if self._fault is not None:
            served = [self._fault.before(each, chance) for each, chance in zip(served, chances, strict=True)]
        with nullcontext() if self._fault is None else self._fault.during():
            outputs = self.llm.generate(
                [list(prompt) for prompt, _ in served], [one for _, one in served], use_tqdm=False
            )
        answers = []
        for (place, one), output, chance in zip(asked, outputs, chances, strict=True):
            said = output.outputs[0]
            answer = Answered(place, one, said.token_ids, str(said.finish_reason), len(said.token_ids))
            answers.append(answer if self._fault is None else self._fault.after(answer, chance))
        return answers

    def stream(
        self, prompts: Seq[Seq[int]], params: Seq[SamplingParams], seed: int, num: int, first: int = 0
    ) -> Iterator[Answered]:
        """Numbers `first` to `num` of them, made as they are asked for."""
        for numbers in chunks(first, num):
            yield from self.answers(prompts, params, seed, numbers)


def chunks(first: int, num: int) -> Iterator[range]:
    """The numbers from `first` to `num` in the parts in which they are answered; part ends do not depend on `first`."""
    ends = [end for end in (*EARLY, *range(CHUNK, num, CHUNK), num) if first < end <= num]
    for start, end in zip((first, *ends), ends, strict=False):
        yield range(start, end)


def prompts(num: int) -> list[list[int]]:
    """The first `num` bundled held-out prompts, tasks in turn, as the embedded target reads them."""
    tokenizer = load_tokenizer(EMBEDDED_TARGET)
    return [encode_chat(tokenizer, row["messages"]) for row in sample_prompts()[:num]]
