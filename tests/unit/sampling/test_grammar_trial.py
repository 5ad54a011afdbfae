"""Hostile grammars: they are refused, they leave nothing behind, and what dies of them is another process."""

from __future__ import annotations

import errno
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher

from slipstream import LLM, SamplingParams, StructuredOutput
from slipstream.errors import RequestError
from slipstream.sampling.grammars import compiler as grammars
from slipstream.sampling.grammars import footprint
from slipstream.sampling.grammars import trial as grammar_trial
from slipstream.sampling.grammars.compiler import GrammarCompiler
from slipstream.sampling.grammars.footprint import GrammarMemory, heap_bytes
from slipstream.sampling.grammars.trial import TooComplexError, TrialProcess, TrialVocabulary
from slipstream.text.byte_tokens import ByteTokens

EOS = 1
RECKLESS = """
from llguidance import LLParserLimits
from slipstream.sampling.grammars import worker as grammar_worker
grammar_worker.parser_limits = lambda: LLParserLimits(
    initial_lexer_fuel=10**9, step_lexer_fuel=10**9, max_lexer_states=10**8
)
grammar_worker.MEMORY_BYTES = {memory}
grammar_worker.main()
"""
"""A worker whose compiler knows no limits."""


@pytest.fixture(scope="module")
def plain() -> LLM:
    return LLM(kv_cache_bytes=64 * 2**20)


@pytest.fixture
def compiler(plain: LLM) -> GrammarCompiler:
    return GrammarCompiler(plain.engine.tokenizer, 4096, [EOS])


@pytest.fixture(scope="module")
def vocabulary(plain: LLM) -> TrialVocabulary:
    _, vocabulary = GrammarCompiler(plain.engine.tokenizer, 4096, [EOS]).read_tokenizer()
    return vocabulary


@pytest.fixture
def make_worker() -> Iterator[Callable[..., TrialProcess]]:
    made: list[TrialProcess] = []

    def make(command: list[str] | None = None) -> TrialProcess:
        made.append(TrialProcess(command))
        return made[-1]

    yield make
    for worker in made:
        worker.close()


def regex(text: str) -> str:
    return str(LLMatcher.grammar_from_regex(text))


HOSTILE = [
    "({}{{1000}}){{1000}}",
    "({}{{500}}){{500}}",
    "[xy]{{3}}({}{{1000}}){{1000}}",
    "({}{{200}}){{200}}",
    "{}{{100000}}",
]


@pytest.mark.parametrize("expression", HOSTILE)
def test_small_requests_that_would_take_much_are_refused_and_leave_nothing(
    compiler: GrammarCompiler, expression: str
) -> None:
    """165 MB each, and kept, before; the engine's process does not even compile them now."""
    compiler.compile(StructuredOutput(regex="a"), [EOS])
    before = heap_bytes()
    for letter in "ab":
        with pytest.raises(RequestError, match=r"regex cannot be used: (compil|lexer error)") as caught:
            compiler.compile(StructuredOutput(regex=expression.format(letter)), [EOS])
        assert "\n" not in str(caught.value)
    assert heap_bytes() - before < 2 * 2**20


def test_ordinary_forms_come_through(compiler: GrammarCompiler) -> None:
    names = [f"name{number}" for number in range(200)]
    for form in (
        {"json_object": True},
        {"json_schema": {"type": "object", "properties": {name: {"type": "string"} for name in names}}},
        {"json_schema": {"enum": [f"word number {number}" for number in range(4000)]}},
        {"json_schema": {"type": "array", "items": {"type": "string", "format": "date-time"}}},
        {"regex": r"[\w.+-]{1,64}@[\w-]{1,63}(\.[\w-]{1,63}){1,8}"},
        {"choice": names},
        {"grammar": 'start: ("(" start ")")* | "x"'},
    ):
        grammar = compiler.compile(StructuredOutput(**form), [EOS])
        assert grammar.mask([]), form


