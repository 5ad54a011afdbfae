"""The problems: a number, a row of labelled operations, and one written step for each of them.

    Start 47. A plus 8. B times 3.
    A: we take 47 and then plus 8 which gives 55.
    B: beginning with 55 now multiply 3 so we have 65.
    so: 65

Numbers are taken modulo 100. A step can be worded in many ways that say the same, and two models that learned from
different writers word it differently: what token-level speculation cannot forgive, step-level speculation can.
"""

import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

MODULUS = 100
LABELS = "ABCDEFGHIJ"
SEPARATOR = "\n"
THINK_END = "so:"
"""Ends the steps; what follows is the answer."""
QUESTION = "check:"
"""Behind a step: is it right? 9 for yes, 0 for no."""
RIGHT, WRONG = " 9", " 0"

OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "plus": lambda value, operand: (value + operand) % MODULUS,
    "minus": lambda value, operand: (value - operand) % MODULUS,
    "times": lambda value, operand: (value * operand) % MODULUS,
}
SYNONYMS = {"plus": "add", "minus": "subtract", "times": "multiply"}
FORKS = (
    (" we take", " beginning with"),
    (" and then", " now"),
    (" which gives", " so we have"),
    (".", " then."),
)
"""Where a writer chooses: before the value, before the operation, before the result, at the end."""


@dataclass(frozen=True)
class Operation:
    """One line of a problem, such as `B times 3`."""

    label: str
    name: str
    operand: int

    def apply(self, value: int) -> int:
        return OPERATIONS[self.name](value, self.operand)


@dataclass(frozen=True)
class Problem:
    """A number to start with and what is done to it."""

    start: int
    operations: tuple[Operation, ...]

    @property
    def prompt(self) -> str:
        parts = [f" {op.label} {op.name} {op.operand}." for op in self.operations]
        return f"Start {self.start}.{''.join(parts)}\n"

    @property
    def values(self) -> list[int]:
        """The value after each operation."""
        values, value = list[int](), self.start
        for operation in self.operations:
            value = operation.apply(value)
            values.append(value)
        return values

    @property
    def answer(self) -> int:
        return self.values[-1]

    def is_right(self, text: str) -> bool:
        """Whether the answer in a text of steps is this problem's: the last word behind the last `THINK_END`."""
        _, marker, said = text.rpartition(THINK_END)
        return bool(marker) and said.strip() == str(self.answer)

    @property
    def is_held_out(self) -> bool:
        """A tenth of all problems, by what they say: training never sees them."""
        return zlib.crc32(self.prompt.encode()) % 10 == 0


@dataclass(frozen=True)
class Writer:
    """Chooses one of the two wordings at every fork, the first with probability `first`."""

    first: float

    def step(self, rng: random.Random, operation: Operation, value: int, result: int) -> str:
        """The step as a line: `operation` turns `value` into `result`."""
        ways = [way[0 if rng.random() < self.first else 1] for way in FORKS]
        name = operation.name if rng.random() < self.first else SYNONYMS[operation.name]
        return (
            f"{operation.label}:{ways[0]} {value}{ways[1]} {name} {operation.operand}{ways[2]} {result}{ways[3]}"
            f"{SEPARATOR}"
        )


TARGET_WRITER = Writer(0.75)
DRAFT_WRITER = Writer(0.25)
ANY_WRITER = Writer(0.5)


def draw_problem(rng: random.Random, held_out: bool, num_steps: tuple[int, int] = (6, 10)) -> Problem:
    """A problem of the training part or of the held-out one, with a number of operations in `num_steps`. Its labels
    are a row of neighbours, so that short problems too have all of them."""
    while True:
        number = rng.randint(*num_steps)
        first = rng.randint(0, len(LABELS) - number)
        operations = [
            Operation(label, rng.choice(list(OPERATIONS)), rng.randint(2, 9))
            for label in LABELS[first : first + number]
        ]
        problem = Problem(rng.randrange(MODULUS), tuple(operations))
        if problem.is_held_out == held_out:
            return problem


def held_out_problems(num: int, seed: int = 0) -> list[Problem]:
    """The problems to measure with: different ones, always the same for the same seed."""
    rng = random.Random(f"held out {seed}")
    problems: dict[str, Problem] = {}
    while len(problems) < num:
        problem = draw_problem(rng, held_out=True)
        problems[problem.prompt] = problem
    return list(problems.values())


@dataclass(frozen=True)
class Check:
    """A side branch of a text: a step, or nothing, then the question and the mark. Only the mark counts."""

    at: int
    """The branch follows the text's first so many characters."""
    text: str
    mark: str
    result_at: int | None = None
    """The place of the step's result in `text`; None without a step."""


