"""What replicas count: sums that never fall, and steps that arrive as they were made."""

from __future__ import annotations

import random
from functools import partial
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest

from slipstream import LLM, RequestOptions, SamplingParams
from slipstream.assets import EMBEDDED_DRAFT
from slipstream.core.metrics.decoded import CountedStep, DecodedRow, DecodedSteps
from slipstream.core.metrics.engine import EngineStats
from slipstream.core.metrics.passes import PassCounts
from slipstream.core.metrics.step import StepReport
from slipstream.deploy import stepped
from slipstream.deploy.counts import MAX_GONE, Ledger, ReplicaCounts
from slipstream.deploy.fleet import ReplicaReport
from slipstream.deploy.protocol import CODEC, ReplicaBeat
from slipstream.deploy.relay import Relay
from slipstream.deploy.router import Router
from slipstream.deploy.served import ServedFleet
from slipstream.deploy.stepped import StepCounter
from slipstream.engine.engine import Engine
from slipstream.rpc.frames import LENGTH_BYTES
from slipstream.serve.accounts import Accounts, TaskLabels
from slipstream.serve.dashboard.history import History
from slipstream.serve.engine_info import decoded_rows
from slipstream.serve.metrics.metrics import Metrics
from slipstream.serve.observer import EngineObserver

DRAFTING = {"method": "draft_model", "model": EMBEDDED_DRAFT, "num_speculative_tokens": 3}


def tokens(num: int) -> ReplicaCounts:
    return ReplicaCounts(num_output_tokens=num, draft_s=num / 2)


def arrived(beat: ReplicaBeat) -> ReplicaBeat:
    """The beat as a front reads it."""
    message = CODEC.read(CODEC.frame(beat)[LENGTH_BYTES:])
    assert isinstance(message, ReplicaBeat)
    return message


def test_a_replica_that_begins_anew_adds_to_what_it_had_counted() -> None:
    ledger = Ledger()
    ledger.hear("a", "engine 1", tokens(100))
    ledger.hear("b", "engine 2", tokens(10))
    ledger.hear("a", "engine 1", tokens(120))
    ledger.hear("a", "engine 3", tokens(130))  # more than the one before it: no number tells them apart
    assert ledger.of("a") == tokens(250)
    assert ledger.total == tokens(260)


def test_what_was_counted_before_a_connection_broke_is_counted_once() -> None:
    ledger = Ledger()
    ledger.hear("a", "engine 1", tokens(100))
    ledger.forget(0)
    ledger.hear("a", "engine 1", tokens(101))
    assert ledger.of("a") == ledger.total == tokens(101)


def test_those_that_are_gone_are_bounded_and_stay_in_the_sum() -> None:
    ledger = Ledger()
    for number in range(MAX_GONE + 20):
        ledger.hear(f"r{number}", f"engine {number}", tokens(1))
        ledger.forget(1)
    assert len(list(ledger)) <= MAX_GONE + 1
    assert ledger.total == tokens(MAX_GONE + 20)
    assert ledger.of(f"r{MAX_GONE + 19}") == tokens(1)


def test_a_report_without_an_engines_name_counts_nothing() -> None:
    ledger = Ledger()
    ledger.hear("a", "", tokens(5))
    assert ledger.total == tokens(0)


def test_reports_and_steps_arrive_as_they_were_made() -> None:
    report = ReplicaReport(num_running=2, retired_drafters=("ngram",), engine="e", counts=tokens(7))
    row = DecodedRow("account", "task", "ngram", 3, 4, 4, 2, 3)
    steps = [
        CountedStep(StepReport(3, 5, 60, 4, 4, 0.1, 0.2, 0.3), 3, 12),
        CountedStep(StepReport(1, 8, 8, 0, 0, 0, 1), 0, 0),
    ]
    told = DecodedSteps(steps, [(row, 2), (row._replace(task="other"), 1)], 9, 8)
    assert arrived(ReplicaBeat(report, told)) == ReplicaBeat(report, told)
    assert arrived(ReplicaBeat(report)) == ReplicaBeat(report)


def test_an_engines_steps_are_counted_beside_its_other_listeners() -> None:
    llm = LLM(kv_cache_bytes=64 * 2**20, max_num_seqs=4, speculative_config=DRAFTING)
    seen: list[StepReport] = []
    llm.engine.on_step = seen.append
    counter = StepCounter()
    counter.attach(llm.engine)
    prompts = ["The sea is wide and deep. " * 8, "The sea is wide and deep. " * 8 + "And", "A song"]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    found = [llm.generate([prompt], params)[0].metrics for prompt in prompts]
    report, told = counter.report(llm.engine)
    counts = report.counts
    assert counts.num_steps == len(told.steps) == len(seen)
    assert [step.report for step in told.steps] == seen
    assert counts.num_output_tokens == 72
    for name in ("prompt_tokens", "cached_tokens", "draft_tokens", "accepted_tokens"):
        wanted = sum(getattr(metrics, f"num_{name}") for metrics in found)
        assert wanted > 0, name
        assert getattr(counts, f"num_{name}") == wanted, name
    assert counts.num_passes == sum(metrics.num_steps for metrics in found)
    assert counts.verify_s > 0
    assert report.acceptance_length == 72 / counts.num_passes
    assert (
        sum(times for _, times in told.rows)
        == sum(step.num_answers for step in told.steps)
        == counts.num_passes
    )
    assert len(told.rows) < counts.num_passes
    assert (told.num_prompt_tokens, told.num_cached_tokens) == (
        counts.num_prompt_tokens,
        counts.num_cached_tokens,
    )
    again, nothing = counter.report(llm.engine)
    assert (again.counts, again.tokens_per_s, nothing) == (counts, 0.0, DecodedSteps([], []))


