"""Work in a process whose engine steps: where it runs, and that nothing of it stays."""

from __future__ import annotations

import sys
import threading

import pytest
import torch

from slipstream.learn.background.concurrent import SWITCH_S, run_concurrently
from slipstream.models.cpu import threads


def test_it_runs_in_a_thread_of_its_own_and_leaves_everything_as_it_was() -> None:
    usual_s, here, operators = sys.getswitchinterval(), threading.get_ident(), torch.get_num_threads()

    def work() -> tuple[float, int, int, int]:
        return sys.getswitchinterval(), threading.get_ident(), torch.get_num_threads(), threads.available()

    switch_s, thread, num_operators, num_of_models = run_concurrently(work, 2)
    assert switch_s == pytest.approx(SWITCH_S)
    assert thread != here
    assert num_operators == 1
    assert num_of_models == 2, "models that are loaded in it compute with as many later"
    assert sys.getswitchinterval() == usual_s
    assert torch.get_num_threads() == operators


def test_what_it_raises_is_raised_and_others_may_be_under_way() -> None:
    usual_s = sys.getswitchinterval()

    def fails() -> None:
        assert run_concurrently(sys.getswitchinterval, None) == pytest.approx(SWITCH_S)
        assert sys.getswitchinterval() == pytest.approx(SWITCH_S), "the outer one is under way"
        raise LookupError("as told")

    with pytest.raises(LookupError, match="as told"):
        run_concurrently(fails, 1)
    assert sys.getswitchinterval() == usual_s
