"""A request's options: checked in one place, and carried whole to the sequences that drafters and the scheduler see."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from slipstream import LLM, AsyncEngine, RequestOptions, SamplingParams
from slipstream.core.sequence import Sequence
from slipstream.engine.requests import batch_options, request_options
from slipstream.errors import RequestError
from tests.kit.engines import ORACLE, MakeLLM

PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
ALL = {"tenant": "t", "task": "sql", "max_draft_tokens": 2, "draft_method": ORACLE}
BAD: list[tuple[str, Any]] = [
    *(("tenant", value) for value in (5, None, "a\ud800")),
    *(("task", value) for value in (5, None, "a\ud800")),
    *(("max_draft_tokens", value) for value in ("3", -1, 1.5, True)),
    ("draft_method", 5),
]


@pytest.mark.parametrize(("name", "value"), BAD, ids=str)
def test_a_bad_value_is_refused_when_the_options_are_made(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"{name} must "):
        RequestOptions(**{name: value})


def test_keywords_replace_fields() -> None:
    base = RequestOptions(tenant="a", task="b", max_draft_tokens=3)
    assert request_options(base, task="c") == RequestOptions(tenant="a", task="c", max_draft_tokens=3)
    assert request_options(base, max_draft_tokens=None).max_draft_tokens is None
    assert request_options(None) == RequestOptions()
    with pytest.raises(RequestError, match="options must be RequestOptions, got dict"):
        request_options({"tenant": "a"})  # type: ignore[arg-type]


def test_prompts_share_options_or_have_their_own() -> None:
    one = RequestOptions(tenant="a", task="b")
    assert batch_options(2, one, {}) == [one, one]
    assert batch_options(2, [one, RequestOptions()], {"tenant": "c"}) == [
        RequestOptions(tenant="c", task="b"),
        RequestOptions(tenant="c"),
    ]
    each = batch_options(2, one, {"task": ["x", "y"], "max_draft_tokens": 1})
    assert [(options.tenant, options.task, options.max_draft_tokens) for options in each] == [
        ("a", "x", 1),
        ("a", "y", 1),
    ]
    with pytest.raises(RequestError, match="one for each of 2 prompts, got 1"):
        batch_options(2, [one], {})
    with pytest.raises(RequestError, match="one for each of 2 prompts, got \\['x'\\]"):
        batch_options(2, None, {"task": ["x"]})


@pytest.fixture
def seen(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> tuple[LLM, list[Sequence]]:
    """An engine that drafts, and the sequences that its scheduler is given."""
    llm = make_llm({"method": ORACLE})
    sequences: list[Sequence] = []
    add = llm.engine.scheduler.add

    def note(sequence: Sequence) -> None:
        sequences.append(sequence)
        add(sequence)

    monkeypatch.setattr(llm.engine.scheduler, "add", note)
    return llm, sequences


def test_sequences_hold_the_options_of_every_way_in(
    seen: tuple[LLM, list[Sequence]], prompts: list[list[int]]
) -> None:
    llm, sequences = seen
    options = RequestOptions(**ALL)  # type: ignore[arg-type]
    prompt = prompts[0][:8]
    llm.generate(prompt, PARAMS, **ALL)  # type: ignore[arg-type]
    llm.generate(prompt, PARAMS, options=options)
    llm.chat([{"role": "user", "content": "a"}], PARAMS, options=[options])
    llm.engine.add_request("one", prompt, SamplingParams(n=2, max_tokens=1), options)
    llm.engine.abort("one")

    async def ask() -> None:
        async with AsyncEngine(engine=llm.engine) as engine:
            await engine.generate(prompt, PARAMS, **ALL)  # type: ignore[arg-type]
            await engine.generate(prompt, PARAMS, options=RequestOptions(task="other"), tenant="t")

    asyncio.run(ask())
    assert [sequence.options for sequence in sequences] == [
        *[options] * 6,
        RequestOptions(tenant="t", task="other"),
    ]


def test_each_prompt_is_drafted_for_as_its_own_options_say(
    make_llm: MakeLLM, prompts: list[list[int]]
) -> None:
    llm = make_llm({"method": "ngram", "num_speculative_tokens": 4})
    repetitive = prompts[0][:12] * 4
    options = [RequestOptions(), RequestOptions(max_draft_tokens=1), RequestOptions(max_draft_tokens=0)]
    free, bounded, off = llm.generate([repetitive] * 3, PARAMS, options=options)
    assert len(free.metrics.proposed_per_position) > 1
    assert len(bounded.metrics.proposed_per_position) == 1
    assert off.metrics.num_draft_tokens == 0
    assert free.outputs[0].token_ids == bounded.outputs[0].token_ids == off.outputs[0].token_ids
