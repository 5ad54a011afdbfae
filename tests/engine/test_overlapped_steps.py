"""Steps that are launched before the host has read the one before: on a device that computes late, under random
requests, stops, aborts, pauses and preemptions, the answers are those of plain steps."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch

from slipstream import LLM, RequestOptions, SamplingParams
from slipstream.assets import EMBEDDED_DRAFT, EMBEDDED_EAGLE3, EMBEDDED_TARGET, sample_prompts
from slipstream.core.step import StepItem
from slipstream.draft.heads.recorded_heads import RecordedEagle
from slipstream.engine import draft_record
from slipstream.engine.engine import Engine
from slipstream.engine.in_flight import InFlight
from slipstream.engine.outputs import RequestOutput, Update
from slipstream.kv.upload import Download
from slipstream.models.attention.packed import PackedBackend
from slipstream.models.executor import levels
from slipstream.models.executor.eager import EagerExecutor
from slipstream.testing.delayed_device import DelayedDevice
from slipstream.testing.wait_audit import WaitAudit
from slipstream.text.prompts import encode_chat
from tests.kit.peagle_heads import masked_eagle3

DELAYED: dict[str, Any] = {
    "attention_backend": "slipstream.testing.recorded_graph:TritonOnCpu",
    "executor": "slipstream.testing.delayed_device:DelayedExecutor",
    "cpu_kernels": "torch",
    "max_model_len": 72,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
}
SPECS: dict[str, dict[str, Any] | None] = {
    "off": None,
    "chain": {"method": "draft_model", "model": EMBEDDED_DRAFT, "num_speculative_tokens": 3},
    "own": {"method": "draft_model", "model": EMBEDDED_TARGET, "num_speculative_tokens": 2},
    "eagle": {
        **{"method": "eagle3", "model": EMBEDDED_EAGLE3, "num_speculative_tokens": 3},
        **{"tree_top_k": 1, "num_draft_nodes": None},
    },
    "probed": {
        **{"method": "draft_model", "model": EMBEDDED_DRAFT, "num_speculative_tokens": 3},
        "probe_share": 0.3,
    },
    "auto": {
        "method": "auto",
        "drafters": [{"method": "draft_model", "model": EMBEDDED_DRAFT, "num_speculative_tokens": 3}],
        "plan": [{"drafter": 0, "num_speculative_tokens": 2, "max_requests": 2}, {"max_requests": 9}],
    },
}
DRAWN: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 0.9, "top_p": 0.9, "top_k": 40},
    {"temperature": 1.5, "top_p": 0.99},  # often more than the pass looks at, so that the host chooses
]
HOSTS: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": 1},
    {"temperature": 0.8, "repetition_penalty": 1.3},
]
"""Of these the host must see each token before the next pass."""
STOPS: list[dict[str, Any]] = [{}, {}, {"stop": [" the", "."]}, {"stop": ["e"]}, {"ignore_eos": True}]


@cache
def engine(spec: str, overlap: bool, num_tokens: int) -> Engine:
    """Its cache holds so many tokens."""
    llm = LLM(speculative_config=SPECS[spec], overlap_steps=overlap, **DELAYED)
    room = num_tokens * llm.engine.memory_plan.kv_bytes_per_token
    return LLM(speculative_config=SPECS[spec], overlap_steps=overlap, kv_cache_bytes=room, **DELAYED).engine


@cache
def texts() -> list[list[int]]:
    tokenizer = engine("off", False, 1024).tokenizer
    return [encode_chat(tokenizer, row["messages"]) for row in sample_prompts()[:12]]


class Requests:
    """Random ones, the same for the same seed."""

    def __init__(
        self, seed: int, number: int, kinds: list[dict[str, Any]] = DRAWN, stops: list[dict[str, Any]] = STOPS
    ) -> None:  # fmt: skip
        generator = random.Random(seed)
        self.prompts = [
            prompt[: generator.randint(12, 24)] for prompt in generator.choices(texts(), k=number)
        ]
        self.params = [
            SamplingParams(
                **{"seed": generator.randint(0, 99), "max_tokens": generator.randint(1, 40)}
                | generator.choice(kinds)
                | generator.choice(stops)
            )
            for _ in range(number)
        ]
        self.options = [
            RequestOptions(max_draft_tokens=generator.choice([None, None, None, 0, 2])) for _ in range(number)
        ]

    def add(self, engine: Engine, number: int) -> None:
        engine.add_request(str(number), self.prompts[number], self.params[number], self.options[number])


def finish(engine: Engine) -> Iterator[Update]:
    while engine.has_unfinished:
        yield from engine.step()


def answers(engine: Engine, requests: Requests) -> list[RequestOutput]:
    for number in range(len(requests.prompts)):
        requests.add(engine, number)
    done = {update.request_id: update.output for update in finish(engine) if update.output is not None}
    assert engine.integrity() == []
    return [done[str(number)] for number in range(len(requests.prompts))]


def said(output: RequestOutput) -> tuple[Any, ...]:
    """What a caller sees of an answer."""
    [answer] = output.outputs
    metrics = answer.metrics
    return (
        answer.token_ids,
        answer.text,
        answer.finish_reason,
        answer.stop_reason,
        metrics.num_output_tokens,
        metrics.num_steps + metrics.num_accepted_tokens - metrics.num_cut_steps,
    )


def history(engine: Engine, requests: Requests, seed: int) -> tuple[dict[int, RequestOutput], set[int]]:
    """Answer the requests, which come one after another; some are paused for a while, and some aborted."""
    generator, coming = random.Random(seed), list(range(len(requests.prompts)))
    done: dict[int, RequestOutput] = {}
    aborted: set[int] = set()
    paused: set[int] = set()
    seen: dict[int, list[int]] = {number: [] for number in coming}
    while coming or engine.has_unfinished:
        under_way = [number for number in seen if engine.is_unfinished(str(number))]
        updates: list[Update] = []
        match generator.choice(["add", "add", "abort", "pause", "resume", "step", "step", "step", "step"]):
            case "add" if coming:
                requests.add(engine, coming.pop(0))
            case "abort" if under_way and generator.random() < 0.3:
                aborted.add(number := generator.choice(under_way))
                updates += engine.abort(str(number))
            case "pause" if under_way:
                paused.add(number := generator.choice(under_way))
                engine.pause(str(number))
            case "resume" if paused:
                engine.resume(str(paused.pop()))
            case _ if not coming and not engine.has_work:
                while paused:
                    engine.resume(str(paused.pop()))
        if engine.has_work:
            updates += engine.step()
        for update in updates:
            seen[int(update.request_id)] += update.token_ids
            if update.output is not None:
                done[int(update.request_id)] = update.output
        assert engine.integrity() == []
    assert {number: output.outputs[0].token_ids for number, output in done.items()} == seen
    return done, aborted


@pytest.mark.parametrize(
    ("spec", "seed", "room"),
    [
        ("off", 1, 160),
        ("chain", 2, 160),
        ("own", 0, 1024),
        ("probed", 3, 160),
        ("auto", 4, 1024),
        ("eagle", 5, 160),
    ],
)
def test_random_histories_give_the_answers_of_plain_steps(spec: str, seed: int, room: int) -> None:
    requests = Requests(seed, 7, DRAWN + HOSTS if seed % 2 else DRAWN)
    wanted = answers(engine(spec, False, 1024), requests)
    tested = engine(spec, True, room)
    before = tested.stats()
    with DelayedDevice() as device:
        done, aborted = history(tested, requests, seed)
    for number, output in done.items():
        if number in aborted:
            [ours], [whole] = output.outputs, wanted[number].outputs
            assert ours.token_ids == whole.token_ids[: len(ours.token_ids)]
        else:
            assert said(output) == said(wanted[number])
    after = tested.stats()
    assert len(done) == 7
    assert after.num_overlapped_steps > before.num_overlapped_steps + 5
    assert sum(number > 0 for number in device.num_behind) > 5


@pytest.mark.parametrize("spec", ["off", "chain"])
def test_the_answers_are_the_same_after_preemption(spec: str) -> None:
    requests = Requests(4, 3, [{"temperature": 0.8, "ignore_eos": True, "max_tokens": 45}], [{}])
    tested = engine(spec, True, 160)
    before = tested.stats()
    wanted = answers(engine(spec, False, 1024), requests)
    with DelayedDevice():
        done = answers(tested, requests)
    after = tested.stats()
    assert [output.outputs[0].token_ids for output in done] == [o.outputs[0].token_ids for o in wanted]
    assert after.num_preemptions > before.num_preemptions
    assert after.num_overlapped_steps > before.num_overlapped_steps + 5


@pytest.mark.parametrize("spec", ["off", "chain", "eagle"])
def test_a_step_is_launched_before_the_one_before_it_is_read(spec: str) -> None:
    requests, tested = Requests(5, 4, DRAWN[:3]), engine(spec, True, 1024)
    answers(tested, requests)  # what is recorded now is no pass
    before = tested.stats().num_overlapped_steps
    with DelayedDevice() as device:
        done = answers(tested, requests)
    overlapped = tested.stats().num_overlapped_steps - before
    assert sum(number > 0 for number in device.num_behind) == overlapped > 10
    assert device.num_forced == 0
    assert list(map(said, done)) == list(map(said, answers(engine(spec, False, 1024), requests)))


@pytest.mark.parametrize(("spec", "kind"), [("off", 0), ("chain", 1), ("eagle", 2)])
def test_an_overlapped_step_waits_once(spec: str, kind: int, monkeypatch: pytest.MonkeyPatch) -> None:
    params = [{"ignore_eos": True, "max_tokens": 20, **DRAWN[kind]}]
    requests, tested, num_steps = Requests(7, 4, params, [{}]), engine(spec, True, 1024), 0
    answers(tested, requests)  # what is recorded now waits
    before, step = tested.stats().num_overlapped_steps, tested.step
    audit = WaitAudit()

    def audited() -> list[Update]:
        nonlocal num_steps
        num_steps += 1
        with audit:
            return step()

    monkeypatch.setattr(tested, "step", audited)
    answers(tested, requests)
    assert tested.stats().num_overlapped_steps > before + 3
    assert audit.waits.total() <= num_steps, audit.waits
    assert audit.uploads.total() == 0, audit.uploads


def drafted(tested: Engine, requests: Requests) -> dict[tuple[str, int], tuple[int, ...]]:
    """What was drafted, by request and length of the text."""
    drafts: dict[tuple[str, int], tuple[int, ...]] = {}

    def note(items: list[StepItem]) -> None:
        for item in items:
            drafts[item.sequence.request_id, item.length_before] = tuple(item.proposal.token_ids)

    tested.on_observe = note
    answers(tested, requests)
    tested.on_observe = None
    return drafts


def check_alike(
    plain: dict[tuple[str, int], tuple[int, ...]], ahead: dict[tuple[str, int], tuple[int, ...]]
) -> None:
    """Where an answer may end sooner, fewer tokens are asked for."""
    both = [(plain[place], ahead[place]) for place in plain.keys() & ahead.keys()]
    assert sum(min(len(a), len(b)) > 1 for a, b in both) > 15
    for one, other in both:
        number = min(len(one), len(other))
        assert one[:number] == other[:number]


@pytest.mark.parametrize("spec", ["chain", "own", "eagle"])
def test_what_is_drafted_ahead_is_what_is_drafted_for_the_text(spec: str) -> None:
    params = [{"ignore_eos": True, "max_tokens": 30, **drawn} for drawn in DRAWN[:3]]
    requests, tested = Requests(8, 4, params, [{}]), engine(spec, True, 1024)
    plain = drafted(engine(spec, False, 1024), requests)
    with DelayedDevice():
        check_alike(plain, drafted(tested, requests))


def test_a_head_that_reads_masks_waits_for_the_text() -> None:
    spec = {"method": "peagle", "model": masked_eagle3(), "num_speculative_tokens": 2, "tree_top_k": 1}
    tested = LLM(speculative_config=spec | {"num_draft_nodes": None}, **DELAYED).engine
    requests = Requests(8, 3, [{"ignore_eos": True, "max_tokens": 12, "temperature": 0.0}], [{}])
    requests.options = [RequestOptions()] * 3
    assert list(map(said, answers(tested, requests))) == list(
        map(said, answers(engine("off", False, 1024), requests))
    )
    assert tested.stats().drained_steps["drafts"] > 3


def test_a_head_whose_draft_is_not_recorded_drafts_again_once_the_text_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests, tested = (
        Requests(11, 3, [{"ignore_eos": True, "max_tokens": 40, **DRAWN[1]}], [{}]),
        engine("eagle", True, 1024),
    )
    requests.options = [RequestOptions()] * 3
    wanted, plain = (
        answers(engine("off", False, 1024), requests),
        drafted(engine("eagle", False, 1024), requests),
    )
    draft, calls = RecordedEagle.draft, 0

    def refusing(*given: Any) -> Any:
        nonlocal calls
        calls += 1
        return None if calls % 4 == 0 else draft(*given)

    monkeypatch.setattr(RecordedEagle, "draft", refusing)
    before = tested.stats()
    check_alike(plain, drafted(tested, requests))
    assert list(map(said, answers(tested, requests))) == list(map(said, wanted))
    after = tested.stats()
    assert after.num_draft_failures == before.num_draft_failures
    assert after.num_overlapped_steps > before.num_overlapped_steps + 5
    assert after.drained_steps["drafts"] > before.drained_steps.get("drafts", 0)


def test_a_draft_model_that_attends_as_the_host_says_waits_for_the_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    params = [{"ignore_eos": True, "max_tokens": 30, **drawn} for drawn in DRAWN[:3]]
    requests, tested = Requests(8, 4, params, [{}]), engine("chain", True, 1024)
    requests.options = [RequestOptions()] * 4
    plain, draft = drafted(engine("chain", False, 1024), requests), tested.draft_model
    assert draft is not None
    eager = object.__new__(EagerExecutor)
    vars(eager).update(vars(draft.executor), backend=PackedBackend(draft.backend.traits))
    monkeypatch.setattr(draft, "executor", eager)
    check_alike(plain, drafted(tested, requests))


def test_a_policy_is_told_of_each_step_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It chooses for some, and the steps between do as it chose; what became of each draft is its own."""
    params = [{"ignore_eos": True, "max_tokens": 40, **drawn} for drawn in DRAWN[:3]]
    requests, tested = Requests(9, 4, params, [{}]), engine("probed", True, 1024)
    requests.options = [RequestOptions()] * 4
    policy = tested.drafting.policy
    assert policy is not None
    monkeypatch.setattr(draft_record, "MOST_REPEATS", 3)
    begun: list[str] = []
    told: list[tuple[int, int, int]] = []
    choose, repeat, observe = policy.choose, policy.repeat, policy.observe

    def observed(outcomes: Any, calls: Any, **given: Any) -> None:
        assert len(told) + 1 == len(begun)
        accepted = sum(each.num_accepted for each in outcomes)
        told.append((sum(each.num_tokens for each in outcomes), accepted, len(calls)))
        observe(outcomes, calls, **given)

    monkeypatch.setattr(policy, "choose", lambda *given: (begun.append("choose"), choose(*given))[1])
    probed: list[bool] = []

    def repeated(speculates: bool) -> None:
        begun.append("repeat")
        probed.append(policy.in_probe)
        assert speculates != policy.in_probe
        repeat(speculates)

    monkeypatch.setattr(policy, "repeat", repeated)
    monkeypatch.setattr(policy, "observe", observed)
    steps: list[tuple[int, int, bool]] = []

    def note(items: list[StepItem]) -> None:
        tokens = sum(item.num_emitted for item in items)
        steps.append((tokens, sum(item.num_accepted for item in items), any(len(i.proposal) for i in items)))

    tested.on_observe = note
    answers(tested, requests)
    tested.on_observe = None
    assert begun.count("repeat") > 5
    assert any(probed), "a probe is measured in steps like those that it is compared with"
    assert max(len(run) for run in "".join(name[0] for name in begun).split("c")) <= 3
    told_of_drafts = [each for each in told if each[0] and each[2]]  # others begin with a prompt
    assert [each[:2] for each in told_of_drafts] == [each[:2] for each in steps if each[2]]


