"""Passes that `torch.compile` has made one graph of, recorded as CUDA graphs.

What the compiler fuses (norms, rotary embeddings, activations) saves launches and reads of memory. It takes seconds for
each shape, and its arithmetic is another than that of the passes that are not recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch._dynamo.config

from slipstream.models.executor.cuda_graph import CudaGraphExecutor

MOST_SHAPES = 4096
"""How often passes may be compiled in one process; PyTorch's own limit is 8."""


LIMITS = ("recompile_limit", "accumulated_recompile_limit")


class CompiledGraphExecutor(CudaGraphExecutor):
    """Compiles a pass before it is recorded. A model that does not compile as a whole runs eagerly."""

    name: ClassVar[str] = "compiled_graph"
    compiler: ClassVar[str] = "inductor"

    def callable(self) -> Callable[..., Any]:
        model = self.model

        def call(**arguments: Any) -> Any:
            return model(**arguments)

        compiled = torch.compile(call, fullgraph=True, dynamic=False, backend=self.compiler)

        def compile_and_call(**arguments: Any) -> Any:
            limits: dict[str, Any] = dict.fromkeys(LIMITS, MOST_SHAPES)
            with torch._dynamo.config.patch(limits):  # counted over all models of a process
                return compiled(**arguments)

        return compile_and_call
