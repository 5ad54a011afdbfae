"""The benchmark of peers with prompts of given lengths: what is asked, what is compared, what the page says."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.peers import conditions, contexts_picture, contexts_report, run
from benchmarks.peers.catalog import CONTEXTS, Catalog, Mode, load_catalog
from benchmarks.peers.checkpoints import target_path
from benchmarks.peers.conditions import ALONE, Condition
from benchmarks.peers.environments import LLAMA_TOOLS
from benchmarks.peers.figures import student
from benchmarks.peers.groups import grouped
from benchmarks.peers.model_run import ModelRun
from benchmarks.peers.page import write
from benchmarks.peers.results import Results, Sample
from benchmarks.peers.selection import selected
from benchmarks.peers.workload import questions, text
from slipstream.errors import ConfigError


def asked(*arguments: str) -> Catalog:
    return selected(load_catalog(CONTEXTS), run.parse_arguments(list(arguments)))


# --- what is asked ---


def test_a_text_has_exactly_its_length_and_another_one_another_text() -> None:
    short, long, other = text(128, 0), text(3000, 0), text(128, 1)
    assert (len(short), len(long), len(other)) == (128, 3000, 128)
    assert short == long[-128:]
    assert other != short
    assert len(text(40_000, 2)) == 40_000  # the samples begin again


def test_every_length_is_asked_in_every_condition_shorter_ones_first() -> None:
    catalog = asked(
        *("--contexts", "1536,128", "--models", "embedded", "--neighbours", "0,1", "--quota", "1.5"),
    )
    made = questions(catalog.models[0])
    assert [question.num_prompt_tokens for question in made] == [128] * 9 + [1536] * 9
    assert [question.task for question in made[:3]] == [
        "128",
        "128, 1 busy beside it",
        "128, a quota of 1.5 cores",
    ]
    assert made[0].prompts == made[1].prompts == made[2].prompts != made[3].prompts


def test_a_mode_is_not_asked_prompts_beyond_its_longest() -> None:
    catalog = asked("--contexts", "128,8192", "--models", "expanded-300m", "--peers", "slipstream")
    model = catalog.models[0]
    turn = ModelRun.__new__(ModelRun)
    turn.model, turn.asked = model, questions(model)
    groups = {mode.kind: group for group in grouped(catalog.modes) for mode in group.modes}
    by_kind = {
        kind: {q.num_prompt_tokens for q in turn.asked if turn.asks_of(group.modes[0], q)}
        for kind, group in groups.items()
    }
    assert by_kind["off"] == by_kind["suffix"] == {128, 8192}
    assert by_kind["draft"] == {128}
    assert turn.context_length_of(groups["draft"]) < 512 < 8192 < turn.context_length_of(groups["off"])


def test_the_command_line_takes_cells() -> None:
    catalog = asked(
        *(
            "--contexts",
            "128",
            "--peers",
            "slipstream,llamacpp",
            "--weights",
            "int8",
            "--modes",
            "off",
            "--quick",
        )
    )
    assert {mode.weights for mode in catalog.modes} == {"int8", "Q8_0"}
    assert {(m.prompts_per_task, m.rounds, m.max_tokens) for m in catalog.models} == {(1, 1, 24)}
    assert {mode.cache for mode in asked("--contexts", "128", "--caches", "int8").modes} == {"", "int8"}
    for arguments, message in (
        (("--contexts", "12k"), "numbers of tokens with commas"),
        (("--contexts", "8"), "at least 16 tokens"),
        (("--contexts", "128", "--weights", "int9"), "did you mean 'int8'"),
        (("--contexts", "128", "--neighbours", "x"), "numbers of busy loops"),
        (("--contexts", "128", "--peers", "vllm", "--weights", "int8"), "no mode is left"),
        (("--neighbours", "1"), "go with --contexts"),
    ):
        with pytest.raises(ConfigError, match=message):
            asked(*arguments)


def test_runs_of_other_lengths_add_to_the_same_results() -> None:
    """Lengths and conditions are part of a sample's own cell, not of the settings that must be alike."""
    short, long = (
        asked("--contexts", *which, "--models", "embedded").models[0] for which in (["128"], ["512"])
    )
    assert short != long
    assert short.as_settings() == long.as_settings()
    assert short.as_settings() != dataclasses.replace(short, max_tokens=5).as_settings()


