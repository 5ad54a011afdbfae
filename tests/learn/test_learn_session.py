"""A server that learns: what serves follows the folder, what breaks is rolled back, and no answer ever changes."""

from __future__ import annotations

import asyncio
import functools
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.assets import EMBEDDED_DRAFT, EMBEDDED_TARGET
from slipstream.core.request import RequestOptions
from slipstream.engine.async_engine import AsyncEngine
from slipstream.errors import LearnError
from slipstream.learn.background.learner import WorkerConfig
from slipstream.learn.background.learner_process import MAX_STARTS, LearnerProcess
from slipstream.learn.decisions import by_hand
from slipstream.learn.learners.base_draft import BaseDraft
from slipstream.learn.learners.learner_options import LearnerOptions
from slipstream.learn.learners.registry import make_learner
from slipstream.learn.records.privacy import PrivacyRules
from slipstream.learn.records.served import share_of
from slipstream.learn.served_versions import ServedVersions
from slipstream.learn.session import LearnSession, SessionSettings, begin_learning
from slipstream.learn.storage.folder import LearnFolder
from slipstream.learn.storage.ring import Ring
from slipstream.learn.storage.state import LearnState, StateStore
from slipstream.learn.versions.store import Version, VersionStore
from slipstream.models import load_tokenizer
from slipstream.text.prompts import encode_chat

PROMPTS = Path(EMBEDDED_TARGET).parents[1] / "prompts.jsonl"

DRAFT = {"method": "draft_model", "model": EMBEDDED_DRAFT, "num_speculative_tokens": 3}
IDLE = {"min_records": 10**9, "poll_s": 60.0}
"""For a learner that has nothing to do."""


@pytest.fixture
def client() -> Iterator[AsyncEngine]:
    engine = LLM(speculative_config={"method": "versions", "drafter": DRAFT}).engine
    with_thread = AsyncEngine(engine=engine)
    yield with_thread
    with_thread.close()


def session_on(client: AsyncEngine, folder: Path) -> LearnSession:
    return LearnSession(client, SessionSettings(folder, 16 * 2**20, worker=IDLE))


@functools.cache
def prompts() -> list[list[int]]:
    tokenizer = load_tokenizer(EMBEDDED_TARGET)
    talks = [json.loads(line)["messages"] for line in PROMPTS.read_text().splitlines()]
    found = [encode_chat(tokenizer, messages) for messages in talks]
    return [one for one in found if len(one) <= 150]


def prompt(number: int) -> list[int]:
    return prompts()[number % len(prompts())]


def params(number: int, num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.8, seed=number, max_tokens=num_tokens, ignore_eos=True)


def answers(client: AsyncEngine, numbers: range, num_tokens: int = 16, **options: Any) -> list[Any]:
    """The requests' outputs, a few at a time."""

    async def one(number: int) -> Any:
        given = RequestOptions(**options)
        name = f"{number}-{time.monotonic_ns()}"
        last = None
        async for update in client.stream(
            prompt(number), params(number, num_tokens), request_id=name, options=given
        ):
            last = update
        assert last is not None
        return last.output

    async def every() -> list[Any]:
        found: list[Any] = []
        for begin in range(0, len(numbers), 8):
            found += await asyncio.gather(*(one(number) for number in numbers[begin : begin + 8]))
        return found

    return asyncio.run(every())


def texts(outputs: list[Any]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def add_version(session: LearnSession, folder: Path, noise: float, tenant: str | None = None) -> str:
    """A version of the embedded draft whose weights were shaken; it promises to be faster all the same."""
    learner = make_learner("whole", BaseDraft(EMBEDDED_DRAFT), LearnerOptions())
    model, _ = learner.begin(None)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: one + noise * one.std() * torch.randn(one.shape, generator=generator) if one.ndim == 2 else one
        for name, one in learner.tensors(model).items()
    }
    tensors = {name: one.half() for name, one in tensors.items()}
    identity = session.identity
    version = Version(
        learner="whole",
        model_hash=identity.model_hash,
        template_hash=identity.template_hash,
        base_hash=learner.base.digest(),
        tenant=tenant,
        figures={"judge": {"gain": 0.3}},
    )
    return VersionStore(LearnFolder(folder)).add(version, tensors).id


