"""The task of the reasoning pair: problems, steps, mistakes and what is held out; and the pairs' statistics."""

from __future__ import annotations

import itertools
import random

import pytest

from recipes.reasoning_pair.problems import (
    ANY_WRITER,
    QUESTION,
    RIGHT,
    THINK_END,
    check,
    draw_problem,
    examples,
    held_out_problems,
    solution,
)
from recipes.reasoning_pair.tokenizer import make_tokenizer
from recipes.reasoning_pair.train import PLANS, Plan, rate_factor, to_batch
from slipstream.reasoning.paired import PairedAccuracy, wilson


def test_a_solution_is_right_and_a_changed_one_is_not() -> None:
    rng = random.Random(1)
    for _ in range(30):
        problem = draw_problem(rng, held_out=False)
        text = solution(rng, problem, ANY_WRITER).text
        steps = text[len(problem.prompt) :].splitlines()
        assert len(steps) == len(problem.operations) + 1
        for line, operation, value in zip(steps, problem.operations, problem.values, strict=False):
            assert line.startswith(f"{operation.label}:")
            assert f" {value}." in line or f" {value} then." in line
        assert problem.is_right(text)
        assert not problem.is_right(f"{text}0")
        assert not problem.is_right(text.split(THINK_END)[0])


def test_half_of_the_checked_steps_are_wrong_and_so_marked() -> None:
    """A step is marked right if and only if it is what the problem says."""
    rng = random.Random(2)
    marks = []
    for _ in range(200):
        problem = draw_problem(rng, held_out=False)
        example = check(rng, problem, ANY_WRITER)
        shown, mark = example.text[: example.begin], example.text[example.begin :]
        line = shown[len(problem.prompt) :].splitlines()[-2]
        assert shown.endswith(QUESTION)
        number = [operation.label for operation in problem.operations].index(line[0])
        before = [problem.start, *problem.values][number]
        words = line.replace(".", "").split()
        numbers = [int(word) for word in words if word.isdigit()]
        operation = problem.operations[number]
        names = {operation.name, {"plus": "add", "minus": "subtract", "times": "multiply"}[operation.name]}
        right = numbers == [before, operation.operand, problem.values[number]] and names & set(words)
        assert (mark == RIGHT) == bool(right)
        marks.append(mark == RIGHT)
    assert 70 < sum(marks) < 130


def test_what_is_held_out_is_never_trained_on() -> None:
    held = held_out_problems(50)
    assert held == held_out_problems(50)
    assert all(problem.is_held_out for problem in held)
    prompts = {problem.prompt for problem in held}
    assert len(prompts) == 50
    for example in itertools.islice(examples(0, ANY_WRITER, 0.3), 300):
        prompt = example.text[: example.text.index("\n") + 1]
        assert prompt not in prompts


def test_rows_teach_what_counts() -> None:
    tokenizer = make_tokenizer()
    rng = random.Random(3)
    problem = draw_problem(rng, held_out=False)
    rows = [solution(rng, problem, ANY_WRITER), check(rng, problem, ANY_WRITER)]
    batch = to_batch(tokenizer, rows)
    for number, row in enumerate(rows):
        taught = batch.labels[number][batch.labels[number] >= 0].tolist()
        assert tokenizer.decode(taught) == row.text[row.begin :] + "<|end|>"
    assert all(len(tokenizer(f" {value}").input_ids) == 1 for value in range(100))


def test_the_rate_rises_and_falls_to_zero() -> None:
    plan: Plan = PLANS["target"]
    rates = [rate_factor(plan, step) for step in range(plan.num_steps)]
    assert rates[0] < 0.1
    assert max(rates) == 1
    assert rates[-1] < 0.01


def test_pairs_are_compared_exactly() -> None:
    reference = [True] * 90 + [False] * 10
    same = PairedAccuracy.of(reference, reference)
    assert (same.difference, same.p_lower) == (0, 1)
    worse = PairedAccuracy.of(reference, [False] * 8 + [True] * 82 + [True] * 2 + [False] * 8)
    assert (worse.num_lost, worse.num_won, worse.difference) == (8, 2, -0.06)
    assert worse.p_lower == pytest.approx(56 / 1024)
    assert -0.13 < worse.least_difference < -0.06
    assert worse.least_difference < same.least_difference < 0
    better = PairedAccuracy.of([False] * 4, [True] * 4)
    assert better.p_lower == 1
    with pytest.raises(ValueError, match="argument 2"):
        PairedAccuracy.of([True], [True, False])


def test_wilsons_interval() -> None:
    low, high = wilson(450, 500)
    assert (round(low, 3), round(high, 3)) == (0.871, 0.923)
    assert wilson(0, 0) == (0.0, 1.0)
