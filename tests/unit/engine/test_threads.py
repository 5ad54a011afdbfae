"""An engine gets the threads that it was given, whatever another engine's step is doing meanwhile."""

from __future__ import annotations

import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.models import RowGroup
from slipstream.models.cpu import builds, threads
from slipstream.models.executor.cpu_kernels import CpuKernels

PROCESS = 3


@pytest.fixture(autouse=True)
def process_count(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(threads, "cpu_quota", lambda: None)
    before = torch.get_num_threads()
    torch.set_num_threads(PROCESS)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def another_step() -> Iterator[None]:
    """While the test runs, another thread is in the middle of a step of the CPU kernels."""
    begun, over = threading.Event(), threading.Event()

    def step() -> None:
        with threads.operators(1):
            begun.set()
            assert over.wait(120)

    thread = threading.Thread(target=step)
    thread.start()
    assert begun.wait(120)
    yield
    over.set()
    thread.join()


def in_a_new_thread(function: Callable[[], Any]) -> Any:
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(function()))
    thread.start()
    thread.join()
    return answers[0]


def make() -> tuple[Any, int]:
    engine = LLM(kv_cache_bytes=2**22).engine
    return engine, torch.get_num_threads()


@pytest.mark.usefixtures("another_step")
def test_an_engine_that_is_made_meanwhile() -> None:
    torch.ones(2)
    engine, in_its_thread = in_a_new_thread(make)
    assert in_its_thread == PROCESS
    if isinstance(engine.model.executor, CpuKernels):
        assert engine.model.executor.num_threads == PROCESS
        assert engine.model.executor._head.num_threads == PROCESS


@pytest.mark.usefixtures("another_step")
def test_steps_in_a_thread_that_began_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """On PyTorch's operators: such a thread would compute on one for ever."""
    llm = LLM(kv_cache_bytes=2**22, cpu_kernels="torch")
    launch, counts = llm.engine.runner.launch, list[int]()

    def counted(*args: Any) -> Any:
        counts.append(torch.get_num_threads())
        return launch(*args)

    monkeypatch.setattr(llm.engine.runner, "launch", counted)
    in_a_new_thread(lambda: llm.generate([[5, 6]], SamplingParams(max_tokens=3)))
    assert set(counts) == {PROCESS}


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_an_engine_leaves_the_process_its_threads(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own number holds for what it loads and for its steps; a thread that begins later has the process's count."""
    llm = LLM(kv_cache_bytes=2**22, cpu_kernels=kernels, num_threads=2)
    other = LLM(kv_cache_bytes=2**22, cpu_kernels=kernels)
    assert torch.get_num_threads() == threads.available() == PROCESS
    counts: list[int] = []
    for engine in (llm.engine, other.engine):
        launch = engine.runner.launch

        def counted(*args: Any, launch: Any = launch) -> Any:
            counts.append(torch.get_num_threads())
            return launch(*args)

        monkeypatch.setattr(engine.runner, "launch", counted)
    for each in (llm, other, llm):
        each.generate([[5, 6]], SamplingParams(max_tokens=1))
    fused = isinstance(llm.engine.model.executor, CpuKernels)
    assert counts == ([1, 1, 1] if fused else [2, PROCESS, 2])
    assert (llm.engine.model.num_threads, other.engine.model.num_threads) == (2, PROCESS)
    if isinstance(llm.engine.model.executor, CpuKernels):
        assert llm.engine.model.executor.num_threads == 2
    assert torch.get_num_threads() == threads.available() == PROCESS
    assert in_a_new_thread(torch.get_num_threads) == PROCESS


def test_a_pass_outside_a_step_uses_its_models_threads() -> None:
    model = LLM(kv_cache_bytes=2**22, cpu_kernels="torch", num_threads=2).engine.model
    counts: list[int] = []
    hook = model.model.register_forward_pre_hook(lambda *_: counts.append(torch.get_num_threads()))
    pool, slots = model.trial_cache(3)
    model.forward([RowGroup(slots, 0, [5, 6, 7], [2])], pool)
    hook.remove()
    assert counts == [2]
    assert torch.get_num_threads() == PROCESS


def test_limits_nest() -> None:
    with threads.limit(2) as number:
        assert number == torch.get_num_threads() == threads.available() == 2
        with threads.operators(1):
            assert torch.get_num_threads() == 1
            assert threads.available() == 2
            with threads.limit(None) as all_of_them:
                assert all_of_them == torch.get_num_threads() == 2
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == threads.available() == 2
    assert torch.get_num_threads() == threads.available() == PROCESS


def test_a_thread_that_has_kept_a_steps_count_is_told_from_one_that_was_told() -> None:
    lowered, done = threading.Event(), threading.Event()
    answers: list[int] = []

    def late() -> None:
        assert lowered.wait(120)
        assert torch.get_num_threads() == 1  # PyTorch's own answer to a new thread
        done.set()
        assert over.wait(120)
        answers.append(threads.available())

    over = threading.Event()
    thread = threading.Thread(target=late)
    thread.start()
    with threads.operators(1):
        lowered.set()
        assert done.wait(120)
        assert threads.available() == PROCESS
    over.set()
    thread.join()
    assert answers == [PROCESS]
    torch.set_num_threads(1)
    assert threads.available() == 1


def test_operators_leave_the_count_as_it_was() -> None:
    with threads.operators(1):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == PROCESS
    with pytest.raises(ZeroDivisionError), threads.operators(1):
        raise ZeroDivisionError
    assert torch.get_num_threads() == PROCESS == threads.available()


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_threads_that_could_not_be_had_are_had_later(tmp_path: Path) -> None:
    program, source = tmp_path / "team", Path(__file__).with_name("team.cpp")
    flags = ["-O1", "-std=c++20", "-pthread", f"-I{builds.SOURCES}"]
    subprocess.run(["c++", *flags, str(source), "-o", str(program)], check=True)
    printed = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    assert printed == "1 3 of 3\n"