@pytest.mark.parametrize("number", [3, 12])
def test_drafts_that_are_not_finite_end_behind_a_chain_that_was_drawn_ahead(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests, tested = Requests(5, 4, DRAWN[:2], [{"ignore_eos": True}]), engine("chain", True, 1024)
    answers(tested, requests)  # what is recorded now is drawn twice
    wanted, calls, choose_level = answers(engine("off", False, 1024), requests), 0, levels.choose_level

    def damaged(*given: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        tokens = choose_level(*given)
        if calls == number:
            tokens[0] = levels.NOT_FINITE
        return tokens

    monkeypatch.setattr(levels, "choose_level", damaged)
    before = tested.stats()
    with DelayedDevice():
        done = answers(tested, requests)
    after = tested.stats()
    assert list(map(said, done)) == list(map(said, wanted))
    assert after.num_draft_failures == before.num_draft_failures + 1
    assert after.num_overlapped_steps > before.num_overlapped_steps


@pytest.mark.parametrize("spec", ["off", "chain"])
def test_a_step_whose_reading_fails_is_made_again(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    requests, tested = Requests(6, 3, DRAWN[:2]), engine(spec, True, 1024)
    wanted = answers(engine("off", False, 1024), requests)
    read, calls = InFlight.finish, 0

    def failing(self: InFlight) -> None:
        nonlocal calls
        calls += 1
        if calls % 5 == 0:
            raise RuntimeError("lost")
        read(self)

    monkeypatch.setattr(InFlight, "finish", failing)
    done: dict[str, RequestOutput] = {}
    for number in range(3):
        requests.add(tested, number)
    while tested.has_unfinished:
        try:
            done |= {
                update.request_id: update.output for update in tested.step() if update.output is not None
            }
        except RuntimeError:
            assert tested.integrity() == []
    assert calls > 7
    assert [said(done[str(number)]) for number in range(3)] == list(map(said, wanted))


@pytest.mark.parametrize(
    ("options", "params", "why"),
    [
        ({}, {"logprobs": 1}, "the host chooses"),
        ({}, {"presence_penalty": 0.5}, "the host chooses"),
        ({}, {"bad_words": [" the"]}, "the host chooses"),
        ({"speculative_config": {"method": "ngram"}}, {}, "drafts"),
    ],
)
def test_what_the_host_must_see_first_is_read_first(
    options: dict[str, Any], params: dict[str, Any], why: str
) -> None:
    llm = LLM(kv_cache_bytes=2**22, **options, **DELAYED)
    llm.generate([texts()[0][:20]], SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, **params))
    stats = llm.engine.stats()
    assert (stats.num_overlapped_steps, stats.drained_steps) == (0, {why: 5})


@pytest.mark.parametrize(
    "options", [{"overlap_steps": False}, {"executor": "slipstream.testing.recorded_graph:ComputedExecutor"}]
)
def test_steps_follow_one_another_where_they_cannot_or_may_not_overlap(options: dict[str, Any]) -> None:
    llm = LLM(kv_cache_bytes=2**22, **DELAYED | options)
    llm.generate([texts()[0][:20]], SamplingParams(max_tokens=4, ignore_eos=True))
    stats = llm.engine.stats()
    assert (stats.num_overlapped_steps, stats.drained_steps) == (0, {})


def test_a_download_brings_what_was_there_when_it_began() -> None:
    numbers = torch.arange(3)
    with DelayedDevice() as device:
        first = Download(numbers + 1)
        second = Download(numbers * 2)
        assert first.read() == [1, 2, 3]
        assert second.read() == [0, 2, 4]
    assert device.num_behind[0] > 0
