"""What replicas count: sums that never fall, and steps that arrive as they were made."""

from __future__ import annotations

import json
from dataclasses import asdict

from slipstream import LLM, SamplingParams
from slipstream.assets import EMBEDDED_DRAFT
from slipstream.deploy.counts import MAX_GONE, Ledger, ReplicaCounts
from slipstream.deploy.fleet import ReplicaReport
from slipstream.deploy.stepped import StepCounter, steps_from_json, steps_to_json
from slipstream.metrics.decoded import DecodedRow
from slipstream.metrics.step import StepReport

DRAFTING = {"method": "draft_model", "model": EMBEDDED_DRAFT, "num_speculative_tokens": 3}


def tokens(num: int) -> ReplicaCounts:
    return ReplicaCounts(num_output_tokens=num, draft_s=num / 2)


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
    assert ReplicaReport.from_json(json.loads(json.dumps(asdict(report)))) == report
    row = DecodedRow("tenant", "task", "ngram", 3, 4, 4, 2, 3)
    other = row._replace(num_prompt_tokens=9, num_cached_tokens=8)
    steps = [
        (StepReport(3, 5, 60, 4, 4, 0.1, 0.2, 0.3), [row, other, row]),
        (StepReport(1, 8, 8, 0, 0, 0, 1), []),
    ]
    sent = json.loads(json.dumps(steps_to_json(steps)))
    assert len(sent[0][1]) == 2, "equal rows travel once"
    got = steps_from_json(sent)
    assert [step for step, _ in got] == [step for step, _ in steps]
    assert [sorted(rows) for _, rows in got] == [sorted(rows) for _, rows in steps]


def test_an_engines_steps_are_counted_beside_its_other_listeners() -> None:
    llm = LLM(kv_cache_bytes=64 * 2**20, max_num_seqs=4, speculative_config=DRAFTING)
    seen: list[StepReport] = []
    llm.engine.on_step = seen.append
    counter = StepCounter()
    counter.attach(llm.engine)
    prompts = ["The sea is wide and deep. " * 8, "The sea is wide and deep. " * 8 + "And", "A song"]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    found = [llm.generate([prompt], params)[0].metrics for prompt in prompts]
    report, steps = counter.report(llm.engine)
    counts = report.counts
    assert counts.num_steps == len(steps) == len(seen)
    assert [step for step, _ in steps] == seen
    assert counts.num_output_tokens == 72
    for name in ("prompt_tokens", "cached_tokens", "draft_tokens", "accepted_tokens"):
        wanted = sum(getattr(metrics, f"num_{name}") for metrics in found)
        assert wanted > 0, name
        assert getattr(counts, f"num_{name}") == wanted, name
    assert counts.num_passes == sum(metrics.num_steps for metrics in found)
    assert counts.verify_s > 0
    assert report.acceptance_length == 72 / counts.num_passes
    again, no_steps = counter.report(llm.engine)
    assert (again.counts, again.tokens_per_s, no_steps) == (counts, 0.0, [])
