"""The report of the benchmark of peers: arithmetic on samples whose answers are known."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.rounds import quartiles
from benchmarks.peers import page, picture, report
from benchmarks.peers.figures import (
    best_by_task,
    equal_texts,
    geometric_mean,
    over_tasks,
    paired_ratios,
    task_mean,
)
from benchmarks.peers.results import BATCH, Results, Sample, load

BARS = re.compile(
    r'<rect class="[a-z ]+" x="190" y="\d+" width="([\d.]+)"[^\n]*\n  <text[^>]*>([\d.]+)</text>'
)


def sample(
    mode: str,
    task: str,
    speed: float,
    *,
    model: str = "embedded",
    round_: int = 0,
    tokens: int = 11,
    text: int = 1,
) -> Sample:
    """`tokens` tokens at `speed` tokens/s, the first after a tenth of the time."""
    seconds = tokens / speed
    return Sample(model, mode, round_, task, 0, seconds, seconds / 10, [[text] * tokens], 2 * seconds, 0.0)


def test_pairs_are_the_same_prompt_in_the_same_round() -> None:
    ours = [sample("x", "a", 30), sample("x", "a", 20, round_=1), sample("x", "b", 5)]
    theirs = [sample("y", "a", 10), sample("y", "a", 5, round_=1), sample("y", "c", 5)]
    assert paired_ratios(ours, theirs) == {"a": [pytest.approx(3), pytest.approx(4)]}


def test_tasks_weigh_alike_however_many_pairs_they_have() -> None:
    ratio = over_tasks({"a": [4.0, 4.0, 4.0, 4.0], "b": [1.0]})
    assert ratio is not None
    assert ratio.value == pytest.approx(2.0)
    assert ratio.num_pairs == 5
    assert ratio.low == pytest.approx(1.0)
    assert ratio.high == pytest.approx(4.0)
    assert over_tasks({}) is None


def test_the_interval_narrows_to_a_ratio_that_never_varies_and_is_reproducible() -> None:
    same = over_tasks({task: [1.5, 1.5] for task in "abcdefg"})
    assert same is not None
    assert (same.low, same.value, same.high) == pytest.approx((1.5, 1.5, 1.5))
    varied = {task: [1.0 + 0.1 * number, 1.2] for number, task in enumerate("abcdefg")}
    assert over_tasks(varied) == over_tasks(varied)
    assert str(same) == "1.50 (1.50 to 1.50)"


def test_the_interval_sees_repetitions_too() -> None:
    ratio = over_tasks({task: [1.0, 2.0] for task in "abcdefg"})
    assert ratio is not None
    assert ratio.low < 2**0.5 - 0.05 < 2**0.5 + 0.05 < ratio.high


def test_means_and_quartiles() -> None:
    assert geometric_mean([1, 4]) == pytest.approx(2)
    assert task_mean([sample("x", "a", 8), sample("x", "a", 2), sample("x", "b", 1)]) == pytest.approx(2)
    assert quartiles([1, 2, 3, 4, 5]) == (2, 3, 4)
    assert quartiles([7.0]) == (7.0, 7.0, 7.0)


def test_speeds_of_a_sample() -> None:
    one = sample("x", "a", 10, tokens=11)
    assert one.tokens_per_s == pytest.approx(10)
    assert one.decode_tokens_per_s == pytest.approx(10 / (1.1 * 0.9))
    untold = Sample("m", "x", 0, "a", 0, 1.0, None, [[1]], 0, 0)
    assert untold.decode_tokens_per_s is None


def test_the_best_mode_is_chosen_task_by_task() -> None:
    by_mode = {
        "x": [sample("x", "a", 9), sample("x", "b", 1)],
        "y": [sample("y", "a", 2), sample("y", "b", 3), sample("y", "b", 2, round_=1)],
    }
    assert [(s.mode, s.task) for s in best_by_task(by_mode)] == [("x", "a"), ("y", "b"), ("y", "b")]


def test_a_text_counts_as_equal_only_if_it_is_in_every_round() -> None:
    off = [sample("off", task, 1) for task in "abc"]
    ours = [
        sample("x", "a", 1),
        sample("x", "a", 1, round_=1),
        sample("x", "b", 1),
        sample("x", "b", 1, round_=1, text=2),
        sample("x", "d", 1),
    ]
    assert equal_texts(ours, off) == (1, 2)


# --- the page ---


def entry(peer: str, kind: str, weights: str = "float32") -> dict[str, Any]:
    return {
        "definition": {"peer": peer, "kind": kind, "weights": weights, "load": {}, "call": {}},
        "versions": {peer: "1.0"},
        "notes": ["as recommended"],
        "load_s": 1.0,
        "peak_memory_bytes": 2**30,
        "idle_cores": 0.0,
    }


def results(**speeds: float) -> Results:
    """One model of each name with every mode that the bars look at, at the given speeds (tokens/s)."""
    speed = {
        "slipstream/off/float32": 12.0,
        "slipstream/draft 4/float32": 30.0,
        "slipstream/off/int8": 40.0,
        "slipstream/draft 4/int8": 80.0,
        "transformers/off/float32": 5.0,
        "openvino/off/float32": 10.0,
        "openvino/draft 4/float32": 20.0,
        "openvino/off/int8": 30.0,
        "openvino/off/int4": 32.0,
        "vllm/off/float32": 8.0,
        **speeds,
    }
    names = ("embedded", "expanded-300m", "expanded-1g")
    modes = {}
    samples = []
    for model in names:
        for key, value in speed.items():
            peer, name, weights = key.split("/")
            modes[f"{model}: {key}"] = entry(peer, name.split()[0], weights)
            samples += [sample(key, task, value, model=model) for task in ("a", "b")]
            if peer in ("slipstream", "vllm"):
                samples.append(sample(key, BATCH, 4 * value, model=model))
    session = {
        "cpu": "a CPU",
        "cores": 2,
        "threads": 2,
        "memory_bytes": 2**34,
        "read_bandwidth_bytes_per_s": 2e10,
        "date": "2026-11-21",
        "commit": "c0ffee",
        "python": "3.11",
        "command": "python -m benchmarks.peers.run",
    }
    models = {name: {"title": f"model {name}", "parameters": 10**8} for name in names}
    refused = {"embedded: vllm/suffix/float32": "ImportError: no | suffix"}
    return Results(
        {"models": {name: {} for name in names}}, "code", [session], models, modes, refused, samples
    )


def bar_lines(page: str, what: str) -> list[str]:
    return [line for line in page.splitlines() if line.startswith(f"| {what}")]


def test_bars_are_measured_against_the_fastest_peer() -> None:
    text = report.page(results(), "r.json")
    [embedded, small, large] = bar_lines(text, "speculation off over the fastest peer's off")
    assert "| OpenVINO GenAI, off | ≥ 1.0 | 1.20 (1.20 to 1.20) | yes |" in embedded
    assert "expanded-300m" in small
    assert "expanded-1g" in large
    assert "| 1.50 (1.50 to 1.50) | yes |" in bar_lines(text, "the same draft")[0]
    assert "| 2.50 (2.50 to 2.50) | yes |" in bar_lines(text, "best mode by task over own off")[0]
    best = bar_lines(text, "best mode by task over the best peer's")[0]
    assert "OpenVINO GenAI (draft 4) | ≥ 1.15 | 1.50" in best
    int8 = bar_lines(text, "int8 off")[0]
    assert "| OpenVINO GenAI, off, int4 | ≥ 1.2 | 1.25 (1.25 to 1.25) | yes |" in int8
    assert "| 2.50 (2.50 to 2.50) | yes |" in bar_lines(text, "int8 best mode")[0]
    batch = bar_lines(text, "8 requests at once")[0]
    assert "Slipstream, draft 4 over vLLM (CPU), off | ≥ 1.4 | 3.75" in batch


def test_a_missed_bar_says_no_and_one_that_was_not_measured_says_so() -> None:
    text = report.page(results(**{"llamacpp/off/float32": 24.0}), "r.json")
    assert "| llama.cpp, off | ≥ 1.0 | 0.50 (0.50 to 0.50) | **no** |" in text
    alone = results()
    alone.samples = [s for s in alone.samples if s.mode.startswith("slipstream/")]
    line = bar_lines(report.page(alone, "r.json"), "speculation off over")[0]
    assert line.endswith("| nothing to compare | ≥ 1.0 | not measured | — |")


def test_int8_texts_are_compared_with_int8_off() -> None:
    good = results()
    assert "| 100 % | 2 of 2 | yes |" in bar_lines(report.page(good, "r.json"), "int8 texts")[0]
    key = "slipstream/draft 4/int8"
    bad = results()
    bad.samples = [
        sample(s.mode, s.task, 80, model=s.model, text=9) if (s.mode, s.task) == (key, "a") else s
        for s in bad.samples
    ]
    assert "| 100 % | 1 of 2 | **no** |" in bar_lines(report.page(bad, "r.json"), "int8 texts")[0]


def test_the_roofline_is_the_weights_read_by_every_step() -> None:
    text = report.page(results(), "r.json")
    [line, *_] = [line for line in text.splitlines() if line.startswith("| Slipstream, off |")]
    decode = 10 / (11 / 12 * 0.9)  # 1e8 parameters of 4 bytes, this many times a second, of 20 GB/s
    assert f"| {4e8 * decode / 1e9:.1f} GB/s | {20 / (0.4 * decode):.2f} |" in line


def test_the_page_says_what_could_not_run_and_where_it_came_from() -> None:
    text = " ".join(report.page(results(), "r.json").split())
    assert "| vLLM (CPU), suffix | ImportError: no \\| suffix |" in text
    assert "a CPU, 2 cores, 2 threads, 16 GiB; memory read at 20.0 GB/s" in text
    assert "| Slipstream, draft 4, int8 | slipstream 1.0 | as recommended |" in text
    assert "[r.json](r.json)" in text
    assert "used 0.000 cores on average" in text


def test_disturbed_samples_are_counted() -> None:
    noisy = results()
    noisy.samples.append(Sample("embedded", "vllm/off/float32", 1, "a", 0, 2.0, None, [[1] * 11], 4.0, 1.0))
    noisy.modes["embedded: vllm/off/float32"]["idle_cores"] = 0.25
    text = " ".join(report.page(noisy, "r.json").split())
    longer = sum(s.seconds >= 0.5 for s in noisy.samples)
    assert f"more than 0.1 in 1 of the {longer} samples" in text
    assert "at most 0.250 cores while it waited (embedded: vllm/off/float32)" in text


def test_the_command_writes_the_page_beside_the_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "r.json"
    results().save(source)
    assert page.main([str(source)]) == 0
    assert (tmp_path / "cpu.md").read_text() == report.page(results(), "r.json")
    assert (tmp_path / "r.svg").read_text() == picture.picture(results())
    source.write_text("{}")
    assert page.main([str(source)]) == 2
    assert capsys.readouterr().err.startswith("error: ")


# --- the picture ---


def test_the_picture_has_every_peer_with_and_without_the_draft() -> None:
    svg = picture.picture(results(**{"llamacpp/draft 4/float32": 15.0}))
    labels = re.findall(r">([^<]+), (float32|int8|int4)</text>", svg)
    assert labels[:5] == [
        ("Slipstream", "float32"),
        ("OpenVINO GenAI", "float32"),
        ("llama.cpp", "float32"),
        ("vLLM (CPU)", "float32"),
        ("Transformers", "float32"),
    ], "the fastest first"
    assert set(labels[5:]) == {("Slipstream", "int8"), ("OpenVINO GenAI", "int8"), ("OpenVINO GenAI", "int4")}
    bars = {float(value): float(width) for width, value in BARS.findall(svg)}
    assert set(bars) == {12, 30, 40, 80, 5, 10, 20, 32, 8, 15}, "30 twice: our draft and int8 off"
    for speed, width in bars.items():
        assert width == pytest.approx(speed / 80 * picture.WIDTH, abs=0.06)
    assert "model expanded-300m; mean over tasks; 2 cores, a CPU, 2026-11-21" in svg
    assert svg == picture.picture(results(**{"llamacpp/draft 4/float32": 15.0}))


def test_the_committed_picture_is_that_of_the_committed_results() -> None:
    folder = Path(__file__).parents[3] / "docs/benchmarks"
    committed = (folder / "cpu_peers.svg").read_text(encoding="utf-8")
    assert committed == picture.picture(load(folder / "cpu_peers.json")), "python -m benchmarks.peers.page"
