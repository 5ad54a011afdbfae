"""The sentence above a benchmark says no more than its intervals allow."""

from __future__ import annotations

from dataclasses import replace

import pytest
from bench_cases import NAMES, answer, result_of, run

from slipstream.assets.workload.prompts import Prompt
from slipstream.tools.bench.engine.measure import BenchRun
from slipstream.tools.bench.engine.summary import comparisons, summarise
from slipstream.tools.bench.report.engine_tables import tables
from slipstream.tools.bench.report.verdict import verdicts
from slipstream.tools.bench.result import BenchResult

THREE = [*NAMES, "suffix", "ngram"]


def bench(ratios: list[list[float]], concurrency: int = 1) -> BenchResult:
    """One task; entry i of `ratios` is the seconds of configuration i on each prompt, ten tokens each."""
    prompts = [Prompt("a", f"line {number}", 9) for number in range(len(ratios[0]))]
    runs: list[BenchRun] = [
        run(number, [answer(batch, [1] * 10, wall_s)], wall_s, batch=batch, concurrency=concurrency)
        for number, walls in enumerate(ratios)
        for batch, wall_s in enumerate(walls)
    ]
    names = THREE[: len(ratios)]
    made = result_of(runs[:1])
    details = [replace(made.configurations[0], name=name) for name in names]
    return replace(
        made,
        configurations=details,
        workload=replace(made.workload, num_prompts={"a": len(prompts)}),
        figures=summarise(runs, names, prompts),
        comparisons=comparisons(runs, names, prompts),
    )


NOISE = [0.9, 1.1, 1.0, 0.95, 1.05, 0.9, 1.1, 1.0, 0.97, 1.03]
OFF = [1.0] * len(NOISE)


def test_an_interval_that_holds_one_is_no_difference() -> None:
    [text] = verdicts(bench([OFF, [wall_s * 0.99 for wall_s in NOISE]]))
    assert text.startswith(
        "No measurable difference: draft γ=2 ran at 1.01 times the speed of speculation off"
    )
    assert "fastest" not in text
    assert "10 prompts" in text
    assert "few" not in text


def test_a_loss_is_said() -> None:
    [text] = verdicts(bench([OFF, [wall_s * 2 for wall_s in NOISE]]))
    assert text.startswith("Speculation off is fastest: draft γ=2, the best of the others, ran at 0.50 times")


def test_the_best_is_fastest_only_if_the_next_is_slower() -> None:
    fast, same = [wall_s / 2 for wall_s in NOISE], [wall_s / 2.02 for wall_s in reversed(NOISE)]
    [text] = verdicts(bench([OFF, fast, same]))
    assert "no measurable difference between it and draft γ=2" in text
    assert "is fastest" not in text
    [text] = verdicts(bench([OFF, fast, OFF]))
    assert text.startswith("draft γ=2 is fastest, at 2.00 times")
    assert "; the next is suffix (2.00 times its speed, 95 % interval" in text


WILD = [0.1, 2.5, 0.2, 2.2, 0.3, 2.4, 0.1, 2.6, 0.2, 2.3]
"""Ten prompts whose times say little."""


def test_the_best_is_fastest_only_if_all_others_are_slower() -> None:
    """The runner-up is slower for sure, and one that is behind it is too uncertain to be."""
    fast, next_one = [wall_s / 2 for wall_s in NOISE], [wall_s / 1.5 for wall_s in NOISE]
    wild = [wall_s / 1.8 for wall_s in WILD]
    [text] = verdicts(bench([OFF, fast, next_one, wild]))
    assert "no measurable difference between it and ngram (" in text
    assert "is fastest" not in text
    assert "of 3 settings, chance favours the best" in text


def test_speculation_off_is_fastest_only_if_all_others_are_slower() -> None:
    slow = [wall_s * 1.1 for wall_s in OFF]
    [text] = verdicts(bench([OFF, slow, [wall_s * 1.05 for wall_s in WILD]]))
    assert text.startswith("No measurable difference: suffix ran at 0.")
    [text] = verdicts(bench([OFF, slow, [2 * wall_s for wall_s in NOISE]]))
    assert text.startswith("Speculation off is fastest: draft γ=2")


def test_comparisons_are_paired() -> None:
    """Prompts differ by far more than the settings do: only pairs show that one of these is always a tenth faster."""
    scale = [1.0, 10.0, 3.0, 30.0, 5.0, 50.0, 2.0, 20.0, 4.0, 40.0]
    slow = [0.5 * s * n for s, n in zip(scale, NOISE, strict=True)]
    fast = [s / 1.1 for s in slow]
    result = bench([scale, slow, fast])
    [comparison] = result.comparisons
    assert (comparison.configuration, comparison.other, comparison.concurrency) == ("suffix", NAMES[1], 1)
    assert comparison.speedup == pytest.approx(1.1)
    assert comparison.speedup_interval is not None
    assert comparison.speedup_interval.low > 1
    assert "suffix is fastest" in verdicts(result)[0]


@pytest.mark.parametrize(("concurrency", "unit"), [(1, "prompts"), (4, "batches")])
def test_few_are_said_to_be_few(concurrency: int, unit: str) -> None:
    result = bench([OFF[:4], [wall_s / 2 for wall_s in NOISE[:4]]], concurrency)
    [text] = verdicts(result)
    assert f"4 {unit} are few" in text
    speed = tables(result)[0]
    place = list(speed.columns).index(unit)
    assert [row[place] for row in speed.rows] == ["–", "4 (few)"]


def test_a_sweep_has_a_sentence_each() -> None:
    one, four = bench([OFF, NOISE]), bench([OFF, NOISE], concurrency=4)
    texts = verdicts(
        replace(
            one,
            figures=[*one.figures, *four.figures],
            comparisons=[*one.comparisons, *four.comparisons],
        )
    )
    assert [text.partition(":")[0] for text in texts] == ["One request at a time", "4 requests at once"]