def test_a_worker_that_dies_of_a_grammar_refuses_it_and_another_takes_its_place(
    make_worker: Callable[..., TrialProcess], vocabulary: TrialVocabulary
) -> None:
    """What it may take runs out, and the compiler aborts the process."""
    worker = make_worker([sys.executable, "-c", RECKLESS.format(memory=60 * 2**20)])
    for _ in range(2):
        with pytest.raises(TooComplexError, match="takes more than"):
            worker.try_(vocabulary, regex("(a{1000}){1000}"))
        answer = worker.try_(vocabulary, regex("[a-z]+"))
        assert answer is not None
        assert answer.error is None


def test_a_worker_that_takes_too_long_is_ended(
    make_worker: Callable[..., TrialProcess], vocabulary: TrialVocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = make_worker([sys.executable, "-c", RECKLESS.format(memory=4 * 2**30)])
    assert worker.try_(vocabulary, regex("[a-z]+")) is not None
    monkeypatch.setattr(grammar_trial, "DEADLINE_S", 0.2)
    with pytest.raises(TooComplexError, match=r"compiling takes more than 0\.2 s"):
        worker.try_(vocabulary, regex("(a{1000}){1000}"))


def test_a_worker_that_is_killed_between_two_grammars_is_not_missed(
    make_worker: Callable[..., TrialProcess], vocabulary: TrialVocabulary
) -> None:
    worker = make_worker()
    assert worker.try_(vocabulary, regex("[a-z]+")) is not None
    assert worker.process_id is not None
    os.kill(worker.process_id, signal.SIGKILL)
    os.waitpid(worker.process_id, 0)
    answer = worker.try_(vocabulary, regex("[a-z]+"))
    assert answer is not None
    assert 0 < answer.num_bytes < 2**20
    checked = worker.check(regex("("))
    assert checked is not None
    assert "unclosed group" in checked.error


def test_many_vocabularies_and_threads_share_a_worker(
    make_worker: Callable[..., TrialProcess], vocabulary: TrialVocabulary
) -> None:
    """It keeps four of them; whoever comes back sends his again."""

    class Said:
        def __init__(self, letters: str) -> None:
            self.ordinary = {number: letter.encode() for number, letter in enumerate(letters)}
            self.special = {len(letters): "<end>"}

        def by_bytes(self) -> dict[bytes, int]:
            return {text: token for token, text in self.ordinary.items()}

    worker = make_worker()
    others = [TrialVocabulary(ByteTokens.of(Said("ab" + letter), 4, [3])) for letter in "cdefgh"]  # type: ignore[arg-type]
    answers: list[Any] = []

    def ask() -> None:
        answers.extend(worker.try_(each, regex("[ab]{3}")) for each in [*others, vocabulary] * 2)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(answers) == 28
    assert all(answer is not None and answer.error is None for answer in answers)


GREEDY = """
from slipstream.sampling.grammars import worker as grammar_worker
grammar_worker.KEPT_BYTES = {kept}
def left_over(before, leaks=[]):
    leaks.append(bytearray(2**20))
    return grammar_worker.heap_bytes() - before
grammar_worker.left_over = left_over
grammar_worker.main()
"""
"""A worker from which every grammar takes a MiB for good."""


def test_a_worker_that_ends_for_what_is_left_over_harms_no_later_grammar(
    make_worker: Callable[..., TrialProcess], vocabulary: TrialVocabulary
) -> None:
    """It says so: the next grammar would meet it on its way out and be refused for it."""
    worker = make_worker([sys.executable, "-c", GREEDY.format(kept=0)])
    for letter in "abc":
        for answer in (worker.check(regex(letter)), worker.try_(vocabulary, regex(letter))):
            assert answer is not None
            assert answer.error is None
        assert worker.process_id is None


def test_what_grammars_leave_in_a_worker_adds_up(
    make_worker: Callable[..., TrialProcess], vocabulary: TrialVocabulary
) -> None:
    """Else many small leaks would use up what it may take, and an innocent grammar be refused."""
    worker = make_worker([sys.executable, "-c", GREEDY.format(kept=int(3.5 * 2**20))])
    lasted = []
    for letter in "abcdefgh":
        assert worker.try_(vocabulary, regex(letter)) is not None
        lasted.append(worker.process_id is not None)
    assert lasted == [True, True, True, False] * 2


def test_a_worker_that_cannot_be_had_for_a_while_is_waited_for(
    compiler: GrammarCompiler, make_worker: Callable[..., TrialProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is compiled without a trial meanwhile, and no refusal is kept."""
    worker = make_worker()
    monkeypatch.setattr(grammars, "WORKER_OF_THIS_PROCESS", worker)
    form = StructuredOutput(regex="[a-z]+")
    with monkeypatch.context() as crowded:

        def popen(*arguments: Any, **options: Any) -> None:
            raise OSError(errno.EMFILE, "Too many open files")

        crowded.setattr(subprocess, "Popen", popen)
        for _ in range(2):
            with pytest.raises(RequestError, match=r"at the moment.*Too many open files; retry later"):
                compiler.compile(form, [EOS])
    compiler.compile(form, [EOS])
    assert worker.process_id is not None
    worker.close()
    worker.command = [sys.executable, "-c", "raise SystemExit"]  # it was there before, so it will be again
    with pytest.raises(RequestError, match="retry later"):
        compiler.compile(StructuredOutput(regex="[a-y]+"), [EOS])


def test_a_worker_runs_nothing_of_the_working_directory(
    make_worker: Callable[..., TrialProcess], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "random.py").write_text("raise SystemExit")
    monkeypatch.chdir(tmp_path)
    answer = make_worker().check(regex("a"))
    assert answer is not None
    assert answer.error is None


@pytest.mark.parametrize("command", [["/does/not/exist"], [sys.executable, "-c", "raise SystemExit"]])
def test_where_no_process_can_be_had_forms_are_compiled_without(
    compiler: GrammarCompiler,
    make_worker: Callable[..., TrialProcess],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    command: list[str],
) -> None:
    monkeypatch.setattr(grammars, "WORKER_OF_THIS_PROCESS", make_worker(command))
    with caplog.at_level(logging.WARNING):
        for letter in "ab":
            compiler.compile(StructuredOutput(regex=letter), [EOS])
            assert compiler.check(StructuredOutput(regex=letter)).result()
    said = [
        record.getMessage() for record in caplog.records if "no process can be started" in record.getMessage()
    ]
    assert len(said) == 1
    held = iter([2**20, 18 * 2**20])  # before and after: what other threads free meanwhile would count too
    monkeypatch.setattr(grammars, "heap_bytes", lambda: next(held))
    with pytest.raises(RequestError, match="compiled it takes 17 MiB; at most 16 are allowed"):
        compiler.compile(StructuredOutput(regex="c"), [EOS])


def test_what_is_kept_is_bounded_by_bytes(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    form = StructuredOutput(json_schema={"enum": [f"word number {number}" for number in range(1000)]})
    compiler.compile(form, [EOS])
    assert compiler.num_kept == 1
    taken = compiler.kept_bytes
    assert 2**17 < taken < 2**22
    monkeypatch.setattr(grammars, "MAX_COMPILED_BYTES", 2 * taken + 1000)
    for number in range(4):
        enum = [f"word {number} number {other}" for other in range(1000)]
        compiler.compile(StructuredOutput(json_schema={"enum": enum}), [EOS])
        assert compiler.num_kept <= 2


def test_a_form_that_grows_while_answers_follow_it_ends_them_and_is_refused_from_then_on(
    plain: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """States of the lexer are made when a text first gets there, so compiling does not show them all."""
    params = SamplingParams(structured={"regex": "[a-z]{1,60} !"}, max_tokens=40, logit_bias={EOS: -100})
    assert plain.generate("text", params)[0].outputs[0].finish_reason != "error"
    monkeypatch.setattr(footprint, "SLOW_S", -1.0)
    monkeypatch.setattr(footprint, "MAX_GROWTH_BYTES", 2**12)
    monkeypatch.setattr(footprint, "peak_bytes", heap_bytes)  # this process has held more before
    params = SamplingParams(structured={"regex": "[a-y]{1,60} !"}, max_tokens=40, logit_bias={EOS: -100})
    output, free = plain.generate(["text", "other"], [params, SamplingParams(max_tokens=5, ignore_eos=True)])
    assert output.outputs[0].finish_reason == "error"
    assert len(free.outputs[0].token_ids) == 5
    with pytest.raises(RequestError, match="regex cannot be used: it exceeds its memory limit"):
        plain.generate("text", params)


def test_a_footprint_counts_what_slow_calls_add(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def peak_bytes() -> int:
        asked.append(sum(map(len, kept)))
        return asked[-1]

    monkeypatch.setattr(footprint, "peak_bytes", peak_bytes)
    told: list[int] = []
    mine = GrammarMemory(5, lambda: told.append(1))
    kept: list[bytearray] = []
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += step
        return now

    step = 0.0
    mine.during(lambda: kept.append(bytearray(8 * 2**20)), clock)
    step = 1.0
    for number in range(9):
        assert not mine.exceeded
        mine.during(lambda: kept.append(bytearray(8 * 2**20)), clock)
        assert bool(asked) == (number > 0), (
            "measuring begins with the first slow call, not with the quick one"
        )
    mine.during(lambda: kept.append(bytearray(8 * 2**20)), clock)
    assert mine.exceeded
    assert told == [1]
    assert mine.num_bytes == 5


def test_of_what_a_process_grows_by_no_more_is_counted_than_a_call_could_build(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A form that many answers follow must not be refused because a server's other work takes memory meanwhile."""
    peaks = iter(range(2**30, 2**40, 8 * 2**20))
    now = iter(0.002 * number for number in range(10**6))
    monkeypatch.setattr(footprint, "peak_bytes", lambda: next(peaks))
    form = GrammarMemory()
    for _ in range(40):
        form.during(lambda: None, lambda: next(now))
    assert 39 * 2**19 < form.grown_bytes < 60 * 2**20
    assert not form.exceeded


def test_a_grammar_is_timed_by_what_it_computes(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waiting for another thread is no work of llguidance."""
    grammar = compiler.compile(StructuredOutput(regex="[a-w]+"), [EOS])
    clocks: list[Any] = []
    during = GrammarMemory.during

    def spy(self: GrammarMemory, work: Callable[[], Any], clock: Callable[[], float]) -> Any:
        clocks.append(clock)
        return during(self, work, clock)

    monkeypatch.setattr(GrammarMemory, "during", spy)
    grammar.mask([])
    assert clocks
    assert set(clocks) == {time.thread_time}


@pytest.mark.long
def test_a_program_without_a_guard_is_not_run_again(tmp_path: Path) -> None:
    """As `multiprocessing` would, where it spawns."""
    program = tmp_path / "program.py"
    program.write_text(
        "from slipstream import LLM, SamplingParams\n"
        "print('once')\n"
        "params = SamplingParams(structured={'choice': ['yes', 'no']}, max_tokens=8)\n"
        "print(LLM().generate('Is it so?', params)[0].outputs[0].text)\n"
    )
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=120, check=True)
    first, second = done.stdout.split()
    assert first == "once"
    assert second in ("yes", "no")


def test_following_a_form_costs_no_more_in_a_large_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The C library's own count walks through all that is free, which took steps of 50 ms in a fragmented heap."""
    monkeypatch.setattr(footprint, "SLOW_S", -1.0)
    monkeypatch.setattr(footprint, "_mallinfo", lambda: pytest.fail("the heap was walked through"))
    mine = GrammarMemory()
    for _ in range(3):
        assert mine.during(lambda: 7, lambda: 0.0) == 7
    assert footprint.peak_bytes() > 2**20
