"""Several hundred asynchronous requests, a third of them left in the middle: who stays gets the lone answer."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from slipstream import LLM, AsyncEngine, SamplingParams
from slipstream.assets import EMBEDDED_DRAFT
from tests.kit.engines import MakeLLM

DRAFT = {"method": "draft_model", "model": EMBEDDED_DRAFT}
NUM_REQUESTS = 700
NUM_KINDS = 40
"""Different requests: each is answered once alone, for reference."""

Kind = tuple[list[int], SamplingParams, str]


def some_kind(rng: random.Random, prompts: list[list[int]]) -> Kind:
    prompt = rng.choice(prompts)[: rng.randint(1, 120)]
    params = SamplingParams(
        temperature=rng.choice([0.0, 0.8]),
        seed=rng.randrange(2**40),
        max_tokens=rng.randint(1, 20),
        n=rng.choice([1, 1, 1, 2]),
        structured=rng.choice([None, None, None, {"regex": "[a-z ]{4,30}"}]),
    )
    return prompt, params, rng.choice(["", "a", "b"])


@pytest.mark.long
@pytest.mark.parametrize(
    "spec",
    [DRAFT, {"method": "auto", "drafters": [{"method": "suffix"}, DRAFT]}],
    ids=["draft_model", "auto"],
)
def test_who_stays_gets_the_lone_answer(
    make_llm: MakeLLM, plain: LLM, prompts: list[list[int]], spec: dict[str, Any]
) -> None:
    rng = random.Random(3)
    kinds = [some_kind(rng, prompts) for _ in range(NUM_KINDS)]
    lone = [plain.generate(prompt, params)[0].outputs for prompt, params, _ in kinds]
    llm = make_llm(spec, kv_cache_bytes=12 * 2**20, max_model_len=512, max_num_seqs=16)
    jobs = [(rng.randrange(NUM_KINDS), rng.random(), rng.randrange(3)) for _ in range(NUM_REQUESTS)]
    gate = asyncio.Semaphore(48)

    async def one(engine: AsyncEngine, number: int, way: float, how: int) -> bool:
        """True where the answer was read to its end; it may be left by breaking off, by `abort` or by cancelling."""
        prompt, params, tenant = kinds[number]
        received: dict[int, list[int]] = {index: [] for index in range(params.n)}
        async with gate:
            stream = engine.stream(prompt, params, tenant=tenant, request_id=f"{id(received)}")
            leaves_after = way * 30 if way < 0.34 else 10_000.0
            ended = False
            async for update in stream:
                received[update.index].extend(update.token_ids)
                if update.output is not None:
                    ended = update.finish_reason != "abort"
                if sum(map(len, received.values())) >= leaves_after:
                    if how == 0:
                        await engine.abort(f"{id(received)}")
                        continue
                    await stream.aclose()
                    break
        for index, token_ids in received.items():
            whole = list(lone[number][index].token_ids)
            assert token_ids == (whole if ended else whole[: len(token_ids)])
        return ended

    async def main() -> list[bool]:
        async with AsyncEngine(engine=llm.engine) as engine:
            ended = await asyncio.gather(*(one(engine, *job) for job in jobs))
            await asyncio.wait_for(engine.idle(), 120)
            return ended

    ended = asyncio.run(main())
    assert llm.engine.integrity() == []
    assert llm.engine.stats().num_draft_failures == 0
    assert NUM_REQUESTS * 0.6 < sum(ended) < NUM_REQUESTS * 0.95