def wait_until(what: Any, seconds: float = 1000.0) -> None:
    deadline_s = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline_s, "it did not happen"
        time.sleep(0.02)


def test_what_is_promoted_by_hand_serves_its_tenant_alone(client: AsyncEngine, tmp_path: Path) -> None:
    session = session_on(client, tmp_path)
    try:
        version = add_version(session, tmp_path, 0.0, tenant="acme")
        by_hand.promote(LearnFolder(tmp_path), version)
        wait_until(lambda: version in session.versions)
        theirs = answers(client, range(4), tenant="acme/user")
        others = answers(client, range(4), tenant="other")
        assert {one.metrics.draft_version for one in theirs} == {version}
        assert {one.metrics.draft_version for one in others} == {""}
        assert texts(theirs) == texts(others)
    finally:
        session.close()


def test_a_damaged_version_is_never_served_and_raises_an_alarm(client: AsyncEngine, tmp_path: Path) -> None:
    session = session_on(client, tmp_path)
    try:
        version = add_version(session, tmp_path, 0.0)
        file = VersionStore(LearnFolder(tmp_path)).weights_file(version)
        file.write_bytes(file.read_bytes()[:-1] + b"?")  # before the session can have read it
        StateStore(LearnFolder(tmp_path)).change(
            lambda state: state.with_scope(state.scope().promoted(version))
        )
        wait_until(lambda: "version_rolled_back" in session.status().faults)
        assert session.versions == [""]
        assert {one.metrics.draft_version for one in answers(client, range(3))} == {""}
        assert version in StateStore(LearnFolder(tmp_path)).read().retired
    finally:
        session.close()


def test_an_operator_is_followed_though_the_log_cannot_be_emptied(
    client: AsyncEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*args: Any) -> None:
        raise LearnError("cannot write: No space left on device")

    session = session_on(client, tmp_path)
    try:
        monkeypatch.setattr(Ring, "tidy", refused)
        by_hand.freeze(LearnFolder(tmp_path), True)
        wait_until(lambda: session.status().frozen)
        wait_until(lambda: "No space left" in session.status().faults.get("learning_failed", ""))
        assert session.status().frozen, "the failure does not take the operator's word back"
    finally:
        session.close()


def test_the_share_of_a_request_is_what_it_was_in_earlier_releases() -> None:
    """A canary goes on with the requests that it had before an update."""

    class Loop:
        def version_for(self, share: float) -> str:
            return f"share {share}"

    nothing: Any = None
    served = ServedVersions(nothing, nothing, nothing, LearnState())
    served.loops[None, None] = cast(Any, Loop())
    sequence: Any = SimpleNamespace(request_id="request-1", tenant="", task="")
    assert served.choose(sequence) == f"share {share_of('request-1', 'lane')}"


def test_the_learner_is_told_the_rules(client: AsyncEngine, tmp_path: Path) -> None:
    rules = PrivacyRules.of(["beta"], ["acme"], by_default=False)
    session = LearnSession(client, SessionSettings(tmp_path, 16 * 2**20, rules, worker=IDLE))
    session.close()
    told = WorkerConfig(**json.loads(session.process.argv[-1]))
    assert PrivacyRules.of(told.allowed, told.denied, told.by_default) == rules


def test_a_learner_that_dies_is_told_of_and_given_up_in_the_end() -> None:
    process = LearnerProcess({}, module="this")

    def is_given_up() -> bool:
        process.watch()
        return process.num_deaths >= MAX_STARTS

    wait_until(is_given_up)
    assert process.num_deaths == MAX_STARTS
    assert "died with exit code 0" in process.fault
    assert process.pid is None
    process.close()