class Steps:
    """An engine that steps when it is told to, of which a counter hears."""

    on_observe: Any = None
    on_step: Any = None

    def __init__(self) -> None:
        self.passes = {"target": PassCounts(40, {"a tree": 2}), "draft": PassCounts(100)}
        self.counter = StepCounter()
        self.counter.attach(cast(Engine, self))

    def stats(self) -> EngineStats:
        return EngineStats(0, 0, 1, 0, 0, 1, 0, 0, 0, (), passes=self.passes)

    def step(self, items: list[Any]) -> None:
        self.on_observe(items)
        num = len(items)
        self.on_step(StepReport(num, num, num, 0, 3, 0.125, 0.3, 0.1))

    def report(self) -> tuple[ReplicaReport, DecodedSteps]:
        return self.counter.report(cast(Engine, self))


def test_passes_are_counted_from_where_counting_began() -> None:
    steps = Steps()
    steps.passes = {"target": PassCounts(50, {"a tree": 2, "too many rows": 3}), "draft": PassCounts(130)}
    counts = steps.report()[0].counts
    assert (counts.num_replayed_passes, counts.num_eager_passes) == (40, 3)


def decoded(user: int, draw: random.Random, task: str = "", begins: bool = False) -> Any:
    """One answer of a step, as the engine tells of it."""
    num_drafted = draw.choice([0, 1, 3])
    num_accepted = draw.randint(0, num_drafted)
    proposal = MagicMock(depth=num_drafted)
    proposal.__len__.return_value = num_drafted
    sequence = SimpleNamespace(
        options=RequestOptions(tenant=f"key{user % 2}/user{user}", task=task),
        task=task,
        index=0,
        num_new_tokens=num_accepted + (1 if begins else 2),
        num_prompt_tokens=100 + user,
        metrics=SimpleNamespace(num_cached_tokens=user),
    )
    reached = min(num_accepted + 1, num_drafted)
    return SimpleNamespace(
        sequence=sequence,
        method="ngram" if num_drafted else "off",
        is_forced=False,
        num_emitted=num_accepted + 1,
        proposal=proposal,
        num_accepted=num_accepted,
        reached=reached,
    )


class Seen:
    """The statistics of a server, told step by step or of many together."""

    def __init__(self, has_keys: bool) -> None:
        self.accounts = Accounts(has_keys, lambda: TaskLabels(("a", "b"), 2))
        self.metrics = Metrics("m", TaskLabels(("a", "b"), 2), None)
        self.history = History(self.accounts.label, lambda: 0.0)
        listener = cast(EngineObserver, self)
        self.on_step = partial(EngineObserver.on_step, listener)
        self.on_steps = partial(EngineObserver.on_steps, listener)

    def values(self) -> tuple[dict[str, float], list[Any], Any]:
        lines = self.metrics.exposition().decode().splitlines()
        told = {
            name: float(value)
            for name, _, value in (line.rpartition(" ") for line in lines if not line.startswith("#"))
            if "_created" not in name
        }
        [bucket] = self.history.snapshot().buckets
        return told, [getattr(bucket, name) for name in bucket.__slots__], self.history.positions


@pytest.mark.parametrize("has_keys", [False, True])
def test_steps_that_come_together_count_as_each_of_them(has_keys: bool) -> None:
    """To the last bit, whatever was drafted; a beat grows by what differs, not by users and steps."""
    draw, steps = random.Random(1), Steps()
    steps.counter.by_account = has_keys
    alone, together = Seen(has_keys), Seen(has_keys)
    relay = Relay(Router(), "a secret")
    fleet = ServedFleet.__new__(ServedFleet)
    fleet.relay = relay
    fleet.report_to(cast(EngineObserver, together), together.accounts)
    assert relay.by_account == has_keys
    assert relay.on_steps is not None
    sizes = []
    for _ in range(3):
        for number in range(40):
            items = [decoded(user, draw, "ab"[user % 3 % 2], number == 5) for user in range(number % 60)]
            alone.on_step(None, decoded_rows(items, alone.accounts.name_of))
            steps.step(items)
            alone.on_step(StepReport(len(items), len(items), len(items), 0, 3, 0.125, 0.3, 0.1), ())
        _, told = steps.report()
        sizes.append(len(told.rows))
        beat = arrived(ReplicaBeat(ReplicaReport(), told))
        assert beat.steps is not None
        relay.on_steps(beat.steps)
    assert together.values() == alone.values()
    assert any("accepted_length_bucket" in name and value for name, value in together.values()[0].items())
    kinds = 1 + 2 + 4  # of drafts of 0, 1 and 3 tokens, by how many were accepted
    assert max(sizes) <= kinds * 2 * (2 if has_keys else 1)


def test_rows_that_differ_without_end_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stepped, "MAX_ROWS", 100)
    steps, draw = Steps(), random.Random(0)
    for start in range(0, 150, 50):
        steps.step([decoded(1, draw, f"task {start + number}") for number in range(50)])
    report, told = steps.report()
    assert len(told.rows) == 100
    assert report.counts.num_passes == 150


def test_an_engine_steps_on_where_it_cannot_be_counted(caplog: pytest.LogCaptureFixture) -> None:
    steps = Steps()
    for _ in range(3):
        steps.step([None])
    assert steps.report()[0].counts.num_steps == 3
    assert [record.levelname for record in caplog.records] == ["ERROR"], "one line for all of them"
    assert "counting a step failed, 1 times so far: AttributeError" in caplog.text
