"""The task of the reasoning pair: problems, steps, mistakes and what is held out; and the pairs' statistics."""

from __future__ import annotations

import itertools
import random
import zlib

import pytest
import torch

from recipes.reasoning_pair.problems import (
    ANY_WRITER,
    LABELS,
    NUM_CHECKS,
    QUESTION,
    RIGHT,
    SYNONYMS,
    TARGET_WRITER,
    THINK_END,
    draw_problem,
    example,
    examples,
    held_out_problems,
)
from recipes.reasoning_pair.tokenizer import make_tokenizer
from recipes.reasoning_pair.train import PLANS, Plan, build_model, rate_factor, to_batch
from slipstream.stats.paired import PairedAccuracy


def test_a_solution_is_right_and_a_changed_one_is_not() -> None:
    rng = random.Random(1)
    for _ in range(30):
        problem = draw_problem(rng, held_out=False)
        text = example(rng, problem, ANY_WRITER, is_mixed=True, has_checks=True).text
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
    for _ in range(50):
        problem = draw_problem(rng, held_out=False)
        lesson = example(rng, problem, ANY_WRITER, is_mixed=True, has_checks=True)
        marks = []
        for check in lesson.checks:
            shown = lesson.text[: check.at] + check.text
            assert shown.endswith(QUESTION)
            line = shown[len(problem.prompt) :].splitlines()[-2]
            number = [operation.label for operation in problem.operations].index(line[0])
            assert shown.count("\n") == number + 2
            before = [problem.start, *problem.values][number]
            words = line.replace(".", "").split()
            numbers = [int(word) for word in words if word.isdigit()]
            operation = problem.operations[number]
            names = {operation.name, SYNONYMS[operation.name]} & set(words)
            right = numbers == [before, operation.operand, problem.values[number]] and names
            assert (check.mark == RIGHT) == bool(right)
            marks.append(check.mark == RIGHT)
        assert (len(marks), sum(marks)) == (2 * NUM_CHECKS, NUM_CHECKS)


def test_what_is_held_out_is_never_trained_on() -> None:
    held = held_out_problems(50)
    assert held == held_out_problems(50)
    assert all(problem.is_held_out for problem in held)
    assert len({problem.prompt for problem in held}) == 50
    for operations in ((1, 3), (6, 10)):
        lessons = examples(random.Random(0), ANY_WRITER, operations, is_mixed=True, has_checks=True)
        for lesson in itertools.islice(lessons, 300):
            prompt = lesson.text[: lesson.text.index("\n") + 1]
            assert zlib.crc32(prompt.encode()) % 10, prompt


def test_rows_teach_what_counts() -> None:
    """The steps and the answer; of another writer's steps the operands and results alone."""
    tokenizer = make_tokenizer()
    rng = random.Random(3)
    problem = draw_problem(rng, held_out=False)
    plain, checked = (example(rng, problem, TARGET_WRITER, has, has) for has in (False, True))
    batch = to_batch(tokenizer, [plain, checked])
    steps = zip(problem.operations, problem.values, strict=True)
    results = "".join(f" {operation.operand} {value}" for operation, value in steps) + f" {problem.answer}"
    for number, lesson in enumerate((plain, checked)):
        assert tokenizer.decode(batch.labels[number][batch.is_result[number]]) == results
        said = tokenizer.decode(batch.labels[number][batch.weights[number] > 0])
        marks = "".join(check.mark for check in lesson.checks)
        assert tokenizer.decode(batch.labels[number][batch.is_mark[number]]) == marks
        if not marks:
            assert said == lesson.text[len(problem.prompt) :] + "<|end|>"
        else:
            assert len(said) < len(lesson.text) - len(problem.prompt)
    assert all(len(tokenizer(f" {value}").input_ids) == 1 for value in range(100))


def test_a_branch_of_a_row_is_a_text_of_its_own() -> None:
    """A mark's logits are those behind the text with the check's step and question, written plainly."""
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    model = build_model(PLANS["draft"], tokenizer).eval()
    rng = random.Random(3)
    lesson = example(rng, draw_problem(rng, held_out=False), TARGET_WRITER, is_mixed=True, has_checks=True)
    batch = to_batch(tokenizer, [lesson])
    mask = torch.zeros(batch.seen.shape).masked_fill_(~batch.seen, -torch.inf)
    with torch.no_grad():
        tree = model(input_ids=batch.token_ids, attention_mask=mask, position_ids=batch.positions).logits[0]
        places = batch.is_mark[0].nonzero().flatten()
        for place, check in zip(places, lesson.checks, strict=True):
            token_ids = tokenizer(lesson.text[: check.at] + check.text, return_tensors="pt").input_ids
            torch.testing.assert_close(tree[place], model(token_ids).logits[0, -1], atol=1e-4, rtol=1e-4)


def test_the_rate_rises_and_falls_to_zero() -> None:
    plan: Plan = PLANS["target"]
    rates = [
        rate_factor(plan, number, step)
        for number, stage in enumerate(plan.stages)
        for step in range(stage.num_steps)
    ]
    assert rates[0] < 0.1
    assert max(rates) == 1
    assert rates[len(rates) // 2] == 1
    assert rates[-1] < 0.01


def test_short_problems_have_every_label() -> None:
    rng = random.Random(5)
    drawn = [draw_problem(rng, held_out=False, num_steps=(1, 3)) for _ in range(300)]
    assert {len(problem.operations) for problem in drawn} == {1, 2, 3}
    assert {operation.label for problem in drawn for operation in problem.operations} == set(LABELS)


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
