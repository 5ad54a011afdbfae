"""Step-level speculation in the engine: opt-in, said to be lossy, exact wherever nothing was kept."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from slipstream import LLM, AsyncEngine, RequestOptions, SamplingParams
from slipstream.assets import EMBEDDED_DRAFT, EMBEDDED_TARGET
from slipstream.core.request import EmittedTokens
from slipstream.core.step import StepItem
from slipstream.errors import ConfigError, ReasoningError, RequestError
from tests.kit.engines import ORACLE, MakeLLM

SMALL = {"max_model_len": 256, "kv_cache_bytes": 64 * 2**20}
PROMPT = "Once upon a time"
PARAMS = [
    SamplingParams(temperature=0, max_tokens=60, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=5, max_tokens=60, ignore_eos=True),
]
ALL = {"judge": "logprob", "threshold": -50, "protect_first_steps": 0, "protect_last_step": False}
"""Keeps every step."""
NONE = ALL | {"threshold": 0, "give_up_after": 99}


def lossy(make_llm: MakeLLM, reasoning: dict[str, Any], **more: Any) -> LLM:
    spec = {"method": "off", "verifier": "coupled", "reasoning": {"separator": " ", **reasoning}}
    spec |= more.pop("spec", {})
    return make_llm(spec, allow_lossy=True, **{**SMALL, **more})


def written(plain: LLM, text: str) -> list[int]:
    """The prompt, and a text that is written behind it, as tokens."""
    tokenizer = plain.engine.tokenizer
    token_ids: list[int] = tokenizer(PROMPT).input_ids + tokenizer(text, add_special_tokens=False).input_ids
    return token_ids


@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "seeded"])
def test_steps_of_the_target_itself_are_the_targets_text(
    plain: LLM, make_llm: MakeLLM, params: SamplingParams
) -> None:
    """A draft that is the target writes what the target would have: kept steps, half the passes, the same text."""
    llm = lossy(make_llm, {"model": EMBEDDED_TARGET})
    [off] = plain.generate(PROMPT, params)
    [on] = llm.generate(PROMPT, params, reasoning=ALL)
    assert on.outputs[0].token_ids == off.outputs[0].token_ids
    assert on.metrics.num_kept_steps > 0
    assert on.metrics.num_lossy_tokens > 5
    assert on.metrics.num_steps + on.metrics.num_accepted_tokens == off.metrics.num_steps
    assert on.metrics.lossy
    assert not on.outputs[0].reproducible


@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "seeded"])
@pytest.mark.parametrize(
    "spec", [{"method": "off"}, {"method": "draft_model", "model": EMBEDDED_DRAFT}], ids=str
)
def test_with_every_step_refused_the_text_is_the_targets(
    plain: LLM, make_llm: MakeLLM, params: SamplingParams, spec: dict[str, Any]
) -> None:
    llm = lossy(make_llm, {"model": EMBEDDED_DRAFT}, spec=spec)
    [off] = plain.generate(PROMPT, params)
    [on, other] = llm.generate(
        [PROMPT] * 2, params, options=[RequestOptions(reasoning=NONE), RequestOptions()]
    )  # type: ignore[arg-type]
    assert on.outputs[0].token_ids == other.outputs[0].token_ids == off.outputs[0].token_ids
    assert on.metrics.num_drafted_steps > 3
    assert on.metrics.num_kept_steps == 0
    assert on.metrics.lossy
    assert not other.metrics.lossy
    assert other.metrics.reasoning_log == []
    assert {entry["verdict"] for entry in on.metrics.reasoning_log} <= {"rewritten", "own"}


def test_a_kept_step_is_taken_as_it_is_and_the_question_is_dropped(plain: LLM, make_llm: MakeLLM) -> None:
    """The oracle writes a text that the target would not; what follows is the target's own behind that text."""
    [first] = plain.generate(PROMPT, SamplingParams(temperature=0, max_tokens=1))
    text = first.outputs[0].text + " zebras, violins and quarks."
    told = written(plain, text)
    oracle = {"method": ORACLE, "texts": [told], "separator": ".", "question": " 12 + 12 = "}
    llm = lossy(make_llm, oracle)
    asked = ALL | {"judge": "score", "threshold": 0, "give_up_after": 1}
    steps: list[StepItem] = []
    llm.engine.on_observe = steps.extend
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    [on] = llm.generate(PROMPT, params, reasoning=asked)
    assert on.metrics.num_kept_steps == 1
    answer = on.outputs[0]
    num_told = len(told) - on.metrics.num_prompt_tokens
    assert answer.token_ids[:num_told] == told[-num_told:]
    assert answer.from_draft[:num_told] == [False, *[True] * (num_told - 1)]
    [rest] = plain.generate(told, SamplingParams(temperature=0, max_tokens=40 - num_told, ignore_eos=True))
    assert answer.token_ids[num_told:] == rest.outputs[0].token_ids
    assert any(item.num_dropped_nodes for item in steps)
    assert all(len(item.logits) == 1 + len(item.proposal) for item in steps), "drafters see no question"


