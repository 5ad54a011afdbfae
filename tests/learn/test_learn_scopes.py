"""Versions by tenant and task: learned from their own answers alone, loaded while they are busy, judged with costs."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from learn_cases import some_record, some_tensors

from slipstream import LLM
from slipstream.assets import EMBEDDED_DRAFT
from slipstream.config import SpeculativeConfig
from slipstream.core.request import RequestOptions
from slipstream.draft.combine.versions import BASE, VersionsDrafter
from slipstream.engine.async_engine import AsyncEngine
from slipstream.errors import ConfigError
from slipstream.learn.background import learner as learner_process
from slipstream.learn.background.learner import LearnWorker, ServerLink, WorkerConfig
from slipstream.learn.background.messages import CODEC, DraftingCosts, LearnEvent
from slipstream.learn.decisions.draft_costs import MIN_CALLS, DraftCosts
from slipstream.learn.decisions.loop import LoopSettings
from slipstream.learn.learners.base import LearnedWeights
from slipstream.learn.learners.base_draft import BaseDraft
from slipstream.learn.learners.learner_options import LearnerOptions
from slipstream.learn.learners.registry import make_learner
from slipstream.learn.records.privacy import PrivacyRules
from slipstream.learn.records.served import Purpose, tenant_keys
from slipstream.learn.session import LearnSession, SessionSettings
from slipstream.learn.storage.folder import LearnFolder
from slipstream.learn.storage.ring import Ring, RingIdentity
from slipstream.learn.storage.state import StateStore
from slipstream.learn.versions.scope import EVERYONES, LearnBy
from slipstream.learn.versions.store import Version, VersionStore
from slipstream.rpc.sockets import next_body
from slipstream.sampling.params import SamplingParams
from slipstream.serve.auth import digest
from slipstream.serve.config import ServeConfig
from slipstream.serve.learning import session_settings

DRAFT = {"method": "draft_model", "model": EMBEDDED_DRAFT, "num_speculative_tokens": 3}
IDLE = {"min_records": 10**9, "poll_s": 60.0}


def test_whose_an_answer_is() -> None:
    assert LearnBy.EVERYONE.key_of("acme/user", "sql") == EVERYONES
    assert LearnBy.TENANT.key_of("acme/user", "sql") == ("acme", None)
    assert LearnBy.TASK.key_of("acme/user", "sql") == (None, "sql")
    assert LearnBy.TENANT.key_of("", "sql") is None
    assert LearnBy.TASK.key_of("acme", "") is None
    assert [one.learns(("acme", None)) for one in LearnBy] == [False, True, False]
    with pytest.raises(ConfigError, match="learn_by"):
        ServeConfig(learn="folder", learn_by="tenants")
    with pytest.raises(ConfigError, match="learner"):
        ServeConfig(learn="folder", learner="all")


@pytest.mark.parametrize(
    ("keys", "asked", "wanted"),
    [
        (("a", "b"), None, LearnBy.TENANT),
        ((), None, LearnBy.EVERYONE),
        (("a", "b"), "everyone", LearnBy.EVERYONE),
        ((), "tenant", LearnBy.TENANT),
    ],
)
def test_one_api_key_learns_nothing_from_another_unless_asked(
    keys: tuple[str, ...], asked: str | None, wanted: LearnBy
) -> None:
    config = ServeConfig(learn="folder", api_key=keys, learn_by=asked)
    settings = session_settings(config)
    assert settings is not None
    assert (config.learns_by, settings.by) == (wanted, wanted)
    alice, bob = (wanted.key_of(f"{digest(key)}/user", "") for key in ("a", "b"))
    assert (alice == bob) == (wanted is LearnBy.EVERYONE)


# --- the learner's process ------------------------------------------------------------------------------------


class FixedScorer:
    def __init__(self, share: float) -> None:
        self.share = share

    def hits(self, records: Any) -> list[Any]:
        return [np.random.default_rng(one.seed).random(len(one.token_ids)) < self.share for one in records]


class FakeLearner:
    """Notes what it was given; what it learns is right nine times of ten, the base drafter three."""

    name = "whole"

    def __init__(self) -> None:
        self.given: list[tuple[set[str], set[str], bool]] = []
        self.older: list[list[str]] = []
        """Tasks of the older records, for each candidate."""

    def learn(self, records: Any, older: Any, *, start: Any, before_step: Any) -> LearnedWeights:
        tenants, tasks = ({getattr(one, name) for one in (*records, *older)} for name in ("tenant", "task"))
        self.given.append((tenants, tasks, start is not None))
        self.older.append([one.task for one in older])
        return LearnedWeights(some_tensors(len(self.given)), {}, {})

    def scorer(self, tensors: Any) -> FixedScorer:
        return FixedScorer(0.3 if tensors is None else 0.9)


@pytest.fixture
def learner(monkeypatch: pytest.MonkeyPatch) -> FakeLearner:
    fake = FakeLearner()
    monkeypatch.setattr("slipstream.learn.learners.registry.make_learner", lambda *_: fake)
    return fake


class NoServer:
    def __init__(self, costs: tuple[float, float] = (0.0, 0.0)) -> None:
        self.costs = costs

    def beat(self, *_: object) -> None:
        return

    def ask_to_keep(self) -> None:
        return

    def tell(self, event: str, **status: Any) -> None:
        print(json.dumps({"event": event, **status}))


def worker_on(
    folder: Path,
    by: LearnBy,
    costs: tuple[float, float] = (0.0, 0.0),
    rules: PrivacyRules | None = None,
) -> LearnWorker:
    told = {} if rules is None else json.loads(json.dumps(rules.as_lists()))
    config = WorkerConfig(str(folder), {"model": "draft"}, "", "whole", 4, by=by, min_records=20, **told)
    return LearnWorker(config, NoServer(costs))  # type: ignore[arg-type]


def ring_of(folder: Path, answers: list[tuple[str, str]]) -> None:
    """Forty answers of each tenant and task."""
    ring = Ring(LearnFolder(folder), RingIdentity("model-a", "template-a"), 2**24)
    for number in range(40 * len(answers)):
        tenant, task = answers[number % len(answers)]
        purpose = Purpose.JUDGE if number // len(answers) % 2 else Purpose.TRAIN
        ring.append(
            some_record(number, num_tokens=40, tenant=tenant, task=task, purpose=purpose, seed=number)
        )
    ring.close()


def told(capsys: pytest.CaptureFixture[str], event: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return [line for line in lines if line["event"] == event]


def test_a_tenants_version_learns_from_its_own_answers_alone(
    tmp_path: Path, learner: FakeLearner, capsys: pytest.CaptureFixture[str]
) -> None:
    ring_of(tmp_path, [("b/one", ""), ("a", ""), ("b/two", ""), ("", "")])
    made = worker_on(tmp_path, LearnBy.TENANT)
    made.turn()
    made.turn()
    made.turn()
    assert [tenants for tenants, _, _ in learner.given] == [{"b/one", "b/two"}, {"a"}], (
        "nobody's are left out"
    )
    candidates = told(capsys, "candidate")
    assert [one["tenant"] for one in candidates] == ["b", "a"]
    store = VersionStore(LearnFolder(tmp_path))
    first, second = (store.get(one["version"]) for one in candidates)
    assert (first.tenant, second.tenant) == ("b", "a")
    assert not set(tenant_keys("b")) & set(second.taught_by)
    assert [one.figures["judge"]["num_requests"] for one in (first, second)] == [40, 20], "their own held out"


def test_a_tasks_version_goes_on_from_what_serves_the_task(
    tmp_path: Path, learner: FakeLearner, capsys: pytest.CaptureFixture[str]
) -> None:
    ring_of(tmp_path, [("a", "sql"), ("b", "sql"), ("a", "chat")])
    made = worker_on(tmp_path, LearnBy.TASK)
    made.turn()
    [found] = told(capsys, "candidate")
    assert found["task"] == "sql"
    StateStore(LearnFolder(tmp_path)).change(
        lambda state: state.with_scope(state.scope(None, "sql").promoted(found["version"]))
    )
    made.turn()
    ring_of(tmp_path, [("a", "sql")])
    made.turn()
    assert [(tasks, begun) for _, tasks, begun in learner.given] == [
        ({"sql"}, False),
        ({"chat"}, False),
        ({"sql"}, True),
    ]


def test_what_drafts_better_but_costs_more_is_refused(
    tmp_path: Path, learner: FakeLearner, capsys: pytest.CaptureFixture[str]
) -> None:
    ring_of(tmp_path, [("a", "sql")])
    worker_on(tmp_path, LearnBy.EVERYONE, costs=(0.1, 4.0)).turn()
    [refused] = told(capsys, "refused")
    assert "predicted speed -" in refused["why"]


def test_a_candidate_without_enough_evidence_learns_on(
    tmp_path: Path, learner: FakeLearner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learner, "scorer", lambda tensors: FixedScorer(0.3 if tensors is None else 0.31))
    made = worker_on(tmp_path, LearnBy.EVERYONE)
    made.config = WorkerConfig(**{**asdict(made.config), "max_looks": 1})
    for _ in range(2):
        ring_of(tmp_path, [("a", "sql")])
        made.turn()
    assert [begun for _, _, begun in learner.given] == [False, True]


class ForgetfulScorer:
    """Right nine times of ten on what is asked now; on what was asked before a little more seldom than the base
    drafter."""

    def __init__(self, old: float, new: float) -> None:
        self.shares = {"old": old, "new": new}
        self.seen: list[list[str]] = []

    def hits(self, records: Any) -> list[Any]:
        self.seen.append([one.request_id for one in records])
        return [
            np.random.default_rng(one.seed).random(len(one.token_ids)) < self.shares[one.task]
            for one in records
        ]


def shifted_ring(folder: Path, first: int, tasks: list[str]) -> None:
    """An answer of each of `tasks` in turn to learn from and one held out."""
    ring = Ring(LearnFolder(folder), RingIdentity("model-a", "template-a"), 2**24)
    for number, task in enumerate(tasks, first):
        for purpose in Purpose:
            name = f"{purpose}-{number}"
            ring.append(
                some_record(number, 40, request_id=name, task=task, purpose=purpose, seed=number, tenant="a")
            )
    ring.close()


@pytest.mark.parametrize(("old", "is_kept"), [(0.3, True), (0.285, False)])
def test_a_candidate_that_forgets_what_was_asked_before_is_refused(
    old: float,
    is_kept: bool,
    tmp_path: Path,
    learner: FakeLearner,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    base, candidate = ForgetfulScorer(0.3, 0.3), ForgetfulScorer(old, 0.9)
    monkeypatch.setattr(learner, "scorer", lambda tensors: base if tensors is None else candidate)
    shifted_ring(tmp_path, 0, ["old"] * 60 + ["new"] * 40)
    made = worker_on(tmp_path, LearnBy.EVERYONE)
    made.config = WorkerConfig(**{**asdict(made.config), "judged_records": 40})
    made.turn()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["event"] for line in lines] == ["learning", "candidate" if is_kept else "refused"]
    if not is_kept:
        assert "it forgets" in lines[-1]["why"]


@pytest.mark.parametrize(
    "rules",
    [
        PrivacyRules.of(denied=["acme"]),
        PrivacyRules.of(allowed=["beta"], by_default=False),
    ],
    ids=["denied", "not named"],
)
def test_the_rules_hold_for_answers_that_were_kept_before(
    rules: PrivacyRules, tmp_path: Path, learner: FakeLearner, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged: list[str] = []

    class NotingScorer(FixedScorer):
        def hits(self, records: Any) -> list[Any]:
            judged.extend(one.tenant for one in records)
            return super().hits(records)

    monkeypatch.setattr(learner, "scorer", lambda tensors: NotingScorer(0.3 if tensors is None else 0.9))
    ring_of(tmp_path, [("acme/ann", "sql"), ("acme", "sql"), ("beta", "sql"), ("beta/bob", "sql")])
    made = worker_on(tmp_path, LearnBy.EVERYONE, rules=rules)
    made.turn()
    assert [tenants for tenants, _, _ in learner.given] == [{"beta", "beta/bob"}]
    assert set(judged) == {"beta", "beta/bob"}


@pytest.mark.parametrize(("num_older", "is_kept"), [(1, True), (19, True), (20, False)])
def test_a_few_older_answers_alone_refuse_no_candidate(
    num_older: int,
    is_kept: bool,
    tmp_path: Path,
    learner: FakeLearner,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    base, candidate = ForgetfulScorer(0.3, 0.3), ForgetfulScorer(0.2, 0.9)
    monkeypatch.setattr(learner, "scorer", lambda tensors: base if tensors is None else candidate)
    shifted_ring(tmp_path, 0, ["old"] * num_older + ["new"] * 40)
    made = worker_on(tmp_path, LearnBy.EVERYONE)
    made.config = WorkerConfig(**{**asdict(made.config), "judged_records": 40})
    made.turn()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["event"] for line in lines] == ["learning", "candidate" if is_kept else "refused"]


def test_the_first_candidate_has_older_records_of_all_tasks(
    tmp_path: Path, learner: FakeLearner, capsys: pytest.CaptureFixture[str]
) -> None:
    shifted_ring(tmp_path, 0, ["old"] * 10 + ["new"] * 40)
    made = worker_on(tmp_path, LearnBy.EVERYONE)
    made.config = WorkerConfig(**{**asdict(made.config), "max_records": 20})
    made.turn()
    [older] = learner.older
    assert sorted(older) == ["new"] * 10 + ["old"] * 10
    [found] = told(capsys, "candidate")
    window = VersionStore(LearnFolder(tmp_path)).get(found["version"]).window
    assert 20 < window.num_records < 40, "one that is in both parts counts once"


def test_a_test_goes_on_from_where_it_began(
    tmp_path: Path, learner: FakeLearner, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, candidate = ForgetfulScorer(0.3, 0.3), ForgetfulScorer(0.3, 0.301)
    monkeypatch.setattr(learner, "scorer", lambda tensors: base if tensors is None else candidate)
    made = worker_on(tmp_path, LearnBy.EVERYONE)
    made.config = WorkerConfig(**{**asdict(made.config), "judged_records": 40})
    for first in (0, 100):
        shifted_ring(tmp_path, first, ["new"] * 100)
        made.turn()
    seen = [name for names in candidate.seen for name in names]
    begun = seen.index(f"{Purpose.JUDGE}-60", 41)
    assert seen[:40] == [f"{Purpose.JUDGE}-{number}" for number in range(60, 100)]
    assert seen[begun : begun + 140] == [f"{Purpose.JUDGE}-{number}" for number in range(60, 200)]


def test_the_learner_hears_what_drafting_costs_and_tells_that_it_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(learner_process.os, "_exit", ended.append)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        server = ServerLink(theirs)
        ours.sendall(CODEC.frame(DraftingCosts(0.2, 0.5)))
        server.beat()
        monkeypatch.setattr(learner_process, "BEAT_S", 0.0)
        server.tell("first")
        server.beat()
        ours.shutdown(socket.SHUT_WR)
        deadline_s = time.monotonic() + 280
        while not ended and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert server.costs == (0.2, 0.5)
        theirs.close()
        frames = CODEC.frames()
        told = [CODEC.read(body) for body in iter(lambda: next_body(ours, frames), None)]
    events = [one.event for one in told if isinstance(one, LearnEvent)]
    assert events == ["first", "alive"], "it was begun a moment ago"


# --- the server -----------------------------------------------------------------------------------------------


def test_costs_are_compared_where_both_drafted_for_as_many() -> None:
    times: dict[str, dict[int, tuple[int, float]]] = {
        BASE: {1: (MIN_CALLS, 0.01), 8: (50, 0.04)},
        "slow": {1: (MIN_CALLS, 0.02), 2: (50, 9.0)},
        "new": {1: (1, 0.5)},
    }

    class TimedDrafter:
        def times_of(self, name: str) -> dict[int, tuple[int, float]]:
            return times.get(name, {})

    costs = DraftCosts(TimedDrafter())  # type: ignore[arg-type]
    assert costs.of("new", "corrective") == 0.0
    costs.add(draft_s=0.2, verify_s=1.0)
    assert costs.base == pytest.approx(0.2)
    assert costs.of("new", "corrective") == pytest.approx(0.2), "nothing is known of such versions yet"
    assert costs.of("slow", "corrective") == pytest.approx(0.4)
    assert costs.of("new", "corrective") == pytest.approx(0.4), "as the last version of that learner"
    assert costs.of("new", "whole") == pytest.approx(0.2)


@pytest.fixture
def client() -> Iterator[AsyncEngine]:
    config = {"method": "versions", "drafter": DRAFT, "num_versions": 1}
    with_thread = AsyncEngine(engine=LLM(speculative_config=config).engine)
    yield with_thread
    with_thread.close()


def answers(client: AsyncEngine, numbers: range, tenant: str) -> list[Any]:
    async def one(number: int) -> Any:
        params = SamplingParams(temperature=0.8, seed=number, max_tokens=12, ignore_eos=True)
        last = None
        name = f"{tenant}-{number}-{time.monotonic_ns()}"
        async for update in client.stream(
            [7 + number, 11, 13], params, request_id=name, options=RequestOptions(tenant=tenant)
        ):
            last = update
        assert last is not None
        return last.output

    import asyncio

    async def every() -> list[Any]:
        return list(await asyncio.gather(*(one(number) for number in numbers)))

    return asyncio.run(every())


def add_version(session: LearnSession, folder: Path, tenant: str) -> str:
    """A corrective layer that changes much."""
    learner = make_learner("corrective", BaseDraft(EMBEDDED_DRAFT), LearnerOptions())
    model, _ = learner.begin(None)
    tensors = learner.tensors(model)
    tensors["left"] = tensors["left"] + 0.3
    identity = session.identity
    version = Version(
        "corrective", identity.model_hash, identity.template_hash, learner.base.digest(), tenant=tenant
    )
    return VersionStore(LearnFolder(folder)).add(version, tensors).id


def wait_until(what: Any) -> None:
    deadline_s = time.monotonic() + 280
    while not what():
        assert time.monotonic() < deadline_s, "it did not happen"
        time.sleep(0.02)


def test_a_tenants_corrective_layer_is_tried_on_its_own_requests_alone(
    client: AsyncEngine, tmp_path: Path
) -> None:
    loop = LoopSettings(canary_share=0.55, doubt_share=0.4)
    settings = SessionSettings(
        tmp_path, 2**24, loop=loop, by=LearnBy.TENANT, learner="corrective", worker=IDLE
    )
    session = LearnSession(client, settings)
    try:
        version = add_version(session, tmp_path, "acme")
        session.process.messages.put(
            {"event": "candidate", "version": version, "promise": 1.2, "tenant": "acme", "why": "told so"}
        )
        wait_until(lambda: version in session.versions)
        theirs, others = answers(client, range(16), "acme/user"), answers(client, range(16), "other")
        assert {one.metrics.draft_version for one in theirs} == {"", version}
        assert {one.metrics.draft_version for one in others} == {""}
        texts = [[one.outputs[0].token_ids for one in found] for found in (theirs, others)]
        assert texts[0] == texts[1]
        assert "acme" not in json.dumps(session.status().events)
        assert StateStore(LearnFolder(tmp_path)).read().scope("acme").canary == version
        assert session.status().own_scopes == 0
    finally:
        session.close()


def test_the_busiest_tenants_versions_are_loaded(client: AsyncEngine, tmp_path: Path) -> None:
    settings = SessionSettings(tmp_path, 2**24, by=LearnBy.TENANT, learner="corrective", worker=IDLE)
    session = LearnSession(client, settings)
    try:
        versions = {tenant: add_version(session, tmp_path, tenant) for tenant in ("acme", "beta")}
        for tenant, version in versions.items():
            StateStore(LearnFolder(tmp_path)).change(
                lambda state, tenant=tenant, version=version: state.with_scope(  # type: ignore[misc]
                    state.scope(tenant).promoted(version)
                )
            )
        wait_until(lambda: session.status().own_scopes == 2)
        for tenant, number in (("beta", 6), ("acme", 24)):
            answers(client, range(number), tenant)
            wait_until(lambda tenant=tenant: session.versions == ["", versions[tenant]])
        assert session.status().faults == {}
        assert session.status().own_scopes == 2
    finally:
        session.close()


def test_versions_are_timed(client: AsyncEngine) -> None:
    drafter = client.engine.drafter_as(VersionsDrafter)
    answers(client, range(2), "acme")
    times = drafter.times_of(BASE)
    assert sum(num for num, _ in times.values()) > 5
    assert all(mean_s > 0 for _, mean_s in times.values())
    assert drafter.times_of("nobody") == {}
    assert SpeculativeConfig.from_mapping(DRAFT).method == "draft_model"
