"""Passes on a GPU leave cuDNN's attention out, and nothing else in the process notices."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.backends import cuda

from slipstream import LLM, SamplingParams
from slipstream.assets import EMBEDDED_EAGLE3
from slipstream.models.attention.gpu import without_cudnn

GPU, CPU = torch.device("cuda"), torch.device("cpu")


def flags() -> tuple[bool, ...]:
    return (
        cuda.cudnn_sdp_enabled(),  # type: ignore[no-untyped-call]
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
    )


def test_cudnn_is_left_out_on_a_gpu_alone() -> None:
    before = flags()
    assert before == (True,) * 4
    with without_cudnn(GPU):
        assert flags() == (False, True, True, True)
        with without_cudnn(GPU):
            assert flags() == (False, True, True, True)
        assert flags() == (False, True, True, True)
    with without_cudnn(CPU):
        assert flags() == before
    assert flags() == before


def test_a_switch_that_was_off_stays_off() -> None:
    cuda.enable_cudnn_sdp(False)
    try:
        with pytest.raises(ZeroDivisionError), without_cudnn(GPU):
            raise ZeroDivisionError
        assert not cuda.cudnn_sdp_enabled()
    finally:
        cuda.enable_cudnn_sdp(True)


def test_passes_that_overlap_in_two_threads() -> None:
    """The one that began first ends first; its end must not let cuDNN into the other one."""
    inside, over = threading.Event(), threading.Event()
    seen: list[bool] = []

    def other_pass() -> None:
        with without_cudnn(GPU):
            inside.set()
            assert over.wait(60)
            seen.append(flags()[0])

    thread = threading.Thread(target=other_pass)
    with without_cudnn(GPU):
        thread.start()
        assert inside.wait(60)
    over.set()
    thread.join()
    assert seen == [False]
    assert cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize("room", ["slipstream.models.executor.eager", "slipstream.draft.heads.head_executor"])
def test_targets_and_heads_attend_without_cudnn(room: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, with the switch in the place where a GPU would have it."""
    in_target = room.endswith("executor.eager")
    spec = None if in_target else {"method": "eagle3", "model": EMBEDDED_EAGLE3}
    llm = LLM(speculative_config=spec, kv_cache_bytes=2**27, cpu_kernels="torch")
    seen: list[bool] = []
    attend = F.scaled_dot_product_attention

    def spy(*args: Any, **options: Any) -> torch.Tensor:
        seen.append(flags()[0])
        return attend(*args, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    for each in {
        room,
        "slipstream.models.executor.eager",
    }:  # PyTorch's kernels compute the target beside a head too
        monkeypatch.setattr(f"{each}.without_cudnn", lambda _: without_cudnn(GPU))
    llm.generate([[5, 6, 7]], SamplingParams(max_tokens=8, ignore_eos=True))
    assert set(seen) == {False}
