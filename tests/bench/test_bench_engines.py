"""Real engines on the embedded pair: what is measured, how it is interleaved, how it ends early."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bench_cases import key_names
from typer.testing import CliRunner

from slipstream.assets import EMBEDDED_DRAFT
from slipstream.assets.workload.reading import Question, Workload
from slipstream.cli.main import app
from slipstream.config import SpeculativeConfig
from slipstream.core.metrics.step import StepReport
from slipstream.core.request import FinishReason
from slipstream.engine.closed_loop import BenchJob, closed_loop
from slipstream.engine.engine import Engine
from slipstream.engine.factory import make_engine
from slipstream.errors import ConfigError, RequestError
from slipstream.sampling.params import SamplingParams
from slipstream.tools.bench.engine import engines as engines_module
from slipstream.tools.bench.engine.configurations import sweep
from slipstream.tools.bench.engine.engines import Engines
from slipstream.tools.bench.engine.local import BenchPlan, run
from slipstream.tools.bench.result import BenchResult
from slipstream.tools.bench.settings import BenchSettings

KV = 40 * 2**20
ROOT = Path(__file__).parents[2]
DRAFT = SpeculativeConfig("draft_model", options={"model": EMBEDDED_DRAFT, "num_speculative_tokens": 2})
NGRAM = SpeculativeConfig("ngram")
QUESTIONS = [
    Question(
        "sql",
        "line 1",
        text="Write a SQL query. How many losses does the team from Hawthorn have?",
        output_tokens=6,
    ),
    Question("howto", "line 2", text="Show me how to use the command `tar`.", output_tokens=9),
    Question("sql", "line 3", text="Write a SQL query. Which player is from Spain?", output_tokens=7),
]


def plan(*drafters: SpeculativeConfig, **asked: Any) -> BenchPlan:
    questions = asked.pop("questions", QUESTIONS)
    options = asked.pop("engine_options", {"kv_cache_bytes": KV})
    params = SamplingParams(temperature=asked.pop("temperature", 0.0), seed=5)
    asked = {"max_tokens": 8, **asked}
    return BenchPlan(
        BenchSettings(Workload("w.jsonl", questions), params, **asked),
        sweep(drafters, []),
        engine_options=options,
    )


@pytest.fixture(scope="module")
def measured() -> BenchResult:
    """Two drafters, one and two requests at once, two repeats, lengths from the data."""
    return run(plan(DRAFT, NGRAM, max_tokens=None, concurrencies=(1, 2), repeats=2, temperature=0.7))


def test_every_figure_is_there(measured: BenchResult) -> None:
    assert measured.complete
    assert [c.name for c in measured.configurations] == ["off", "draft γ=2", "ngram γ=4"]
    for concurrency in (1, 2):
        for configuration in measured.configurations:
            f = measured.of(configuration.name, concurrency)
            assert f is not None
            assert f.num_requests == 6
            assert f.num_output_tokens == 2 * (6 + 9 + 7)
            assert f.tokens_per_s is not None
            assert f.time_shares is not None
            assert 0 < f.time_shares.verify < 1
            assert 0 <= f.time_shares.other < 1
            if configuration.method == "off":
                continue
            assert f.speedup is not None
            assert f.identity is not None
            assert f.identity.num_identical == f.identity.num_compared == 6
    assert measured.of("draft γ=2", 1, "sql").speedup_interval is not None  # type: ignore[union-attr]
    assert measured.of("draft γ=2", 1, "howto").num_requests == 2  # type: ignore[union-attr]
    two_at_once = measured.of("off", 2)
    assert two_at_once is not None
    assert two_at_once.num_in_flight is not None
    assert 1 < two_at_once.num_in_flight <= 2


def test_the_prediction_comes_from_the_steps(measured: BenchResult) -> None:
    figures = measured.of("draft γ=2", 1)
    assert figures is not None
    p = figures.prediction
    assert p is not None
    assert p.c is not None
    assert 0 < p.gamma <= 2
    assert (
        p.num_steps + p.num_unmatched_steps == figures.acceptance.num_steps - 6
    )  # the steps of the prompts are out
    assert p.predicted_speedup == pytest.approx(figures.acceptance.length / (p.gamma * p.c + p.v))  # type: ignore[operator]


def test_runs_are_interleaved(measured: BenchResult) -> None:
    assert measured.interleaved_by == "batch"
    order = [(t.repeat, t.batch, t.configuration) for t in measured.timings if t.concurrency == 1]
    assert len(order) == 2 * 3 * 3
    for begin in range(0, len(order), 3):
        assert len({place[:2] for place in order[begin : begin + 3]}) == 1
    assert [place[2] for place in order[:4]] == ["off", "draft γ=2", "ngram γ=4", "draft γ=2"]


def test_everything_of_the_json_is_in_the_guide(measured: BenchResult) -> None:
    page = (ROOT / "docs/guides/bench.md").read_text()

    for name in key_names(json.loads(json.dumps(measured.as_json()))):
        assert f"`{name}`" in page, name


def test_engines_share_the_target() -> None:
    engines = Engines(None, sweep([DRAFT, NGRAM], []), {"kv_cache_bytes": KV}, 2)
    assert engines.side_by_side
    assert len({id(engines.get(number).model) for number in range(3)}) == 1
    assert engines.is_cold(0, 1)
    assert not engines.is_cold(0, 1)
    assert engines.is_cold(0, 2)
    with pytest.raises(ConfigError, match="engines that share a target need one dtype"):
        make_engine(None, None, {"dtype": "bfloat16"}, engines.get(0))


def test_where_memory_is_short_one_engine_is_held_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines_module, "available_bytes", lambda device: KV // 2)
    result = run(plan(DRAFT, repeats=2, questions=QUESTIONS[:2]))
    assert result.interleaved_by == "round"
    order = [(t.repeat, t.configuration, t.batch) for t in result.timings]
    first = [(0, name, batch) for name in ("off", "draft γ=2") for batch in (0, 1)]
    assert order == [*first, *((1, name, batch) for name in ("draft γ=2", "off") for batch in (0, 1))]
    identity = result.of("draft γ=2", 1).identity  # type: ignore[union-attr]
    assert identity is not None
    assert identity.num_identical == 4


def test_engines_that_cannot_be_made_together_are_made_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A third of the memory is too little for one request of 512, all of it is enough."""
    options = {"max_model_len": 512, "kv_memory_fraction": 0.9}
    per_token = make_engine(None, DRAFT, {"kv_cache_bytes": KV}).memory_plan.kv_bytes_per_token
    monkeypatch.setattr("slipstream.engine.memory.available_bytes", lambda device: 800 * per_token)
    engines = Engines(None, sweep([DRAFT, NGRAM], []), options, 1)
    assert not engines.side_by_side
    first = engines.get(0)
    assert engines.get(0) is first
    second = engines.get(1)
    assert engines.get(0) is not first
    assert second.memory_plan.max_model_len == 512
    assert engines.is_cold(0, 1)