def test_what_follows_a_kept_step_is_the_targets_own(plain: LLM, make_llm: MakeLLM) -> None:
    for params in PARAMS:
        [first] = plain.generate(PROMPT, params)
        start = plain.engine.tokenizer.decode(first.outputs[0].token_ids[:1])
        told = written(plain, start + " zebras, violins and quarks.")
        llm = lossy(make_llm, {"method": ORACLE, "texts": [told], "separator": "."})
        [on] = llm.generate(PROMPT, params, reasoning=ALL | {"give_up_after": 1})
        num_told = len(told) - on.metrics.num_prompt_tokens
        assert on.outputs[0].token_ids[:num_told] == told[-num_told:]
        assert on.metrics.num_kept_steps == 1
        assert on.metrics.num_lossy_tokens == num_told - 1
        again = SamplingParams(
            temperature=params.temperature, seed=5, max_tokens=60 - num_told, ignore_eos=True
        )
        [rest] = plain.generate(told, again)
        assert on.outputs[0].token_ids[num_told:] == rest.outputs[0].token_ids


def test_answers_in_a_batch_and_streamed(plain: LLM, make_llm: MakeLLM) -> None:
    """Others beside it get their own text; every token is passed on once, in order."""
    llm = lossy(make_llm, {"model": EMBEDDED_DRAFT}, max_num_seqs=6)
    several = SamplingParams(n=2, temperature=0.8, seed=3, max_tokens=40, ignore_eos=True)
    prompts = [PROMPT, "def add(a, b):", "The sea", PROMPT]
    options = [RequestOptions(reasoning=each) for each in (ALL, None, ALL | {"threshold": -3}, None)]  # type: ignore[arg-type]
    got: dict[tuple[str, int], list[int]] = {}
    outputs = llm.generate(
        prompts, several, options=options,
        on_update=lambda u: got.setdefault((u.request_id, u.index), []).extend(u.token_ids),
    )  # fmt: skip
    alone = plain.generate(prompts, several)
    for place in (1, 3):
        assert [a.token_ids for a in outputs[place].outputs] == [a.token_ids for a in alone[place].outputs]
    for output in outputs:
        for answer in output.outputs:
            assert got[output.request_id, answer.index] == answer.token_ids
            assert len(answer.token_ids) == 40 == len(answer.from_draft)
    assert outputs[0].metrics.num_kept_steps > 2


def test_little_memory_and_few_rows(make_llm: MakeLLM) -> None:
    """Preempted, and in passes of few rows: every answer ends, and steps that cannot be checked are the target's."""
    llm = lossy(
        make_llm,
        {"model": EMBEDDED_DRAFT},
        kv_cache_bytes=6 * 2**20,
        max_num_batched_tokens=24,
        max_num_seqs=6,
    )
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=120, ignore_eos=True)
    outputs = llm.generate([f"{PROMPT} {number}" for number in range(8)], params, reasoning=ALL)
    assert all(len(output.outputs[0].token_ids) == 120 for output in outputs)
    assert sum(output.metrics.num_kept_steps for output in outputs) > 8


