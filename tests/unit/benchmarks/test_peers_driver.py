"""The benchmark of peers: catalogue, worker protocol, and the driver against a fake worker."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.processes import Worker, WorkerRefused
from benchmarks.peers import driver as driving
from benchmarks.peers import environments, machine, model_run, run
from benchmarks.peers.catalog import Catalog, Mode, Model, fill_in, load_catalog
from benchmarks.peers.driver import Driver
from benchmarks.peers.environments import Elsewhere
from benchmarks.peers.groups import grouped
from benchmarks.peers.model_run import run_models
from benchmarks.peers.results import BATCH, Results, Sample, load, resume
from benchmarks.peers.selection import selected
from benchmarks.peers.workers import slipstream as ours
from benchmarks.peers.workload import Question, questions
from slipstream.errors import ConfigError

ROOT = Path(__file__).parents[3]
COMMAND = [sys.executable, "-m", "tests.kit.fake_peer"]
LOAD: dict[str, Any] = {"op": "load", "target": "t", "draft": "d", "threads": 2, "options": {}}


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    worker = Worker(COMMAND, tmp_path / "log")
    yield worker
    worker.close()


def generate(prompts: list[list[int]], **options: Any) -> dict[str, Any]:
    return {"op": "generate", "prompts": prompts, "max_tokens": 3, "options": options}


def test_a_worker_answers_on_a_clean_channel(worker: Worker) -> None:
    ready = worker.ask(LOAD, timeout_s=120)
    assert ready["versions"] == {"fake": "1"}
    assert ready["notes"] == ["threads 2"]
    assert ready["load_s"] >= 0
    answers = worker.ask(generate([[1, 2], [5]]), timeout_s=120)
    assert answers["token_ids"] == [[3, 3, 3], [5, 5, 5]]
    assert (answers["seconds"], answers["first_token_s"]) == (0.5, 0.1)
    assert worker.peak_memory_bytes() > 2**20
    worker.close()
    assert worker.process.returncode == 0
    assert "noise that a library prints" in worker.log.read_text()


def test_a_refusal_is_one_line_and_the_worker_goes_on(worker: Worker) -> None:
    with pytest.raises(WorkerRefused, match=r"^ValueError: no such thing$"):
        worker.ask({**LOAD, "options": {"refuse": "no such\n   thing"}}, timeout_s=120)
    worker.ask(LOAD, timeout_s=120)
    with pytest.raises(WorkerRefused, match=r"^one at a time$"):
        worker.ask(generate([[1], [2]], one_at_a_time=True), timeout_s=120)
    assert worker.ask(generate([[1]], one_at_a_time=True), timeout_s=120)["token_ids"] == [[1, 1, 1]]


def test_a_worker_that_dies_says_its_last_words(worker: Worker) -> None:
    worker.ask(LOAD, timeout_s=120)
    with pytest.raises(WorkerRefused, match=r"ended with 3: out of luck"):
        worker.ask(generate([[1]], die=True), timeout_s=120)


def test_a_late_worker_is_ended(tmp_path: Path) -> None:
    worker = Worker([sys.executable, "-c", "import time; time.sleep(60)"], tmp_path / "log")
    with pytest.raises(WorkerRefused, match="no answer within 0 s"):
        worker.ask(LOAD, timeout_s=0.1)
    assert worker.process.wait(timeout=120) != 0
    worker.close()


# --- the catalogue ---


def test_the_catalogue_has_what_the_benchmark_compares() -> None:
    catalog = load_catalog()
    assert [model.name for model in catalog.models] == ["embedded", "expanded-300m", "expanded-1g"]
    kinds = {(mode.peer, mode.kind, mode.weights) for mode in catalog.modes}
    for peer in ("slipstream", "transformers", "vllm", "openvino", "llamacpp"):
        assert {(peer, kind, "float32") for kind in ("off", "draft", "lookup")} <= kinds
    assert {("openvino", kind, w) for kind in ("off", "draft", "lookup") for w in ("int8", "int4")} <= kinds
    assert {("vllm", "suffix", "float32"), ("slipstream", "self", "float32")} <= kinds


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[mode]]\npeer = 'vlm'\nname = 'a'\nkind = 'off'", "did you mean 'vllm'"),
        ("[[mode]]\npeer = 'vllm'\nname = 'a'\nkind = 'on'", "unknown kind 'on'"),
        ("[[mode]]\npeer = 'vllm'\nname = 'a'\nkind = 'draft'", "needs one float32 mode of kind off"),
        ("[[mode]]\npeer = 'vllm'\nname = 'a'\nkind = 'off'\n" * 2, "two modes 'vllm/a/float32'"),
        ("[[mode]]\npeer = 'vllm'\nname = 'a'\nkind = 'off'\nlaod = {}", "did you mean 'load'"),
        ("[[mode]]\npeer = 'vllm'\nname = 'a'\nkind = 'off'\nmodels = ['x']", "unknown model 'x'"),
        ("[[modes]]", "did you mean 'mode'"),
        ("[[", "Invalid"),
    ],
)
def test_mistakes_in_the_catalogue(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "catalog.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_catalog(file)


def test_the_draft_is_filled_in_at_any_depth() -> None:
    filled = fill_in({"a": ["--md", "{draft}"], "b": {"model": "{draft}"}, "n": 4}, "/d")
    assert filled == {"a": ["--md", "/d"], "b": {"model": "/d"}, "n": 4}


def test_modes_that_load_alike_share_a_process() -> None:
    groups = grouped(load_catalog().modes)
    transformers = [group for group in groups if group.peer == "transformers"]
    assert [len(group.modes) for group in transformers] == [3]
    assert all(len(group.modes) == 1 for group in groups if group.peer == "openvino")


# --- the driver ---

MODEL = Model("embedded", "tiny", prompts_per_task=1, max_tokens=3, rounds=2, batch=True)
MODES = [
    Mode("vllm", "off", "off", batch=True),
    Mode("vllm", "single", "draft", batch=True, call={"one_at_a_time": True}),
    Mode("vllm", "no", "lookup", load={"refuse": "not on a CPU"}),
    Mode("vllm", "short", "suffix", load={"other": 1}, call={"short": 1}),
]


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """A driver whose every peer is the fake one, on a machine that counts as measured."""
    asked = [Question("a", 0, [[1]]), Question("b", 0, [[2]]), Question(BATCH, 0, [[1], [2]])]
    for module in (driving, model_run):
        monkeypatch.setattr(module, "questions", lambda model: asked)
    monkeypatch.setattr(environments, "ensure", lambda peer, folder, say, elsewhere: Path(sys.executable))
    monkeypatch.setattr(machine, "others_share", lambda: 0.0)
    monkeypatch.setattr(machine, "read_bandwidth_bytes_per_s", lambda threads: 1e10)
    monkeypatch.setattr(driving, "provenance", lambda: {"date": "today"})
    options = argparse.Namespace(
        venvs=tmp_path,
        models_dir=tmp_path,
        threads=2,
        seed=0,
        out=tmp_path / "results.json",
        elsewhere=Elsewhere(),
    )
    driver = Driver(options, Catalog([MODEL], MODES), Results({"models": {"embedded": {}}}, "code"))
    monkeypatch.setattr(driver, "start", lambda peer, name: Worker(COMMAND, tmp_path / "log"))
    return driver


def test_every_mode_answers_every_prompt_in_every_round(driver: Driver) -> None:
    run_models(driver)
    results = load(driver.options.out)
    expected = {(r, task, 0) for r in range(2) for task in ("a", "b")}
    assert results.done("embedded", "vllm/off/float32") == expected | {(0, BATCH, 0), (1, BATCH, 0)}
    assert results.done("embedded", "vllm/single/float32") == expected
    assert results.refused == {
        "embedded: vllm/no/float32": "ValueError: not on a CPU",
        "embedded: vllm/single/float32 (batch)": "one at a time",
        "embedded: vllm/short/float32": "it gave [11] tokens where 12 were asked for",
    }
    assert results.modes["embedded: vllm/off/float32"]["peak_memory_bytes"] > 2**20
    assert len(results.sessions) == 1


def test_a_refusal_names_no_folder_of_the_machine(driver: Driver) -> None:
    driver.refuse(MODEL, MODES[0], f"'{driver.options.models_dir}/expanded': its logits differ")
    assert list(driver.results.refused.values()) == ["'expanded': its logits differ"]


def test_a_rerun_adds_only_what_is_missing(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    run_models(driver)
    complete = list(driver.results.samples)
    lost = complete[2]
    results = load(driver.options.out)
    results.samples.remove(lost)
    again = Driver(driver.options, driver.catalog, results)
    monkeypatch.setattr(again, "start", driver.start)
    run_models(again)
    key = (lost.mode, lost.round, lost.task, lost.index)
    assert [(s.mode, s.round, s.task, s.index) for s in again.results.samples[len(complete) - 1 :]] == [key]
    assert len(again.results.samples) == len(complete)
    assert len(again.results.sessions) == 2


def test_a_stopped_run_is_no_refusal(driver: Driver) -> None:
    stopped = Mode("vllm", "stopped", "suffix", load={"other": 2}, call={"stop": True})
    driver.catalog = Catalog([MODEL], [MODES[0], stopped])
    with pytest.raises(SystemExit, match="was told to end"):
        run_models(driver)
    assert not load(driver.options.out).refused


def test_waves_when_memory_is_short(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_run, "RESERVE_BYTES", 2**60)
    running: list[int] = []
    start = driver.start

    def one_more(peer: str, name: str) -> Worker:
        running.append(sum(worker.process.poll() is None for worker in workers))
        workers.append(start(peer, name))
        return workers[-1]

    workers: list[Worker] = []
    monkeypatch.setattr(driver, "start", one_more)
    run_models(driver)
    assert set(running) == {0}
    assert len(driver.results.done("embedded", "vllm/off/float32")) == 6
    assert all(worker.process.poll() is not None for worker in workers)


def test_resume_refuses_what_was_not_taken_alike(tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    settings = {"threads": 2, "models": {"embedded": {"max_tokens": 3}}}
    sample = Sample("embedded", "vllm/off/float32", 0, "a", 0, 0.5, None, [[1, 2]], 1.0, 0.0)
    Results(settings, "code", samples=[sample]).save(file)
    assert resume(file, settings, "code", fresh=False).samples == [sample]
    wider = {"threads": 2, "models": {"expanded-1g": {"max_tokens": 9}}}
    assert set(resume(file, wider, "code", fresh=False).settings["models"]) == {"embedded", "expanded-1g"}
    assert resume(file, wider, "other", fresh=True).samples == []
    for changed in ({**settings, "threads": 4}, {"threads": 2, "models": {"embedded": {"max_tokens": 4}}}):
        with pytest.raises(ConfigError, match="other settings; give --fresh"):
            resume(file, changed, "code", fresh=False)
    with pytest.raises(ConfigError, match="other code; give --fresh"):
        resume(file, settings, "new", fresh=False)
    file.write_text("[]")
    with pytest.raises(ConfigError, match="holds no results"):
        resume(file, settings, "code", fresh=False)


def test_a_mode_that_was_changed_is_not_mixed_with_its_old_samples() -> None:
    mode = MODES[0]
    entry = {"embedded: vllm/off/float32": {"definition": dataclasses.asdict(mode)}}
    results = Results({}, "", modes=entry)
    run.check_definitions(results, Catalog([MODEL], [mode]))
    with pytest.raises(ConfigError, match="defined otherwise"):
        run.check_definitions(results, Catalog([MODEL], [dataclasses.replace(mode, call={"x": 1})]))


def test_what_the_command_line_selects() -> None:
    def ask(*arguments: str) -> Catalog:
        return selected(load_catalog(), run.parse_arguments(list(arguments)))

    quick = ask("--quick", "--models", "expanded-300m", "--peers", "vllm,openvino", "--modes", "off,int4")
    assert [model.name for model in quick.models] == ["expanded-300m"]
    assert quick.models[0].max_tokens == 24
    assert quick.models[0].rounds == 1
    assert {mode.peer for mode in quick.modes} == {"vllm", "openvino"}
    assert all(mode.kind == "off" or mode.weights == "int4" for mode in quick.modes)
    assert ask("--max-tokens", "5").models[2].max_tokens == 5
    for arguments, message in (
        (("--models", "embeded"), "did you mean 'embedded'"),
        (("--peers", "lama"), "unknown peer 'lama'"),
        (("--modes", "drafft"), "did you mean 'draft'"),
        (("--rounds", "0"), "rounds must be a whole number"),
        (("--peers", "llamacpp", "--modes", "int4"), "no mode is left"),
    ):
        with pytest.raises(ConfigError, match=message):
            ask(*arguments)


def test_the_command_line_says_in_one_line_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--quick", "--peers", "lama"]) == 2
    assert capsys.readouterr().err.startswith("error: unknown peer 'lama'")


def test_prompts_are_held_out_ones_of_every_task() -> None:
    asked = questions(dataclasses.replace(MODEL, prompts_per_task=2))
    tasks = {question.task for question in asked} - {BATCH}
    assert len(tasks) == 7
    assert len(asked) == 15
    assert len(asked[-1].prompts) == 8
    assert all(len(question.prompts) == 1 for question in asked[:-1])
    assert questions(dataclasses.replace(MODEL, batch=False))[-1].task != BATCH


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({}, "float32"),
        ({"quantization": "int4"}, "auto"),
        ({"quantization": "int8", "dtype": "float32"}, "float32"),
        ({"dtype": "bfloat16"}, "bfloat16"),
    ],
)
def test_our_worker_rounds_what_is_stored(
    options: dict[str, str], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(ours, "LLM", lambda _target, **engine: made.append(engine))
    ours.load({**LOAD, "max_model_len": 64, "max_num_seqs": 1, "options": options})
    assert made[0]["dtype"] == dtype