@pytest.mark.long
def test_a_version_that_broke_is_rolled_back_within_200_requests_and_no_text_changed(
    client: AsyncEngine, tmp_path: Path
) -> None:
    """It passed every check of files; live traffic alone shows what it is."""
    session = session_on(client, tmp_path)
    try:
        version = add_version(session, tmp_path, 1.0)
        found = answers(client, range(16), 24)
        by_hand.promote(LearnFolder(tmp_path), version)
        wait_until(lambda: session.status().serving == version)
        wait_until(lambda: version in session.versions)  # it is loaded beside serving
        needed = 0
        while session.status().serving == version and needed < 200:
            found += answers(client, range(16 + needed, 24 + needed), 24)
            needed += 8
        wait_until(lambda: "version_rolled_back" in session.status().faults)
        assert session.status().num_rolled_back == 1
        assert session.status().by_version[version][0] > 20
        off = LLM().generate(
            [prompt(n) for n in range(len(found))], [params(n, 24) for n in range(len(found))]
        )
        assert texts(found) == texts(off)
        assert client.engine.integrity() == []
    finally:
        session.close()


@pytest.mark.long
def test_a_shaken_draft_learns_to_be_better_and_is_promoted(tmp_path: Path) -> None:
    """The whole loop: captured, trained in a process, judged, tried on a share, given to everyone."""
    seed = tmp_path / "seed"
    learner = make_learner("whole", BaseDraft(EMBEDDED_DRAFT), LearnerOptions())
    model, _ = learner.begin(None)
    generator = torch.Generator().manual_seed(0)
    shaken = {
        name: (one + 0.35 * one.std() * torch.randn(one.shape, generator=generator)).half()
        if one.ndim == 2
        else one
        for name, one in learner.tensors(model).items()
    }
    learner.checkpoint(shaken, seed)
    config = {"method": "versions", "drafter": {**DRAFT, "model": str(seed)}}
    client = AsyncEngine(engine=LLM(speculative_config=config).engine)
    folder = tmp_path / "state"
    worker = {"min_records": 96, "num_steps": 60, "poll_s": 0.2, "niceness": 0}
    session = LearnSession(client, SessionSettings(folder, 16 * 2**20, worker=worker, beside_share=0.6))
    try:
        deadline_s = time.monotonic() + 1100
        number = 0
        while not session.status().num_promoted:
            status = session.status()
            assert time.monotonic() < deadline_s, status
            answers(client, range(number, number + 8), 24)
            number += 8
        status = session.status()
        assert status.serving != ""
        old, new = status.by_version[""], status.by_version[status.serving]
        assert new[1] / new[0] > old[1] / old[0]
    finally:
        session.close()
        client.close()
    assert replace(StateStore(LearnFolder(folder)).read().scope()).serving == status.serving


def test_whatever_fails_as_learning_begins_serving_goes_on(
    client: AsyncEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("nobody thought of this")

    monkeypatch.setattr(LearnSession, "__init__", fails)
    session, status = begin_learning(client, SessionSettings(tmp_path, 2**20))
    assert session is None
    assert status().faults == {"learning_failed": "nothing is learned: nobody thought of this"}


def test_a_learner_that_writes_a_version_is_not_stopped(
    client: AsyncEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From when it asks until it says anything else; others wait for the lock that it holds."""
    monkeypatch.setattr("slipstream.learn.session.leaves_a_core", lambda _: False)
    monkeypatch.setattr(LearnerProcess, "watch", lambda _: None)  # nobody else speaks
    monkeypatch.setattr(LearnerProcess, "pid", 1)
    session = LearnSession(client, SessionSettings(tmp_path, 2**24, worker=IDLE, beside_share=0.0))
    given: list[bool] = []
    stopped: list[bool] = []
    monkeypatch.setattr(session.process, "let_keep", lambda: given.append(True))
    monkeypatch.setattr(session.process, "pause", lambda: stopped.append(True))
    try:
        session.process.messages.put({"event": "keeping"})
        wait_until(lambda: given)
        answers(client, range(4))
        assert not stopped
        session.process.messages.put({"event": "undecided", "why": "p 0.3", "look": 2})
        wait_until(lambda: session.status().events)
        assert session.status().events[0].items() >= {"event": "undecided", "why": "p 0.3", "look": 2}.items()
        answers(client, range(4))
        assert stopped
    finally:
        session.close()
