"""The realised gain against simulated steps whose gain is known."""

from __future__ import annotations

import math
import random

import pytest

from slipstream.control.realised import (
    MAX_PAIRS,
    MIN_PAIRS,
    NUM_OFF_STEPS,
    NUM_ON_STEPS,
    Pair,
    Realised,
    Step,
    ratio_of,
)
from slipstream.control.types import MAX_TASKS, StepRequest


def gain(task: str, num_tokens: int) -> StepRequest:
    """What a step gave one sequence."""
    return StepRequest(0, task, limit=0, num_tokens=num_tokens)


def step(
    num_sequences: int, seconds: float, tokens: int, *, speculates: bool = True, task: str = "t"
) -> Step:
    return Step(num_sequences, seconds, [gain(task, tokens)] * num_sequences, speculates)


def pair(realised: Realised, on: list[Step], off: list[Step]) -> None:
    for each in on:
        realised.learn(each, in_probe=False)
    for each in off:
        realised.learn(each, in_probe=True)


def test_a_gain_is_tokens_over_the_time_that_they_cost() -> None:
    """3 tokens a step that takes 1.5 times as long is a gain of 2."""
    realised = Realised()
    for _ in range(5):
        pair(
            realised, [step(4, 0.03, 3)] * NUM_ON_STEPS, [step(4, 0.02, 1, speculates=False)] * NUM_OFF_STEPS
        )
    for speedup in (realised.speedup(), realised.speedup("t")):
        assert speedup is not None
        assert speedup.ratio == speedup.low == speedup.high == pytest.approx(2.0)
        assert speedup.num_pairs == 5
    assert realised.speedup("another") is None


def test_the_first_step_of_a_probe_does_not_count() -> None:
    realised = Realised()
    off = [step(4, 0.5, 1, speculates=False)] + [step(4, 0.02, 1, speculates=False)] * (NUM_OFF_STEPS - 1)
    for _ in range(3):
        pair(realised, [step(4, 0.02, 2)] * NUM_ON_STEPS, off)
    speedup = realised.speedup()
    assert speedup is not None
    assert speedup.ratio == pytest.approx(2.0)


def test_tasks_have_gains_of_their_own() -> None:
    realised = Realised()
    mixed = Step(2, 0.03, [gain("a", 3), gain("b", 1)], True)
    for _ in range(4):
        pair(realised, [mixed] * NUM_ON_STEPS, [step(2, 0.02, 1, speculates=False)] * NUM_OFF_STEPS)
    found = [realised.speedup(task) for task in ("a", "b", None)]
    assert [speedup.ratio for speedup in found if speedup] == pytest.approx([2.0, 2 / 3, 4 / 3])


def test_too_few_pairs_say_nothing() -> None:
    assert ratio_of([]) is None
    assert ratio_of([Pair(2.0, 0.03, 0.02)] * 2) is None
    assert ratio_of([Pair(2.0, 0.03, 0.02)] * 3) is not None


@pytest.mark.parametrize("num_pairs", [3, 6, 40])
def test_the_interval_covers_the_true_gain_as_often_as_it_says(num_pairs: int) -> None:
    source, covered, runs = random.Random(num_pairs), 0, 600
    true = 2.4 / 1.6
    for _ in range(runs):
        pairs = []
        for _ in range(num_pairs):
            mood = math.exp(source.gauss(0, 0.5))  # of the machine and the load: in both sides
            on_s = 0.032 * mood * (1 + 0.08 * source.gauss(0, 1))
            pairs.append(Pair(2.4 * (1 + 0.15 * source.gauss(0, 1)), on_s, 0.02 * mood))
        speedup = ratio_of(pairs)
        assert speedup is not None
        assert speedup.low < speedup.ratio < speedup.high
        covered += speedup.low <= true <= speedup.high
    assert covered / runs == pytest.approx(0.95, abs=0.03)


def test_only_batches_of_one_size_are_compared() -> None:
    realised = Realised()
    for _ in range(NUM_ON_STEPS):
        realised.learn(step(20, 0.03, 2), in_probe=False)
    assert realised.can_probe(20)
    assert realised.can_probe(21)
    assert not realised.can_probe(30)
    for _ in range(4):
        pair(
            realised,
            [step(20, 0.03, 2)] * NUM_ON_STEPS,
            [step(30, 0.03, 1, speculates=False)] * NUM_OFF_STEPS,
        )
    assert realised.speedup() is None


def test_a_probe_whose_batch_changes_makes_no_pair() -> None:
    realised = Realised()
    off = [step(n, 0.02, 1, speculates=False) for n in (20, 20, 19, 19)]
    for _ in range(4):
        pair(realised, [step(20, 0.03, 2)] * NUM_ON_STEPS, off)
    assert realised.speedup() is None


def test_steps_of_rest_are_not_what_a_probe_is_compared_with() -> None:
    realised = Realised()
    for i in range(NUM_ON_STEPS):
        realised.learn(step(4, 0.03, 1, speculates=i % 4 == 0), in_probe=False)
    assert not realised.can_probe(4)


def test_a_probe_that_was_given_up_leaves_nothing() -> None:
    realised = Realised()
    slow = [step(4, 9.0, 1, speculates=False)] * (NUM_OFF_STEPS - 1)
    for _ in range(3):
        pair(realised, [step(4, 0.02, 2)] * NUM_ON_STEPS, slow)
        realised.give_up()
        pair(realised, [], [step(4, 0.02, 1, speculates=False)] * NUM_OFF_STEPS)
    speedup = realised.speedup()
    assert speedup is not None
    assert speedup.ratio == pytest.approx(2.0)


def test_memory_is_bounded() -> None:
    realised = Realised()
    for i in range(MAX_TASKS + 50):
        on = [step(4, 0.03, 2, task=f"task {i}")] * NUM_ON_STEPS
        for _ in range(MIN_PAIRS):
            pair(realised, on, [step(4, 0.02, 1, speculates=False)] * NUM_OFF_STEPS)
    known = [realised.speedup(f"task {i}") is not None for i in range(MAX_TASKS + 50)]
    assert known == [False] * 50 + [True] * MAX_TASKS, "the latest"
    speedup = realised.speedup()
    assert speedup is not None
    assert speedup.num_pairs == MAX_PAIRS