def test_it_is_refused_unless_it_is_allowed(make_llm: MakeLLM) -> None:
    with pytest.raises(ConfigError, match="set allow_lossy"):
        make_llm({"method": "off", "reasoning": {"model": EMBEDDED_DRAFT}}, **SMALL)
    with pytest.raises(RequestError, match="does not allow; start it with allow_lossy"):
        make_llm(None, **SMALL).generate(PROMPT, reasoning=True)
    with pytest.raises(RequestError, match="needs a draft that writes steps"):
        make_llm(None, allow_lossy=True, **SMALL).generate(PROMPT, reasoning=True)
    llm = lossy(make_llm, {"model": EMBEDDED_DRAFT})
    for bad, said in (
        ({"draft": "gpt"}, "draft must be 'draft' here"),
        ({"judge": "x"}, "judge must be"),
    ):
        with pytest.raises(RequestError, match=said):
            llm.generate(PROMPT, reasoning=bad)
    form = SamplingParams(structured={"regex": "a+"})
    with pytest.raises(RequestError, match="steps of free text"):
        llm.generate(PROMPT, form, reasoning=True)
    with pytest.raises(ConfigError, match="reads more of the target"):
        lossy(make_llm, {"method": "token_recycling"})


def test_bad_drafts_are_said_in_the_log(plain: LLM, make_llm: MakeLLM, tmp_path: Path) -> None:
    """No separator, thinking tags, silence, another template: the target's own text, and a reason."""
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    [off] = plain.generate(PROMPT, params)
    start = plain.engine.tokenizer.decode(off.outputs[0].token_ids[:1])
    template = tmp_path / "draft"
    template.mkdir()
    for file in Path(EMBEDDED_DRAFT).iterdir():
        (template / file.name).write_bytes(file.read_bytes())
    (template / "chat_template.jinja").write_text("{{ messages }}")
    tags = written(plain, start + " so </think> it is. ")
    for reasoning, options, said in (
        ({"model": EMBEDDED_DRAFT, "separator": "@@"}, {"max_step_tokens": 9}, "no separator within"),
        ({"method": ORACLE, "texts": [tags], "separator": "."}, {}, "wrote '</think>' inside"),
        ({"method": ORACLE, "texts": [], "separator": "."}, {}, "the draft wrote nothing"),
        ({"model": str(template), "separator": " "}, {}, "not the target's chat template"),
    ):
        llm = lossy(make_llm, reasoning)
        [on] = llm.generate(PROMPT, params, reasoning=ALL | options)
        assert on.outputs[0].token_ids == off.outputs[0].token_ids
        assert any(said in entry.get("reason", "") for entry in on.metrics.reasoning_log), said


def test_the_last_step_is_the_targets_own(plain: LLM, make_llm: MakeLLM) -> None:
    """A step behind which the target would end its thinking is written by the target, unless nobody minds."""
    [first] = plain.generate(PROMPT, PARAMS[0])
    told = written(plain, plain.engine.tokenizer.decode(first.outputs[0].token_ids[:1]) + " zebras.")
    [rest] = plain.generate(told, SamplingParams(temperature=0, max_tokens=1))
    following = plain.engine.tokenizer.decode(rest.outputs[0].token_ids)
    oracle = {"method": ORACLE, "texts": [told], "separator": ".", "think_end": following.strip()}
    llm = lossy(make_llm, oracle)
    [kept] = llm.generate(PROMPT, PARAMS[0], reasoning=ALL)
    [own] = llm.generate(PROMPT, PARAMS[0], reasoning=ALL | {"protect_last_step": True})
    assert kept.metrics.num_kept_steps == 1
    assert own.metrics.num_kept_steps == 0
    assert own.metrics.reasoning_log[0]["verdict"] == "last"
    assert own.outputs[0].token_ids == first.outputs[0].token_ids


