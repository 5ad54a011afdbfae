"""vLLM's metrics as figures, observations and alarms."""

from __future__ import annotations

import asyncio
import random

import httpx2
import pytest

from slipstream.control.monitor.alarms import AlarmKind
from slipstream.control.realised import Pair, ratio_of
from slipstream.errors import RemoteError
from slipstream.serve.dashboard.latency import BucketCounts, LatencyWindow
from slipstream.tools.handoff.history import ReadingInterval, ServerHistory
from slipstream.tools.handoff.pairs import PairLog, ProbeAnswer
from slipstream.tools.handoff.reading import EngineCounts, VllmReading, added, parse_reading
from slipstream.tools.handoff.watch import (
    MIN_REACHED,
    TASK,
    UNREACHABLE_READINGS,
    SlowerTest,
    Watch,
    WatchedServer,
)

SERVER = WatchedServer("http://127.0.0.1:9", "some/model", "ngram")


def reading(time_s: float = 0.0, running: int = 0, **counts: object) -> VllmReading:
    return VllmReading(time_s, "some/model", EngineCounts(**counts), running, 0, 0.5, {})  # type: ignore[arg-type]


def answers(num: int, alpha: float, rng: random.Random, cut: float = 0.0, depth: int = 3) -> EngineCounts:
    """What `num` answers of 20 drafts each count."""
    accepted = [0] * depth
    for _ in range(20 * num):
        for position in range(depth):
            if rng.random() >= alpha:
                break
            accepted[position] += 1
    cuts = sum(rng.random() < cut for _ in range(num))
    return EngineCounts(
        num_drafts=20 * num,
        num_draft_tokens=20 * num * depth,
        num_accepted_tokens=sum(accepted),
        num_prompt_tokens=7 * num,
        num_output_tokens=20 * num + sum(accepted),
        accepted_at=tuple(accepted),
        ended={"length": cuts, "stop": num - cuts},
    )


def feed(watch: Watch, num: int, alpha: float, rng: random.Random, cut: float = 0.0) -> None:
    for _ in range(num):
        watch.on_interval(ReadingInterval(2.0, answers(1, alpha, rng, cut), 1, 0, 0.1))


def test_what_is_no_vllm_is_said() -> None:
    with pytest.raises(RemoteError, match="no names that begin with 'vllm:', so it is no vLLM"):
        parse_reading("# TYPE slipstream_drafts counter\nslipstream_drafts_total 3\n")
    with pytest.raises(RemoteError, match="not in Prometheus' text format"):
        parse_reading("vllm:thing{ 3\n")


def test_engines_are_added_up() -> None:
    lines = [
        "# TYPE vllm:generation_tokens counter",
        *(f'vllm:generation_tokens_total{{engine="{e}",model_name="m"}} {n}' for e, n in enumerate((5, 7))),
        "# TYPE vllm:kv_cache_usage_perc gauge",
        *(f'vllm:kv_cache_usage_perc{{engine="{e}",model_name="m"}} {n}' for e, n in enumerate((0.2, 0.6))),
        "# TYPE vllm:num_requests_running gauge",
        *(f'vllm:num_requests_running{{engine="{e}",model_name="m"}} {n}' for e, n in enumerate((2, 3))),
        "# TYPE vllm:request_success counter",
        *(
            f'vllm:request_success_total{{engine="{e}",finished_reason="length",model_name="m"}} 4'
            for e in (0, 1)
        ),
    ]
    found = parse_reading("\n".join(lines) + "\n")
    assert (found.model, found.counts.num_output_tokens, found.num_running, found.kv_usage) == (
        "m",
        12,
        5,
        0.6,
    )
    assert found.counts.num_cut == found.counts.num_ended == 8


def test_counters_without_a_number_are_refused() -> None:
    with pytest.raises(RemoteError, match="not in Prometheus"):
        parse_reading("vllm:generation_tokens_total +Inf\n")


def test_growth_and_restarts() -> None:
    first = EngineCounts(num_drafts=4, accepted_at=(3, 1), ended={"stop": 1})
    last = EngineCounts(num_drafts=9, accepted_at=(7, 4, 1), ended={"stop": 2, "length": 1})
    grown = last.since(first)
    assert grown is not None
    assert (grown.num_drafts, grown.accepted_at, grown.ended) == (5, (4, 3, 1), {"stop": 1, "length": 1})
    assert grown.reached_at == (5, 4, 3)
    assert first.since(last) is None, "a counter fell: the server was restarted"
    assert added([first, grown]) == last
    assert last.acceptance_length == 1 + 0 / 9
    assert EngineCounts().reached_at == ()
    assert EngineCounts(num_drafts=5, accepted_at=(0, 0)).reached_at == (5,)


