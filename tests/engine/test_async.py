"""Many callers at once: every answer is its lone answer, and nothing is left behind."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
from collections import Counter
from typing import Any

import pytest
import torch

from slipstream import LLM, AsyncEngine, SamplingParams, Update
from slipstream.assets import EMBEDDED_DRAFT
from slipstream.engine.async_engine import EngineStoppedError
from slipstream.errors import RequestError
from slipstream.sampling.grammars.compiler import GrammarCompiler
from slipstream.text import prompts as inputs_module
from tests.kit.engines import MakeLLM

DRAFT = {"method": "draft_model", "model": EMBEDDED_DRAFT, "tree_top_k": 2, "num_draft_nodes": 6}


def test_a_hundred_requests_with_random_aborts(
    make_llm: MakeLLM, plain: LLM, prompts: list[list[int]]
) -> None:
    rng = random.Random(0)
    jobs = []
    for number in range(100):
        prompt = prompts[number % 20][: rng.randint(1, 120)]
        jobs.append((prompt, rng.randint(1, 24), rng.random() < 0.25))
    lone: dict[tuple[int, ...], list[int]] = {}
    for prompt, _, _ in jobs:
        if tuple(prompt) not in lone:
            params = SamplingParams(temperature=0, max_tokens=24)
            lone[tuple(prompt)] = plain.generate(prompt, params)[0].outputs[0].token_ids
    llm = make_llm(DRAFT)

    async def one(engine: AsyncEngine, prompt: list[int], max_tokens: int, leaves: bool) -> list[int] | None:
        await asyncio.sleep(rng.random() * 2)
        received: list[int] = []
        async for update in engine.stream(prompt, SamplingParams(temperature=0, max_tokens=max_tokens)):
            received.extend(update.token_ids)
            if leaves and len(received) >= max_tokens // 2:
                return None
        return received

    async def all_of_them() -> list[list[int] | None]:
        async with AsyncEngine(engine=llm.engine) as engine:
            answers = await asyncio.gather(*(one(engine, *job) for job in jobs))
            await asyncio.wait_for(engine.idle(), 120)
            assert llm.engine.integrity() == []
            return answers

    asyncio.run(all_of_them())  # a first round, so that the second meets warm buffers
    before = kept()
    answers = asyncio.run(all_of_them())
    grown = kept() - before
    survivors = 0
    for (prompt, max_tokens, _), answer in zip(jobs, answers, strict=True):
        if answer is not None:
            survivors += 1
            assert answer == lone[tuple(prompt)][:max_tokens]
    assert 60 < survivors < 100
    assert grown.pop(torch.Tensor, 0) < 40, "tensors, far fewer than requests"
    assert not grown, "what a request consists of"


def kept() -> Counter[type]:
    """How many tensors there are, and how many objects of each class that a request consists of; what the prefix cache
    keeps is not among them."""
    gc.collect()
    types = Counter(map(type, gc.get_objects()))
    rooms = tuple(f"slipstream.{room}." for room in ("core", "draft", "engine", "sampling", "text", "verify"))
    return Counter(
        {one: n for one, n in types.items() if one is torch.Tensor or str(one.__module__).startswith(rooms)}
    )


@pytest.mark.parametrize("interval_s", [0.0, 3600.0])
def test_stream_is_incremental_and_ends_with_the_whole_output(
    make_llm: MakeLLM, prompts: list[list[int]], interval_s: float
) -> None:
    async def main() -> list[Update]:
        async with AsyncEngine(engine=make_llm(DRAFT).engine, stream_interval_s=interval_s) as engine:
            params = SamplingParams(temperature=0.5, seed=1, n=2, max_tokens=10, ignore_eos=True, logprobs=1)
            return [update async for update in engine.stream(prompts[0], params)]

    updates = asyncio.run(main())
    if interval_s:  # the first tokens, each answer's last ones, and all else with the next of these
        assert len(updates) <= 6
    else:
        assert len(updates) >= 4
    output = updates[-1].output
    assert output is not None
    assert all(update.output is None for update in updates[:-1])
    for index in (0, 1):
        mine = [update for update in updates if update.index == index]
        answer = output.outputs[index]
        assert [t for update in mine for t in update.token_ids] == answer.token_ids
        assert "".join(update.text for update in mine) == answer.text
        assert [e for update in mine for e in update.logprobs or []] == answer.token_logprobs


def test_bad_requests_and_aborts_reach_their_caller_only(make_llm: MakeLLM, prompts: list[list[int]]) -> None:
    async def main() -> None:
        async with AsyncEngine(engine=make_llm().engine) as engine:
            good = asyncio.create_task(
                engine.generate(prompts[0], SamplingParams(max_tokens=20, ignore_eos=True))
            )
            with pytest.raises(RequestError, match="empty"):
                await engine.generate([])
            stream = engine.stream(
                prompts[1], SamplingParams(max_tokens=500, ignore_eos=True), request_id="x"
            )
            await anext(stream)
            await engine.abort("x")
            rest = [update async for update in stream]
            assert rest[-1].finish_reason == "abort"
            assert rest[-1].output is not None
            assert len((await good).outputs[0].token_ids) == 20

    asyncio.run(main())


def test_cancelled_task_frees_its_request(make_llm: MakeLLM, prompts: list[list[int]]) -> None:
    async def main() -> None:
        async with AsyncEngine(engine=make_llm().engine) as engine:
            task = asyncio.create_task(
                engine.generate(prompts[0], SamplingParams(max_tokens=1000, ignore_eos=True))
            )
            while not await engine.ask(lambda inner: inner.has_unfinished):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.wait_for(engine.idle(), 120)

    asyncio.run(main())


def test_a_closed_or_failed_engine_ends_its_streams(
    make_llm: MakeLLM, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main(engine: AsyncEngine) -> None:
        task = asyncio.create_task(
            engine.generate(prompts[0], SamplingParams(max_tokens=1000, ignore_eos=True))
        )
        while not await engine.ask(lambda inner: inner.has_unfinished):
            await asyncio.sleep(0)
        await asyncio.to_thread(engine.close)
        with pytest.raises(EngineStoppedError, match="closed"):
            await task
        with pytest.raises(EngineStoppedError, match="stopped"):
            await engine.generate(prompts[0])

    asyncio.run(main(AsyncEngine(engine=make_llm().engine)))

    async def failing(engine: AsyncEngine) -> None:
        with pytest.raises(EngineStoppedError, match="out of luck"):
            await engine.generate(prompts[0], SamplingParams(max_tokens=5))

    broken = make_llm().engine

    def fail(*_: object) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(broken.runner, "launch", fail)
    asyncio.run(failing(AsyncEngine(engine=broken)))


def test_a_cancelled_wait_for_idleness_harms_nobody(
    make_llm: MakeLLM, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm()
    step, may_step = llm.engine.step, threading.Event()
    monkeypatch.setattr(llm.engine, "step", lambda: (may_step.wait(120), step())[1])

    async def main() -> None:
        async with AsyncEngine(engine=llm.engine) as engine:
            params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
            task = asyncio.create_task(engine.generate(prompts[0], params))
            await asyncio.sleep(0)
            for _ in range(5):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(engine.idle(), 0.001)
            may_step.set()
            other = await engine.generate(prompts[1], SamplingParams(temperature=0, max_tokens=4))
            assert len(other.outputs[0].token_ids) <= 4
            assert len((await task).outputs[0].token_ids) == 60
            await asyncio.wait_for(engine.idle(), 120)

    asyncio.run(main())


def test_questions_are_answered_between_two_steps(make_llm: MakeLLM, prompts: list[list[int]]) -> None:
    llm = make_llm()

    async def main(engine: AsyncEngine) -> None:
        params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
        async for update in engine.stream(prompts[0], params):
            if update.output is None:
                assert await engine.ask(lambda inner: inner.integrity()) == []
                assert await engine.ask(lambda inner: inner.has_unfinished) in (True, False)
        with pytest.raises(ZeroDivisionError):
            await engine.ask(lambda inner: 1 / 0)
        assert not engine.has_stopped
        await asyncio.to_thread(engine.close)
        assert engine.has_stopped
        with pytest.raises(EngineStoppedError):
            await engine.ask(lambda inner: inner.has_unfinished)

    asyncio.run(main(AsyncEngine(engine=llm.engine)))


async def outcome(engine: AsyncEngine, prompt: list[int]) -> str:
    """What becomes of one request; a request that hangs is a failure."""
    try:
        await asyncio.wait_for(
            engine.generate(prompt, SamplingParams(temperature=0, max_tokens=2000, ignore_eos=True)), 120
        )
    except EngineStoppedError as error:
        return str(error)
    return "finished"


def test_whoever_comes_while_the_engine_closes_is_told(make_llm: MakeLLM, prompts: list[list[int]]) -> None:
    """Requests are posted all around the moment at which the engine is closed."""
    llm = make_llm()

    async def main(engine: AsyncEngine, delay: int) -> list[str]:
        tasks: list[asyncio.Task[str]] = []
        closing: asyncio.Task[None] | None = None
        for number in range(25):
            if number == delay:
                closing = asyncio.create_task(asyncio.to_thread(engine.close))
            tasks.append(asyncio.create_task(outcome(engine, prompts[number % 8])))
            await asyncio.sleep(0.0005 * (number % 3))
        assert closing is not None
        await closing
        engine.close()
        return list(await asyncio.gather(*tasks))

    for delay in (0, 5, 12, 24):
        ends = asyncio.run(main(AsyncEngine(engine=llm.engine), delay))
        assert all("the engine was closed" in end for end in ends)
        assert llm.engine.integrity() == []


def test_whoever_comes_while_the_engine_fails_is_told(
    make_llm: MakeLLM, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step fails only after more requests were posted behind it."""
    failing, posted = threading.Event(), threading.Event()
    llm = make_llm()

    def fail(*_: object) -> None:
        failing.set()
        posted.wait(120)
        raise RuntimeError("out of luck")

    monkeypatch.setattr(llm.engine.runner, "launch", fail)

    async def main(engine: AsyncEngine) -> list[str]:
        tasks = [asyncio.create_task(outcome(engine, prompts[0]))]
        await asyncio.to_thread(failing.wait, 120)
        tasks += [asyncio.create_task(outcome(engine, prompts[number])) for number in range(8)]
        idle = asyncio.create_task(engine.idle())
        await asyncio.sleep(0.02)
        posted.set()
        tasks.append(asyncio.create_task(outcome(engine, prompts[1])))
        with pytest.raises(EngineStoppedError):
            await asyncio.wait_for(idle, 120)
        ends = list(await asyncio.gather(*tasks))
        ends.append(await outcome(engine, prompts[2]))
        await asyncio.to_thread(engine.close)
        return ends

    ends = asyncio.run(main(AsyncEngine(engine=llm.engine)))
    assert len(ends) == 11
    assert all("out of luck" in end for end in ends)


