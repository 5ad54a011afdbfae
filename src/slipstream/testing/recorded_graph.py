"""A stand-in on a CPU for CUDA's graphs: it records the operators of a pass, and runs the records again.

What a graph of CUDA's does not allow is an error here too: numbers read back to the host, sizes that depend on numbers,
and uploads. What the host computed while it was recorded stays as it was. Load a model with
`attention_backend="slipstream.testing.recorded_graph:TritonOnCpu"` and
`executor="slipstream.testing.recorded_graph:RecordedExecutor"`, or `RecordedKernels` for the fused decoder.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from slipstream.models.attention.base import ModelTraits
from slipstream.models.attention.packed import PackedBackend
from slipstream.models.attention.triton import TritonBackend
from slipstream.models.executor.base import PassOutput
from slipstream.models.executor.cuda_graph import CudaGraphExecutor
from slipstream.models.executor.cuda_kernels import CudaKernels
from slipstream.models.executor.recording import Graph, Out

REFUSED = (
    *("_local_scalar_dense", "nonzero", "masked_select", "lift_fresh", "unique", "equal"),
    *("item", "is_nonzero", "argwhere", "allclose"),  # in inference mode these are not taken apart
)
"""Operators that wait for the device, or whose result has a size that depends on numbers."""


class RecordedGraph:
    """See `slipstream.models.executor.cuda_graph.Graph`."""

    def __init__(self) -> None:
        self._calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Tensor]]] = []

    def record(self, compute: Callable[[], Out]) -> Out:
        """As a CUDA graph is: once to warm up, then with every operator noted. All results are poisoned after."""
        compute()
        with _OperatorRecorder(self._calls):
            output = compute()
        for *_, results in self._calls:
            for result in results:
                result.fill_(float("nan") if result.is_floating_point() else 0)
        return output

    def replay(self) -> None:
        """Run the records over the same tensors."""
        for operator, arguments, named, results in self._calls:
            for result, again in zip(
                results, _made(operator(*arguments, **named), arguments, named), strict=True
            ):
                result.copy_(again)


class _OperatorRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, calls: list[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls = calls

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in REFUSED:
            raise RuntimeError(f"{name} cannot be recorded")
        named = kwargs or {}
        result = func(*args, **named)
        self._calls.append((func, args, named, _made(result, args, named)))
        return result


def _made(result: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> list[Tensor]:
    """The results that are memory of their own, not views of an argument or the argument itself."""
    given = {_memory(part) for part in tree_leaves((arguments, named)) if isinstance(part, Tensor)}
    parts = (part for part in tree_leaves(result) if isinstance(part, Tensor))
    return [part for part in parts if _memory(part) not in given]


def _memory(tensor: Tensor) -> object:
    return tensor if tensor.is_mkldnn else tensor.untyped_storage().data_ptr()


class ComputedGraph:
    """Computes the pass anew at every replay: what is left of a `RecordedGraph` where speed and memory count."""

    def __init__(self) -> None:
        self._compute: Callable[[], Any] | None = None
        self._output: Any = None

    def record(self, compute: Callable[[], Out]) -> Out:
        """See `RecordedGraph`."""
        self._compute, output = compute, compute()
        self._output = output
        return output

    def replay(self) -> None:
        """Compute into the tensors of the first time."""
        assert self._compute is not None
        for result, again in zip(_tensors(self._output), _tensors(self._compute()), strict=True):
            result.copy_(again)


def _tensors(output: Any) -> list[Tensor]:
    values = [output.logits, output.hidden, output.verdicts] if isinstance(output, PassOutput) else output
    return [part for part in tree_leaves(values) if isinstance(part, Tensor)]


class TritonOnCpu(TritonBackend):
    """The backend of the Triton kernels, whose operator a CPU computes in PyTorch or in Triton's interpreter."""

    executor = "slipstream.testing.recorded_graph:RecordedExecutor"

    @classmethod
    def refusal(cls, traits: ModelTraits) -> str | None:
        return PackedBackend.refusal(traits)


class RecordedExecutor(CudaGraphExecutor):
    """Replays recorded passes on a CPU."""

    num_scratch_slots: ClassVar[int] = 8
    warms_up: ClassVar[bool] = False  # a CPU takes seconds for the largest
    graph: ClassVar[type[Graph]] = RecordedGraph


class ComputedExecutor(RecordedExecutor):
    """Computes each pass in the buffers of a recorded one."""

    graph: ClassVar[type[Graph]] = ComputedGraph


class RecordedKernels(CudaKernels):
    """Replays recorded passes of the GPU's fused decoder on a CPU."""

    num_scratch_slots: ClassVar[int] = RecordedExecutor.num_scratch_slots
    warms_up: ClassVar[bool] = False
    graph: ClassVar[type[Graph]] = RecordedGraph
    otherwise: ClassVar[str | None] = TritonOnCpu.executor


class ComputedKernels(RecordedKernels):
    """Computes each of its passes in the buffers of a recorded one."""

    graph: ClassVar[type[Graph]] = ComputedGraph


class KernelsOnCpu(TritonOnCpu):
    """As `TritonOnCpu`, for the fused decoder where it computes the model."""

    executor = "slipstream.testing.recorded_graph:RecordedKernels"