def test_the_history_is_a_series_of_rates() -> None:
    history = ServerHistory("ngram")
    history.add(reading(10.0, num_output_tokens=100))
    history.add(reading(14.0, running=2, num_output_tokens=180, num_drafts=10, accepted_at=(6, 3)))
    history.add(
        reading(16.0, num_output_tokens=5),
    )
    history.add(reading(18.0, num_output_tokens=9, num_drafts=1, accepted_at=(1, 0)))
    told = history.as_json()
    assert told["tokens_per_s"] == [20.0, 2.0], "not across a restart"
    assert told["num_running"] == [2, 0]
    assert (told["reached"], told["accepted"]) == ([11, 7], [7, 3])
    reached, accepted = history.positions["ngram"]
    assert (reached[:3], accepted[:3]) == ([11, 7, 0], [7, 3, 0])


def test_quantiles_are_promqls() -> None:
    counts = BucketCounts((0.1, 0.2, 0.4, float("inf")), (2, 6, 8, 10))
    assert counts.quantile(0.5) == pytest.approx(0.175)
    assert counts.quantile(0.1) == pytest.approx(0.05)
    assert counts.quantile(0.99) == 0.4, "beyond the last bound"
    assert BucketCounts((0.1, float("inf")), (0, 0)).quantile(0.5) is None


def test_latencies_are_of_the_window() -> None:
    now = [0.0]
    window = LatencyWindow(clock=lambda: now[0])
    bounds = (1.0, 2.0, float("inf"))
    for time_s, fast, slow in ((0, 10, 0), (200, 20, 0), (400, 20, 10), (600, 20, 20)):
        now[0] = time_s
        window.add({"answer": BucketCounts(bounds, (fast, fast + slow, fast + slow))})
    told = window.as_json()["answer"]
    assert told["num"] == 20, "the first two readings are older than the window"
    assert told["p50"] == 1.5
    window.add({"answer": BucketCounts(bounds, (1, 1, 1))})
    assert window.as_json() == {}, "a restarted server begins anew"


def test_an_observation_is_a_turnover_of_the_running_requests() -> None:
    watch = Watch(SERVER)
    rng = random.Random(0)
    for _ in range(3):
        watch.on_interval(ReadingInterval(2.0, answers(1, 0.7, rng), 4, 0, 0.1))
    learned = watch.alarms.acceptance(TASK)
    assert learned is None, "four ran at its beginning, and three have ended"
    watch.on_interval(ReadingInterval(2.0, answers(1, 0.7, rng), 4, 0, 0.1))
    learned = watch.alarms.acceptance(TASK)
    assert learned is not None
    assert learned.num_learned == 1
    short = EngineCounts(num_drafts=2, accepted_at=(1,), ended={"stop": 1})
    watch.on_interval(ReadingInterval(2.0, short, 1, 0, 0.1))
    assert learned.num_learned == 1, f"fewer than {MIN_REACHED} positions say too little"


def test_falling_acceptance_is_an_alarm_and_steady_acceptance_is_none() -> None:
    watch, rng = Watch(SERVER), random.Random(1)
    feed(watch, 400, 0.7, rng)
    assert watch.alarms.raised == []
    feed(watch, 60, 0.3, rng)
    [alarm] = watch.alarms.raised
    assert alarm.kind == AlarmKind.ACCEPTANCE_DRIFT
    assert "acceptance of task 'all' fell from 0." in alarm.message
    assert "observations. At the same time" in alarm.message
    assert watch.alarms.acknowledge(alarm.kind, TASK, None)
    assert [cleared.kind for cleared, _, _ in watch.log.cleared] == [AlarmKind.ACCEPTANCE_DRIFT]
    values = {
        sample.labels["kind"]: sample.value
        for family in watch.registry.collect()
        for sample in family.samples
        if sample.name == "slipstream_alarm_raises_total"
    }
    assert values["acceptance_drift"] == 1
    assert values["truncation"] == 0


