"""What records the work of a device once and replays it: a CUDA graph, and the buffer that it reads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch
from torch import Tensor

Out = TypeVar("Out")
"""Tensors, in whatever holds them."""


class Graph(Protocol):
    """Records what a function computes, and computes it anew."""

    def record(self, compute: Callable[[], Out]) -> Out:
        """Call `compute` and keep what it launched; its outputs are where every replay leaves them."""

    def replay(self) -> None:
        """Launch it again, over the same tensors."""


class CudaGraph:
    """A `torch.cuda.CUDAGraph`; all of a device share one pool of memory."""

    pools: ClassVar[dict[int, tuple[Any, Any, Any]]] = {}
    """By device the pool's handle, the stream that is recorded, since PyTorch's own is that of the first device, and a
    graph that is never freed: a pool without graphs cannot be used again."""
    _lock: ClassVar[threading.Lock] = threading.Lock()
    """One pass at a time is recorded, of all models."""

    def __init__(self) -> None:
        self._graph = torch.cuda.CUDAGraph()

    def record(self, compute: Callable[[], Out]) -> Out:
        """See `Graph`. The first call, before the recording, compiles kernels and chooses algorithms."""
        compute()
        device, stream = torch.cuda.current_device(), torch.cuda.current_stream()
        with CudaGraph._lock:
            if device not in CudaGraph.pools:
                kept, handle = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
                own = torch.cuda.Stream()  # type: ignore[no-untyped-call]
                with torch.cuda.graph(kept, handle, own, "thread_local"):
                    torch.zeros(1, device="cuda")
                CudaGraph.pools[device] = (handle, own, kept)
            handle, own, _ = CudaGraph.pools[device]
            try:
                with torch.cuda.graph(self._graph, handle, own, "thread_local"):
                    return compute()
            except BaseException:
                torch.cuda.set_stream(stream)  # a recording that is broken off leaves its own behind,
                del CudaGraph.pools[device]  # and a pool that is still being recorded to
                raise

    def replay(self) -> None:
        """See `Graph`."""
        self._graph.replay()


class RecordedPass(Generic[Out]):
    """One graph, the buffer that it reads, and the outputs that it writes."""

    def __init__(
        self, graph: Graph, size: int, device: torch.device, compute: Callable[[Tensor], Out]
    ) -> None:  # fmt: skip
        """`compute` reads the buffer that it is given, of `size` numbers, at every replay."""
        self._graph = graph
        self._compute: Callable[[Tensor], Out] | None = compute
        self.buffer = torch.zeros(size, dtype=torch.int64, device=device)
        self.output: Out | None = None

    def replay(self, numbers: Tensor) -> Out:
        """What the pass with these numbers yields. The next replay overwrites it."""
        self.buffer.copy_(numbers)
        if self._compute is not None:
            compute = self._compute
            self.output = self._graph.record(lambda: compute(self.buffer))
            self._compute = None  # it holds the cache, which may end before its graphs
        assert self.output is not None
        self._graph.replay()
        return self.output


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Kernels and graphs are launched on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def why_not_recorded(error: RuntimeError) -> str:
    """Why a pass cannot be recorded, in one line. A want of memory may hide behind what it made of the recording."""
    if any(isinstance(each, torch.OutOfMemoryError) for each in (error, error.__cause__, error.__context__)):
        return "the device has no memory left for a graph; give the cache less with kv_cache_bytes"
    return str(error).split("\n")[0]
