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
    """A problem of the training part or of the held-out one, with a number of operations in `num_steps`."""
    while True:
        number = rng.randint(*num_steps)
        operations = [
            Operation(label, rng.choice(list(OPERATIONS)), rng.randint(2, 9)) for label in LABELS[:number]
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
class Example:
    """A text to learn from, and the part of it that counts: characters from `begin` on."""

    text: str
    begin: int


def solution(rng: random.Random, problem: Problem, writer: Writer) -> Example:
    """The problem with its steps and its answer; the steps and the answer count."""
    steps, value = "", problem.start
    for operation in problem.operations:
        result = operation.apply(value)
        steps += writer.step(rng, operation, value, result)
        value = result
    return Example(f"{problem.prompt}{steps}{THINK_END} {value}", len(problem.prompt))


def check(rng: random.Random, problem: Problem, writer: Writer) -> Example:
    """Some steps, of which the last one may be wrong, and whether it is; only that counts."""
    last = rng.randrange(len(problem.operations))
    text, value = problem.prompt, problem.start
    for operation in problem.operations[:last]:
        result = operation.apply(value)
        text += writer.step(rng, operation, value, result)
        value = result
    operation = problem.operations[last]
    is_right = rng.random() < 0.5
    written = (
        (operation, value, operation.apply(value)) if is_right else _mistake(rng, problem, operation, value)
    )
    text += writer.step(rng, *written) + QUESTION
    return Example(text + (RIGHT if is_right else WRONG), len(text))


def _mistake(
    rng: random.Random, problem: Problem, operation: Operation, value: int
) -> tuple[Operation, int, int]:
    """A step that is wrong: a wrong result, another line's operation, or another value to begin with."""
    right = operation.apply(value)
    while True:
        kind = rng.random()
        said, begun = operation, value
        if kind < 0.6:
            change = rng.choice((1, -1, 2, -2, 10, -10, 20, -20, rng.randrange(1, MODULUS)))
            result = (right + change) % MODULUS
        elif kind < 0.8:
            other = rng.choice(problem.operations)
            said = Operation(operation.label, other.name, other.operand)
            result = said.apply(value)
        else:
            begun = (value + rng.choice((1, -1, 10, -10, rng.randrange(1, MODULUS)))) % MODULUS
            result = operation.apply(begun)
        if (said, begun, result) != (operation, value, right):
            return said, begun, result


def examples(seed: int, writer: Writer, check_share: float) -> Iterator[Example]:
    """Training texts without end: solutions, and checks of steps in any wording."""
    rng = random.Random(f"training {seed}")
    while True:
        problem = draw_problem(rng, held_out=False)
        yield (
            check(rng, problem, ANY_WRITER) if rng.random() < check_share else solution(rng, problem, writer)
        )