def test_every_16_bit_and_integer_mode_has_peers_to_be_compared_with() -> None:
    modes = load_catalog(CONTEXTS).modes
    peers: dict[str, set[str]] = {}
    for mode in modes:
        peers.setdefault(mode.precision, set()).add(mode.peer)
    every = peers["int4"] & peers["int8"] & peers["bfloat16"] & peers["float32"]
    assert {"slipstream", "openvino", "llamacpp"} <= every
    assert Mode("llamacpp", "off", "off", weights="Q8_0").precision == "int8"


def test_a_copy_allows_longer_texts(tmp_path: Path) -> None:
    model = next(m for m in load_catalog(CONTEXTS).models if m.name == "embedded")
    copy = target_path(model, tmp_path)
    assert json.loads((copy / "config.json").read_text())["max_position_embeddings"] == model.positions
    assert copy.name == "embedded-16384"
    assert target_path(model, tmp_path) == copy
    assert [folder.name for folder in tmp_path.iterdir()] == [copy.name]


def test_what_lies_ready_is_checked_before_any_work(tmp_path: Path) -> None:
    def ready(*arguments: str) -> Any:
        return run.elsewhere(run.parse_arguments(list(arguments)))

    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").touch()
    for name in LLAMA_TOOLS:
        (tmp_path / name).touch()
    given = ready("--environments", f"openvino={tmp_path}", "--llama-binaries", str(tmp_path))
    assert given.environments == {"openvino": tmp_path}
    assert given.llama_binaries == tmp_path
    for arguments, message in (
        (("--environments", "openvino"), "takes PEER=FOLDER"),
        (("--environments", f"opnvino={tmp_path}"), "did you mean 'openvino'"),
        (("--environments", f"openvino={tmp_path}/none"), "has no bin/python"),
        (("--llama-binaries", f"{tmp_path}/bin"), "there is no llama-server"),
    ):
        with pytest.raises(ConfigError, match=message):
            ready(*arguments)


# --- conditions ---


def test_neighbours_compute_while_the_call_lasts() -> None:
    before = {process.pid for process in psutil.Process().children()}
    with Condition(neighbours=2).imposed([]):
        loops = [process for process in psutil.Process().children() if process.pid not in before]
        assert len(loops) == 2
        used_s = sum(sum(loop.cpu_times()[:2]) for loop in loops)
        deadline_s = time.monotonic() + 280
        while sum(sum(loop.cpu_times()[:2]) for loop in loops) <= used_s and time.monotonic() < deadline_s:
            time.sleep(0.02)
        assert sum(sum(loop.cpu_times()[:2]) for loop in loops) > used_s
    assert not any(loop.is_running() for loop in loops)


def test_a_neighbour_ends_with_its_driver() -> None:
    script = (
        "import os, subprocess, sys; from benchmarks.peers.conditions import BUSY\n"
        "loop = subprocess.Popen([sys.executable, '-c', BUSY, str(os.getpid())], stdout=subprocess.DEVNULL)\n"
        "print(loop.pid, flush=True); os._exit(0)"
    )
    shown = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, check=True)
    deadline_s = time.monotonic() + 280
    while psutil.pid_exists(int(shown.stdout)) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not psutil.pid_exists(int(shown.stdout))


@pytest.mark.parametrize("version", [1, 2])
def test_a_quota_is_set_for_the_call_and_lifted(tmp_path: Path, version: int) -> None:
    if version == 2:
        (tmp_path / "cgroup.controllers").write_text("cpuset cpu io")
    else:
        (tmp_path / "cpu").mkdir()
        (tmp_path / "cpu/cpu.cfs_quota_us").write_text("-1")
    group = tmp_path / ("slipstream-peers" if version == 2 else "cpu/slipstream-peers")
    file = group / ("cpu.max" if version == 2 else "cpu.cfs_quota_us")
    with conditions.quota(1.5, [17], tmp_path):
        assert file.read_text() == ("150000 100000" if version == 2 else "150000")
        assert (group / "cgroup.procs").read_text() == "17"
    assert file.read_text() == ("max 100000" if version == 2 else "-1")