@dataclass(frozen=True)
class Example:
    """A text to learn from, what of it counts, and the checks beside it. Places are those of characters."""

    text: str
    begin: int
    """The problem before it does not count."""
    foreign: tuple[range, ...]
    """Steps in another writer's words: of these only the operands and results count."""
    results: frozenset[int]
    """Where the operand and the result of each step begin, and the answer."""
    names: frozenset[int]
    """Where the name of each step's operation begins, which is to be looked up as the operand is."""
    checks: tuple[Check, ...] = ()

    def counts(self, place: int) -> bool:
        """Whether a token that begins there is to be learned."""
        is_foreign = any(place in step for step in self.foreign)
        return place >= self.begin and (not is_foreign or place in self.results)


FOREIGN_SHARE = 1 / 3
NUM_CHECKS = 4
"""Right steps and wrong steps each that a text with checks asks about, where it has so many steps."""


def example(
    rng: random.Random, problem: Problem, writer: Writer, is_mixed: bool, has_checks: bool
) -> Example:
    """The problem with its steps and its answer. In a mixed text a third of the steps are the draft's words, as kept
    steps are in an answer."""
    text, value = problem.prompt, problem.start
    ends, foreign, results, names = [len(text)], list[range](), set[int](), set[int]()
    for operation in problem.operations:
        result = operation.apply(value)
        is_foreign = is_mixed and rng.random() < FOREIGN_SHARE
        step = (DRAFT_WRITER if is_foreign else writer).step(rng, operation, value, result)
        if is_foreign:
            foreign.append(range(len(text), len(text) + len(step)))
        place = len(text) + step.rindex(f" {result}")
        operand = (text + step).rindex(f" {operation.operand}", 0, place)
        results |= {operand, place}
        names.add((text + step).rindex(" ", 0, operand))
        text += step
        ends.append(len(text))
        value = result
    text += THINK_END
    results.add(len(text))
    checks = _checks(rng, problem, ends) if has_checks else ()
    return Example(
        f"{text} {value}", len(problem.prompt), tuple(foreign), frozenset(results), frozenset(names), checks
    )


def _checks(rng: random.Random, problem: Problem, ends: list[int]) -> tuple[Check, ...]:
    """Questions about the text's own steps, and about right and wrong ones in their places; as many right as wrong."""
    before = [problem.start, *problem.values]
    checks = list[Check]()
    num_checks = min(NUM_CHECKS, len(problem.operations))
    for number in rng.sample(range(len(problem.operations)), num_checks):
        operation = problem.operations[number]
        said, begun, result = _mistake(rng, problem, operation, before[number])
        step = ANY_WRITER.step(rng, said, begun, result)
        checks.append(Check(ends[number], step + QUESTION, WRONG, step.rindex(f" {result}")))
    for number in rng.sample(range(len(problem.operations)), num_checks):
        operation = problem.operations[number]
        if rng.random() < 0.5:
            checks.append(Check(ends[number + 1], QUESTION, RIGHT))
        else:
            result = before[number + 1]
            step = ANY_WRITER.step(rng, operation, before[number], result)
            checks.append(Check(ends[number], step + QUESTION, RIGHT, step.rindex(f" {result}")))
    return tuple(checks)


def _mistake(
    rng: random.Random, problem: Problem, operation: Operation, value: int
) -> tuple[Operation, int, int]:
    """A step that is wrong: a wrong result, another line's operation, or another value to begin with."""
    right = operation.apply(value)
    while True:
        kind = rng.random()
        said, begun = operation, value
        if kind < 0.8:
            near = rng.choice((1, -1, 2, -2, 10, -10, 20, -20))
            result = (right + (near if rng.random() < 0.3 else rng.randrange(1, MODULUS))) % MODULUS
        elif kind < 0.9:
            other = rng.choice(problem.operations)
            said = Operation(operation.label, other.name, other.operand)
            result = said.apply(value)
        else:
            begun = (value + rng.choice((1, -1, 10, -10, rng.randrange(1, MODULUS)))) % MODULUS
            result = operation.apply(begun)
        if (said, begun, result) != (operation, value, right):
            return said, begun, result


def examples(
    rng: random.Random, writer: Writer, operations: tuple[int, int], is_mixed: bool, has_checks: bool
) -> Iterator[Example]:
    """Training texts without end."""
    while True:
        problem = draw_problem(rng, held_out=False, num_steps=operations)
        yield example(rng, problem, writer, is_mixed, has_checks)