@pytest.mark.parametrize(
    ("prompt", "arguments", "says"),
    [
        ([5], {"max_draft_tokens": "3"}, "max_draft_tokens"),
        ([5], {"max_draft_tokens": -1}, "max_draft_tokens"),
        ([5], {"tenant": 5}, "tenant"),
        ([5], {"tenant": None}, "tenant"),
        ([5], {"params": {}}, "SamplingParams"),
        ([5], {"params": {"temperature": 0}}, "SamplingParams"),
        ([5], {"params": SamplingParams(stop_token_ids=[4096])}, "4096"),
        (None, {}, "prompt"),
        (5, {}, "prompt"),
        ([[5]], {}, "prompt"),
        ([5], {"request_id": "good"}, "in use"),
    ],
    ids=str,
)
def test_one_callers_mistake_is_nobody_elses(
    shared_async: LLM,
    prompts: list[list[int]],
    prompt: Any,
    arguments: dict[str, Any],
    says: str,
) -> None:
    async def main() -> None:
        async with AsyncEngine(engine=shared_async.engine) as engine:
            params = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
            good = asyncio.create_task(engine.generate(prompts[0], params, request_id="good"))
            await asyncio.sleep(0)  # it is queued before the other
            with pytest.raises(RequestError, match=says) as caught:
                await asyncio.wait_for(engine.generate(prompt, **arguments), 120)
            assert "\n" not in str(caught.value)
            assert len((await good).outputs[0].token_ids) == 120
            await asyncio.wait_for(engine.idle(), 120)

    asyncio.run(main())
    assert shared_async.engine.integrity() == []


