"""`Engine.stats` is what those outside of the engine read of it: nobody reaches into its parts."""

from __future__ import annotations

import ast
import asyncio
from collections.abc import Sequence as Seq
from pathlib import Path

import pytest

import slipstream
from slipstream import AsyncEngine, SamplingParams
from slipstream.core.proposal import Proposal
from slipstream.core.sequence import Sequence
from slipstream.errors import EngineStoppedError
from slipstream.testing.stub_drafters import OracleDrafter
from tests.kit.engines import MakeLLM

PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PARTS = {"runner", "scheduler", "drafting", "drafter"}
"""Attributes of an `Engine` that belong to its own room."""


class FailingDrafter(OracleDrafter):
    """Raises whenever it is asked."""

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Proposal]:
        raise ValueError("it fails")


def test_stats_of_a_queue(make_llm: MakeLLM, prompts: list[list[int]]) -> None:
    engine = make_llm({"method": "ngram"}, max_num_seqs=2).engine
    for number in range(3):
        engine.add_request(str(number), prompts[number][:40], PARAMS)
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_held_slots, stats.cache_usage) == (0, 3, 0, 0)
    assert stats.num_slots == engine.memory_plan.num_slots
    assert stats.cache_bytes == engine.memory_plan.kv_bytes
    engine.step()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_drafted_sequences) == (2, 1, 2)
    assert stats.num_held_slots >= 80
    assert stats.cache_usage == stats.num_held_slots / stats.num_slots > 0
    while engine.has_unfinished:
        engine.step()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_held_slots) == (0, 0, 0)
    assert stats.num_drafted_sequences == 0
    assert stats.num_retained_slots >= 80
    assert (stats.num_preemptions, stats.num_draft_failures, stats.retired_drafters) == (0, 0, ())
    engine.reset_caches()
    assert engine.stats().num_retained_slots == 0


@pytest.mark.parametrize("group", ["cascade", "ensemble"])
def test_stats_of_a_group_around_an_auto_with_one_drafter(make_llm: MakeLLM, group: str) -> None:
    inner = {"method": "auto", "drafters": [{"method": "ngram"}]}
    whole = (
        {"model": "embedded", "draft": inner}
        if group == "cascade"
        else {"members": [inner, {"method": "suffix"}]}
    )
    llm = make_llm({"method": group, **whole})
    llm.generate("Write a SQL query.", PARAMS)
    assert llm.engine.stats().num_drafted_sequences == 0


def test_preemptions_are_counted_and_preempted_answers_wait(
    make_llm: MakeLLM, prompts: list[list[int]]
) -> None:
    per_token = make_llm().engine.model.kv_bytes_per_token
    llm = make_llm(kv_cache_bytes=330 * per_token, max_model_len=220)
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    for number in range(3):
        llm.engine.add_request(str(number), prompts[number][:60], params)
    most_waiting = 0
    counted = 0
    while llm.engine.has_unfinished:
        for update in llm.engine.step():
            counted += update.output.metrics.num_preemptions if update.output else 0
        most_waiting = max(most_waiting, llm.engine.stats().num_waiting)
    assert llm.engine.stats().num_preemptions == counted > 0
    assert most_waiting > 0


def test_failures_of_a_drafter_are_counted_and_it_is_named_once_retired(
    make_llm: MakeLLM, prompts: list[list[int]]
) -> None:
    method = f"{__name__}:FailingDrafter"
    llm = make_llm({"method": method})
    llm.generate(prompts[0][:8], PARAMS)
    assert (llm.engine.stats().num_draft_failures, llm.engine.stats().retired_drafters) == (1, ())
    llm.generate([prompt[:8] for prompt in prompts[:20]], PARAMS)
    assert llm.engine.stats().num_draft_failures > 1
    assert llm.engine.stats().retired_drafters == (method,)


def test_the_async_engine_gives_them_between_steps(make_llm: MakeLLM, prompts: list[list[int]]) -> None:
    llm = make_llm()

    async def main() -> None:
        engine = AsyncEngine(engine=llm.engine)
        stream = engine.stream(prompts[0][:8], SamplingParams(max_tokens=64, ignore_eos=True))
        await anext(stream)
        assert (await engine.stats()).num_running == 1
        await stream.aclose()  # type: ignore[attr-defined]
        await engine.idle()
        assert (await engine.stats()).num_running == 0
        await asyncio.to_thread(engine.close)
        with pytest.raises(EngineStoppedError):
            await engine.stats()

    asyncio.run(main())


def test_nobody_outside_of_the_room_reaches_into_the_engines_parts() -> None:
    package = Path(slipstream.__file__).parent
    found = [
        f"{file.relative_to(package)}:{node.lineno} {ast.unparse(node)}"
        for file in package.rglob("*.py")
        if package / "engine" not in file.parents
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in PARTS and _is_engine(node.value)
    ]
    assert found == []


def _is_engine(node: ast.expr) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name.strip("_") in ("engine", "inner")