def test_a_quota_that_cannot_be_set_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there are none at"), conditions.quota(1.5, [], tmp_path):
        pass
    (tmp_path / "cgroup.controllers").write_text("cpu")
    (tmp_path / "slipstream-peers").touch()  # no folder can be made
    with (
        pytest.raises(ConfigError, match="control group that can be written"),
        conditions.quota(1.5, [], tmp_path),
    ):
        pass
    with pytest.raises(ConfigError, match="positive number of cores"):
        conditions.check([Condition(quota_cores=0.0)])


# --- figures and the page ---


def test_students_interval_is_the_t_tests() -> None:
    assert student([]) is None
    ratio = student([1.0, 2.0, 4.0])
    assert ratio is not None
    assert (ratio.value, ratio.num_pairs) == (pytest.approx(2.0), 3)
    assert ratio.high / ratio.value == pytest.approx(2 ** (4.302653 / 3**0.5))
    assert ratio.low * ratio.high == pytest.approx(4.0)
    assert str(student([1.5])) == "1.50 (one pair)"
    assert str(student([1.5, 1.5])) == "1.50 (1.50 to 1.50)"


SPEEDS = {
    # prompt tokens/s, ms a token
    "slipstream/off/float32, float32 cache": (400, 40.0),
    "slipstream/off/bfloat16, float32 cache": (500, 20.0),
    "slipstream/off/int8, int8 cache": (1800, 10.0),
    "slipstream/draft 4/int8, int8 cache": (1700, 5.0),
    "openvino/off/float32": (800, 44.0),
    "openvino/off/int8": (1500, 15.0),
    "openvino/draft 4/int8": (1400, 12.0),
    "llamacpp/off/Q8_0": (300, 30.0),
    "openvino/off/int4": (1900, 8.0),
}
KINDS = {"off": "off", "draft 4": "draft"}


def results(conditions: tuple[str, ...] = ("",), lengths: tuple[int, ...] = (128, 8192)) -> Results:
    modes, samples = {}, []
    for key, (rate, ms) in SPEEDS.items():
        peer, name, weights = key.split("/")
        weights, _, cache = weights.partition(", ")
        definition = {"peer": peer, "name": name, "kind": KINDS[name], "weights": weights}
        definition |= {"cache": cache.removesuffix(" cache"), "load": {}, "call": {}}
        modes[f"m: {key}"] = {"definition": definition, "versions": {peer: "1"}, "notes": ["as is"]}
        for length in lengths:
            for beside in conditions:
                for index, wobble in enumerate((0.9, 1.0, 1.1)):
                    slower = 1 + 0.5 * bool(beside) * (peer != "slipstream")
                    first_s = length / rate * wobble * slower
                    seconds = first_s + 10 * ms / 1e3 * wobble * slower
                    task = f"{length}, {beside}" if beside else f"{length}"
                    sample = Sample("m", key, 0, task, index, seconds, first_s, [[7] * 11], 1.0, 0.01)
                    samples.append(dataclasses.replace(sample, peak_memory_bytes=length * 2**20))
    session = {
        "cpu": "a CPU",
        "instructions": "AVX2",
        "cores": 2,
        "threads": 2,
        "memory_bytes": 2**34,
        "read_bandwidth_bytes_per_s": 2e10,
        "date": "2026-11-23",
        "commit": "c0ffee",
        "python": "3.11",
        "command": "python -m benchmarks.peers.run --contexts 128",
    }
    settings = {"contexts": True, "models": {"m": {}}}
    models = {"m": {"title": "a model", "parameters": 10**8}}
    return Results(settings, "code", [session], models, modes, {"m: vllm/off/float32": "no | room"}, samples)


def page_of(made: Results) -> list[str]:
    return contexts_report.page(made, "r.json", "r.svg").splitlines()


def bars(lines: list[str], what: str) -> list[str]:
    return [line for line in lines if line.startswith(f"| {what}")]