def test_each_alarm_has_its_series_before_it_is_raised() -> None:
    """Prometheus misses the first event of a series that begins with it."""

    def series(watch: Watch) -> set[tuple[str, str]]:
        return {
            (sample.labels["kind"], sample.labels["task"])
            for family in watch.registry.collect()
            for sample in family.samples
            if sample.name == "slipstream_alarm_raises_total"
        }

    watch = Watch(SERVER)
    before = series(watch)
    for _ in range(60):
        watch.on_pair(0.5)
    for _ in range(3):
        watch.on_fault("gone")
    assert {alarm.kind for alarm in watch.alarms.raised} == {
        AlarmKind.UNDER_BREAK_EVEN,
        AlarmKind.SERVER_UNREACHABLE,
    }
    assert series(watch) == before


def test_more_answers_cut_off_are_an_alarm() -> None:
    watch, rng = Watch(SERVER), random.Random(2)
    feed(watch, 120, 0.7, rng, cut=0.1)
    feed(watch, 60, 0.7, rng, cut=0.9)
    assert [alarm.kind for alarm in watch.alarms.raised] == [AlarmKind.TRUNCATION]
    assert watch.alarms.raised[0].message.endswith(" before"), "vLLM does not say what cut them off"


def test_an_unreachable_server_is_an_alarm_until_it_answers() -> None:
    watch = Watch(SERVER)
    text = "# TYPE vllm:generation_tokens counter\nvllm:generation_tokens_total 1\n"
    replies = [httpx2.Response(500)] * UNREACHABLE_READINGS + [httpx2.Response(200, text=text)]

    async def read(times: int) -> None:
        transport = httpx2.MockTransport(lambda request: replies.pop(0))
        async with httpx2.AsyncClient(transport=transport) as client:
            for _ in range(times):
                await watch.read(client)

    asyncio.run(read(UNREACHABLE_READINGS - 1))
    assert watch.alarms.raised == []
    asyncio.run(read(1))
    assert [alarm.kind for alarm in watch.alarms.raised] == [AlarmKind.SERVER_UNREACHABLE]
    assert watch.fault == "its metrics answer HTTP 500"
    asyncio.run(read(1))
    assert watch.alarms.raised == []
    assert watch.fault is None


def test_a_pair_needs_equal_load_and_tokens() -> None:
    log = PairLog()
    assert log.add(ProbeAnswer(10, 1.0, 0), ProbeAnswer(10, 2.0, 0)) == 2.0
    assert log.add(ProbeAnswer(10, 1.0, 4), ProbeAnswer(10, 2.0, 3)) == 2.0
    assert log.add(ProbeAnswer(10, 1.0, 1), ProbeAnswer(10, 2.0, 0)) is None
    assert log.add(ProbeAnswer(1, 1.0, 0), ProbeAnswer(10, 2.0, 0)) is None
    assert log.num_dropped == 2
    assert log.speedup() is None
    log.add(ProbeAnswer(12, 1.0, 0), ProbeAnswer(12, 2.2, 0))
    found = log.speedup()
    assert found == ratio_of([Pair(10, 1.0, 0.2), Pair(10, 1.0, 0.2), Pair(12, 1.0, 2.2 / 12)])


def test_slower_with_speculation_is_an_alarm_and_chance_is_none() -> None:
    watch, rng = Watch(SERVER), random.Random(3)
    for _ in range(400):
        watch.on_pair(rng.choice([0.9, 1.1]))
    assert watch.alarms.raised == []
    for _ in range(120):
        watch.on_pair(0.9)
    [alarm] = watch.alarms.raised
    assert alarm.kind == AlarmKind.UNDER_BREAK_EVEN
    for _ in range(60):
        watch.on_pair(1.2)
    assert watch.alarms.raised == []


def test_a_second_loss_is_told_by_its_own_pairs() -> None:
    watch, told = Watch(SERVER), []
    for _ in range(2):
        while not watch.alarms.raised:
            watch.on_pair(0.9)
        told.append(watch.alarms.raised[0].message.rpartition(" in ")[2])
        while watch.alarms.raised:
            watch.on_pair(1.2)
    first, second = told
    assert first == second
    assert first.split()[0] == first.split()[2], "all of them were slower"


def test_an_acknowledged_loss_is_judged_anew() -> None:
    test = SlowerTest()
    watch = Watch(SERVER)
    for _ in range(60):
        test.add(0.5)
        watch.on_pair(0.5)
    assert test.is_slower
    assert watch.alarms.acknowledge(AlarmKind.UNDER_BREAK_EVEN, None, None)
    assert not watch.slower.is_slower
    watch.on_pair(0.5)
    assert watch.alarms.raised == []