def test_a_closed_loop_keeps_so_many_under_way() -> None:
    engine = make_engine(None, None, {"kv_cache_bytes": KV})
    seen: list[int] = []
    tasks: set[str] = set()
    engine.on_step = None
    engine.on_observe = lambda items: tasks.update(item.sequence.task for item in items)
    step = engine.step

    def watched() -> Any:
        updates = step()
        stats = engine.stats()
        finished = sum(update.output is not None for update in updates)
        seen.append(stats.num_running + stats.num_waiting + finished)
        return updates

    engine.step = watched  # type: ignore[method-assign]
    jobs = [
        BenchJob(
            n, [5, 6, 7 + n], SamplingParams(max_tokens=3 + n, temperature=0, ignore_eos=True), f"task {n}"
        )
        for n in range(5)
    ]
    answers, steps, wall_s = closed_loop(engine, jobs, 2)
    assert [(a.prompt, len(a.token_ids), a.num_first_tokens) for a in answers] == [
        (n, 3 + n, 1) for n in range(5)
    ]
    assert tasks == {f"task {n}" for n in range(5)}
    assert max(seen) == 2
    assert all(count == 2 for count in seen[: -2 - 4])  # full until no request waits
    assert wall_s > 0
    assert steps.verify_s > 0
    assert engine.on_step is None
    assert engine.integrity() == []


def test_a_step_reports_what_it_did() -> None:
    engine = make_engine(None, DRAFT, {"kv_cache_bytes": KV})
    reports: list[StepReport] = []
    engine.on_step = reports.append
    engine.add_request("r", [5, 6, 7, 8], SamplingParams(max_tokens=6, temperature=0, ignore_eos=True))
    metrics = None
    while engine.has_unfinished:
        for update in engine.step():
            metrics = update.output.metrics if update.output else metrics
    assert metrics is not None
    assert [report.only_decodes for report in reports] == [False] + [True] * (len(reports) - 1)
    assert (reports[0].num_rows, reports[0].num_context_tokens) == (4, 4)
    assert sum(report.num_draft_tokens for report in reports) == metrics.num_draft_tokens
    assert max(report.draft_depth for report in reports) == 2
    assert sum(report.draft_s for report in reports) == pytest.approx(metrics.draft_s)
    assert sum(report.verify_s for report in reports) == pytest.approx(metrics.verify_s)
    lengths = [report.num_context_tokens for report in reports]
    assert lengths == sorted(lengths)
    assert lengths[-1] < 4 + 6