def test_cancelled_under_way_nothing_is_left(make_llm: MakeLLM) -> None:
    llm = lossy(make_llm, {"model": EMBEDDED_DRAFT, "separator": "@@", "chunk_tokens": 2})

    async def leave() -> None:
        async with AsyncEngine(engine=llm.engine) as engine:
            other = asyncio.create_task(engine.generate("The sea", PARAMS[0]))
            async for update in engine.stream(PROMPT, PARAMS[0], options=RequestOptions(reasoning=ALL)):  # type: ignore[arg-type]
                if update.token_ids:
                    break
            assert len((await other).outputs[0].token_ids) == 60

    asyncio.run(leave())
    assert llm.engine.integrity() == []
    assert not llm.engine.has_unfinished


def test_an_answer_with_drafted_steps_is_not_continued(make_llm: MakeLLM) -> None:
    """Whose its tokens are is not known any more: it would be said to be the target's own."""
    engine = lossy(make_llm, {"model": EMBEDDED_DRAFT}).engine
    asked = RequestOptions(reasoning=ALL)  # type: ignore[arg-type]
    with pytest.raises(ReasoningError, match="cannot be continued"):
        engine.add_request("begun", PROMPT, PARAMS[0], options=asked, emitted=[EmittedTokens([5])])
    assert not engine.has_unfinished


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ({"bad_words": [" zebras"]}, " two zebras, violins."),
        ({"bad_words": [" violins, and"]}, " zebras, violins, and quarks."),
        ({"allowed_token_ids": "all but zebras"}, " two zebras, violins."),
        ({"min_tokens": 30, "stop_token_ids": "zebras"}, " two zebras, violins."),
    ],
    ids=["word", "phrase", "allowed", "early stop"],
)
def test_no_kept_step_breaks_a_rule(plain: LLM, make_llm: MakeLLM, rule: dict[str, Any], text: str) -> None:
    """Kept tokens are not sampled, so no mask keeps them out: a step that breaks a rule is the target's own."""
    tokenizer = plain.engine.tokenizer
    zebras = tokenizer(" zebras", add_special_tokens=False).input_ids
    if "allowed_token_ids" in rule:
        rule = {"allowed_token_ids": [n for n in range(plain.engine.model.vocab_size) if n not in zebras]}
    elif "stop_token_ids" in rule:
        rule = rule | {"stop_token_ids": zebras[-1:]}
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, **rule)
    [first] = plain.generate(PROMPT, params)
    told = written(plain, tokenizer.decode(first.outputs[0].token_ids[:1]) + text)
    llm = lossy(make_llm, {"method": ORACLE, "texts": [told], "separator": "."})
    [on] = llm.generate(PROMPT, params, reasoning=ALL)
    assert on.outputs[0].token_ids == first.outputs[0].token_ids
    assert on.outputs[0].finish_reason == first.outputs[0].finish_reason == "length"
    assert on.metrics.num_kept_steps == 0
    reasons = {entry.get("reason") for entry in on.metrics.reasoning_log}
    assert reasons & {
        "the draft wrote what the request's bad words or allowed tokens forbid",
        "the draft ended its text",
    }


def test_a_draft_that_is_also_the_draft_model_is_loaded_once(plain: LLM, make_llm: MakeLLM) -> None:
    draft = {"method": "draft_model", "model": EMBEDDED_DRAFT}
    alone = make_llm(draft, **SMALL).engine.memory_plan
    for spec in (draft, {"method": "auto", "drafters": [draft, {"method": "suffix"}]}):
        llm = lossy(make_llm, {"model": EMBEDDED_DRAFT}, spec=spec)
        [writer] = llm.engine.extension.drafters()
        [model] = writer.drafting_models()
        assert any(model is one for one in llm.engine.drafter.drafting_models())
        assert llm.engine.memory_plan.draft_bytes == alone.draft_bytes
    other = lossy(make_llm, {"model": EMBEDDED_DRAFT, "quantization": "int8"}, spec=draft)
    assert other.engine.memory_plan.draft_bytes > alone.draft_bytes
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    [off] = plain.generate(PROMPT, params)
    [on] = llm.generate(PROMPT, params, reasoning=NONE)
    assert on.outputs[0].token_ids == off.outputs[0].token_ids