@pytest.fixture(scope="module")
def shared_async() -> LLM:
    return LLM(speculative_config=DRAFT, kv_cache_bytes=64 * 2**20)


def test_a_step_wakes_a_loop_once(make_llm: MakeLLM, prompts: list[list[int]]) -> None:
    """Every wake-up costs the engine's thread the interpreter's lock."""
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)

    async def main() -> tuple[int, int]:
        loop = asyncio.get_running_loop()
        wake, woken = loop.call_soon_threadsafe, 0

        def counted(*args: Any, **kwargs: Any) -> asyncio.Handle:
            nonlocal woken
            woken += 1
            return wake(*args, **kwargs)

        async with AsyncEngine(engine=make_llm(None).engine) as engine:
            loop.call_soon_threadsafe = counted  # type: ignore[method-assign, assignment]
            answers = await asyncio.gather(*(engine.generate(prompt, params) for prompt in prompts[:6]))
            return woken, sum(len(answer.outputs[0].token_ids) for answer in answers)

    woken, num_tokens = asyncio.run(main())
    assert num_tokens == 6 * 12
    assert woken < num_tokens / 2


@pytest.mark.parametrize("end", ["abort", "close", "failure"])
def test_all_updates_come_before_the_end(
    make_llm: MakeLLM, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """A request that is over and one that goes on, both begun without an iterator, when the end comes."""
    inner = make_llm().engine

    async def main() -> tuple[list[Any], list[Any]]:
        engine = AsyncEngine(engine=inner)
        short: list[Any] = []
        long: list[Any] = []
        params = SamplingParams(temperature=0, max_tokens=1900, ignore_eos=True)
        await engine.begin(prompts[0], params, long.append, request_id="long")
        await engine.begin(prompts[1], SamplingParams(temperature=0, max_tokens=1), short.append)
        async with asyncio.timeout(120):
            while not (long and short):
                await asyncio.sleep(0.002)
            if end == "abort":
                await engine.abort("long")
            elif end == "failure":
                monkeypatch.setattr(inner.drafting, "propose", lambda scheduled, steps: 1 / 0)
            else:
                await asyncio.to_thread(engine.close)
            while not isinstance(long[-1], Exception) and long[-1].output is None:
                await asyncio.sleep(0.002)
        await asyncio.to_thread(engine.close)
        return long, short

    long, short = asyncio.run(main())
    assert [update.output is not None for update in short] == [True]
    if end == "abort":
        assert long[-1].finish_reason == "abort"
        token_ids = long[-1].output.outputs[0].token_ids
        assert token_ids == [t for update in long for t in update.token_ids]
    else:
        assert ("division" if end == "failure" else "closed") in str(long[-1])
        assert [len(update.token_ids) for update in long[:-1]] == [1] * (len(long) - 1)


class Panic(BaseException):
    """As what a library written in Rust raises when it panics: no Exception."""


def test_a_panic_in_the_engines_thread_reaches_every_caller(
    make_llm: MakeLLM, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm()

    def panic(*_: object) -> None:
        raise Panic("index out of bounds")

    monkeypatch.setattr(llm.engine.runner, "launch", panic)

    async def main(engine: AsyncEngine) -> list[str]:
        ends = await asyncio.gather(*(outcome(engine, prompts[number]) for number in range(4)))
        ends.append(await outcome(engine, prompts[0]))
        await asyncio.to_thread(engine.close)
        return ends

    ends = asyncio.run(main(AsyncEngine(engine=llm.engine)))
    assert all("index out of bounds" in end for end in ends)


def test_a_panic_over_one_request_is_nobody_elses(
    make_llm: MakeLLM, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def panic(*_: object, **__: object) -> None:
        raise Panic("not a character boundary")

    async def main() -> None:
        async with AsyncEngine(engine=make_llm().engine) as engine:
            good = asyncio.create_task(engine.generate(prompts[0], SamplingParams(max_tokens=8)))
            await asyncio.sleep(0.01)
            with monkeypatch.context() as patch:
                patch.setattr("slipstream.text.prompts.encode_prompt", panic)
                with pytest.raises(RuntimeError, match="Panic: not a character boundary"):
                    await asyncio.wait_for(engine.generate("text"), 120)
            with pytest.raises(RuntimeError, match="Panic"):
                await asyncio.wait_for(engine.ask(panic), 120)
            assert (await asyncio.wait_for(good, 120)).outputs

    asyncio.run(main())


@pytest.mark.parametrize("n", [1, 2])
def test_a_request_can_be_aborted_while_its_grammar_compiles(
    make_llm: MakeLLM, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch, n: int
) -> None:
    llm = make_llm()
    compiling, may_end = threading.Event(), threading.Event()
    read_tokenizer = GrammarCompiler.read_tokenizer

    def slow(self: GrammarCompiler) -> Any:
        compiling.set()
        may_end.wait(120)
        return read_tokenizer(self)

    monkeypatch.setattr(GrammarCompiler, "read_tokenizer", slow)

    async def main() -> None:
        async with AsyncEngine(engine=llm.engine) as engine:
            params = SamplingParams(max_tokens=200, n=n, structured={"regex": "[a-z]{100}"})
            task = asyncio.create_task(engine.generate(prompts[0], params, request_id="slow"))
            other = asyncio.create_task(engine.generate(prompts[1], params, request_id="other"))
            await asyncio.to_thread(compiling.wait, 120)
            await engine.abort("slow")
            output = await asyncio.wait_for(task, 120)
            assert not other.done()
            may_end.set()
            assert [answer.finish_reason for answer in output.outputs] == ["abort"] * n
            assert [answer.token_ids for answer in output.outputs] == [[]] * n
            assert output.prompt_token_ids == prompts[0]
            assert all(a.finish_reason != "abort" for a in (await asyncio.wait_for(other, 120)).outputs)

    asyncio.run(main())


def test_long_texts_are_tokenised_in_another_thread(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the engine's steps nor the caller's loop wait for it; and what is to be refused, is."""
    llm = make_llm()
    threads: list[str] = []
    for name in ("encode_prompt", "encode_bad_words"):
        encode = getattr(inputs_module, name)

        def noted(*args: Any, encode: Any = encode) -> Any:
            threads.append(threading.current_thread().name)
            return encode(*args)

        monkeypatch.setattr(inputs_module, name, noted)

    async def main() -> list[set[str]]:
        seen: list[set[str]] = []
        async with AsyncEngine(engine=llm.engine) as engine:
            words = ["word " * 50 + str(number) for number in range(40)]
            for prompt, params in (
                ("short", SamplingParams(max_tokens=2)),
                ("a " * 500, SamplingParams(max_tokens=2, bad_words=words)),
            ):
                assert (await asyncio.wait_for(engine.generate(prompt, params), 120)).prompt == prompt
                seen.append(set(threads))
                threads.clear()
            with pytest.raises(RequestError, match="prompt and answer together"):
                await asyncio.wait_for(engine.generate("a " * 20_000), 120)
            seen.append(set(threads))
        return seen

    short, *long = asyncio.run(main())
    assert short == {"slipstream-engine"}
    for names in long:
        assert names
        assert not names & {"slipstream-engine", "MainThread"}


HALF = "a \ud83d b"


@pytest.mark.parametrize(
    "ask",
    [
        lambda llm: llm.generate(HALF),
        lambda llm: llm.chat([{"role": "user", "content": HALF}]),
        lambda llm: llm.chat([{"role": HALF, "content": "x"}]),
        lambda llm: llm.chat([{"role": "user", "content": [{"type": "text", "text": HALF}]}]),
        lambda llm: llm.generate("a", SamplingParams(stop=[HALF])),
        lambda llm: llm.generate("a", SamplingParams(bad_words=[HALF])),
        lambda llm: llm.generate("a", SamplingParams(structured={"regex": HALF})),
        lambda llm: llm.generate("a", SamplingParams(structured={"grammar": f'start: "{HALF}"'})),
        lambda llm: llm.generate("a", SamplingParams(structured={"choice": ["b", HALF]})),
        lambda llm: llm.generate("a", SamplingParams(structured={"json_schema": {"const": HALF}})),
        lambda llm: llm.generate("a", SamplingParams(structured={"json_schema": {HALF: 1}})),
        lambda llm: llm.generate("a", SamplingParams(structured={"json_schema": '{"const": "\\ud800"}'})),
        lambda llm: llm.generate("a", tenant=HALF),
        lambda llm: llm.generate("a", task=HALF),
    ],
)
def test_half_of_a_surrogate_pair_is_refused(shared_async: LLM, ask: Any) -> None:
    with pytest.raises(RequestError, match=r"half of a surrogate pair, U\+D8"):
        ask(shared_async)
    assert not shared_async.engine.has_unfinished