def test_bars_pair_our_fastest_mode_with_the_peers_at_the_same_bits() -> None:
    lines = page_of(results())
    [prompt] = bars(lines, "prompt, int8")  # 128 has no bar, int4 is not the same bits
    assert (
        "| m | 8192 | Slipstream, off, int8, int8 cache | OpenVINO GenAI, off, int8 | ≥ 1.0 | 1.20" in prompt
    )
    assert prompt.endswith("| 3 | yes |")
    [missed] = bars(lines, "prompt, float32")
    assert "0.50 (0.50 to 0.50)" in missed
    assert missed.endswith("**no** |")
    assert all("2.00 (2.00 to 2.00) | 3 | yes" in line for line in bars(lines, "bfloat16 off, float32 cache"))
    [first], [decode] = bars(lines, "first token, int8"), bars(lines, "decode, int8")
    assert ("1.20" in first, "1.50" in decode) == (True, True)
    [best] = bars(lines, "best mode over the best peer's best, int8")
    assert (
        "| 128 | Slipstream, draft 4, int8, int8 cache | OpenVINO GenAI, draft 4, int8 | ≥ 2.2 | 2.40" in best
    )


def test_tables_have_a_column_a_length_and_the_spread_of_the_samples() -> None:
    lines = page_of(results())
    assert "| prompt tokens/s | 128 | 8,192 |" in lines
    assert "| OpenVINO GenAI, off, int4 | 1900 (1727 to 2111) | 1900 (1727 to 2111) |" in lines
    assert "| OpenVINO GenAI, off, int8 | 15.0 (13.5 to 16.5) | 15.0 (13.5 to 16.5) |" in lines
    assert "| llama.cpp, off, Q8_0 | 0.12 | 8.00 |" in lines  # peak memory
    assert "| vLLM (CPU), off, float32 | no \\| room |" in lines


def test_our_texts_are_compared_with_off_and_16_bits_with_float32() -> None:
    lines = page_of(results())
    off = "Slipstream, off, int8, int8 cache"
    assert f"| Slipstream, draft 4, int8, int8 cache | {off} | 6 of 6 |" in lines
    widened, kept = "Slipstream, off, float32, float32 cache", "Slipstream, off, bfloat16, float32 cache"
    assert f"| {kept} | {widened} | 6 of 6 |" in lines
    other = results()
    other.samples = [
        dataclasses.replace(s, token_ids=[[8]]) if ("draft 4" in s.mode and s.index == 0) else s
        for s in other.samples
    ]
    assert f"| Slipstream, draft 4, int8, int8 cache | {off} | 4 of 6 |" in page_of(other)


def test_neighbours_are_a_table_of_their_own() -> None:
    made = results(conditions=("", "1 busy beside it"), lengths=(128,))
    lines = page_of(made)
    rows = [line for line in lines if line.startswith("| 128 | Slipstream, off, int8, int8 cache")]
    assert [row.split(" | ")[3] for row in rows] == ["alone", "1 busy beside it"]
    assert rows[0].endswith("1.20 (1.20 to 1.20) | 1.50 (1.50 to 1.50) |")
    assert rows[1].endswith("1.80 (1.80 to 1.80) | 2.25 (2.25 to 2.25) |")
    assert len(bars(lines, "best mode")) == 1  # what was beside is no bar
    assert "| prompt tokens/s | 128 |" in lines


def test_the_page_and_its_picture_are_written_together(tmp_path: Path) -> None:
    written = write(results(), tmp_path / "c.json", tmp_path / "c.md")
    assert [path.name for path in written] == ["c.md", "c.svg"]
    assert "(c.svg)" in (tmp_path / "c.md").read_text()
    drawn = (tmp_path / "c.svg").read_text()
    assert drawn.count("<polyline") == 7  # off alone, each peer and precision
    assert "llama.cpp, Q8_0: 30" in drawn
    assert contexts_picture.picture(results(lengths=(128,))) is None
    [alone] = write(results(lengths=(128,)), tmp_path / "d.json", tmp_path / "d.md")
    assert "svg" not in alone.read_text()


def test_alone_is_the_default() -> None:
    assert asked("--contexts", "128").models[0].conditions == (ALONE,)