# --- ended early -------------------------------------------------------------------------------------------------


def interrupt_at(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Ctrl-C in the engine's step `number`."""
    step, count = Engine.step, iter(range(10**6))

    def interrupted(engine: Engine) -> Any:
        if next(count) == number:
            raise KeyboardInterrupt
        return step(engine)

    monkeypatch.setattr(Engine, "step", interrupted)


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    file = tmp_path / "w.jsonl"
    rows = [{"prompt": question.text, "task": question.task} for question in QUESTIONS]
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


def test_ctrl_c_reports_what_was_measured(
    monkeypatch: pytest.MonkeyPatch, workload: Path, tmp_path: Path
) -> None:
    interrupt_at(
        monkeypatch, 2 * 16 + 40
    )  # two warm-ups of at most 16 steps, then runs of 8 steps without speculation
    args = [
        "--workload",
        str(workload),
        "--max-tokens",
        "8",
        "--ignore-eos",
        "--spec",
        "ngram",
        "--repeats",
        "50",
    ]
    done = CliRunner().invoke(
        app, ["bench", *args, "--json", "--output", str(tmp_path), "--kv-cache-bytes", "32MiB"]
    )
    assert done.exit_code == 130
    result = json.loads(done.stdout)
    assert not result["complete"]
    assert len(result["timings"]) >= 4
    assert all(len(timing["prompts"]) == 1 for timing in result["timings"])
    whole = next(f for f in result["figures"] if f["configuration"] == "ngram γ=4" and f["task"] is None)
    assert whole["speedup"] is not None
    assert json.loads((tmp_path / "bench.json").read_text()) == result
    assert "interrupted: the figures are of the" in (tmp_path / "bench.html").read_text()


def test_ctrl_c_before_anything_was_measured(monkeypatch: pytest.MonkeyPatch, workload: Path) -> None:
    interrupt_at(monkeypatch, 3)
    done = CliRunner().invoke(
        app, ["bench", "--workload", str(workload), "--spec", "ngram", "--kv-cache-bytes", "32MiB"]
    )
    assert done.exit_code == 130
    assert "interrupted before anything was measured" in done.stdout


def test_an_interrupted_loop_leaves_the_engine_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(None, DRAFT, {"kv_cache_bytes": KV})
    interrupt_at(monkeypatch, 2)
    with pytest.raises(KeyboardInterrupt):
        closed_loop(engine, [BenchJob(0, [5, 6], SamplingParams(max_tokens=9, ignore_eos=True))] * 3, 2)
    assert engine.integrity() == []
    assert engine.on_step is None


# --- prompts ---------------------------------------------------------------------------------------------------


def test_later_turns_are_the_same_for_all() -> None:
    question = Question(
        "a", "line 1", messages=({"role": "user", "content": "Hello."},), later_turns=("And?",)
    )
    result = run(plan(NGRAM, questions=[question]))
    [off_1, ngram_1, *_] = result.timings
    assert sorted(n for t in result.timings for n in t.prompts) == [0, 0, 1, 1]
    prompts = {f.configuration: f.num_prompt_tokens for f in result.figures}
    assert prompts["off"] == prompts["ngram γ=4"] > 20
    assert off_1.num_output_tokens == ngram_1.num_output_tokens


def test_conversations_as_plain_text() -> None:
    """As a model without a chat template has them, and `--raw` asks for."""
    conversation = Question("a", "line 1", messages=({"role": "user", "content": "Once upon a time"},))
    text = Question("a", "line 1", text="Once upon a time\n")

    def num_prompt_tokens(question: Question, raw: bool) -> set[int]:
        return {one.num_prompt_tokens for one in run(plan(NGRAM, raw=raw, questions=[question])).figures}

    assert num_prompt_tokens(conversation, raw=True) == num_prompt_tokens(text, raw=True)
    assert num_prompt_tokens(conversation, raw=True) != num_prompt_tokens(conversation, raw=False)


def test_what_cannot_be_asked() -> None:
    with pytest.raises(
        RequestError, match="4 concurrent requests need as many prompts, but the workload has 3"
    ):
        run(plan(NGRAM, concurrencies=(4,)))
    with pytest.raises(RequestError, match="none of the 3 prompts of w"):
        run(plan(NGRAM, engine_options={"kv_cache_bytes": KV, "max_model_len": 30}, max_tokens=20))
    with pytest.raises(ConfigError, match="2 concurrent requests need --max-num-seqs of at least 2, got 1"):
        run(plan(NGRAM, engine_options={"max_num_seqs": 1}, concurrencies=(2,)))


def test_answers_of_fixed_lengths_are_that_long(measured: BenchResult) -> None:
    assert {n for t in measured.timings for n in t.num_output_tokens} == {6, 7, 9}
    assert FinishReason.LENGTH == "length"
