"""Executors by name, and the choice of one for a model.

A package adds an executor with one line of its own `pyproject.toml`:

    [project.entry-points."slipstream.executors"]
    my_executor = "my_package.module:MyExecutor"

and code with `EXECUTORS.register("my_executor", MyExecutor)`. Without either, `executor` may itself be
`"my_package.module:MyExecutor"`.
"""

from __future__ import annotations

from slipstream.config import reject_unknown
from slipstream.errors import ConfigError
from slipstream.models.executor.base import Executor, ProbedModel
from slipstream.registry import Registry

ENTRY_POINT_GROUP = "slipstream.executors"

AUTO = "auto"
"""The executor that the model's attention backend names."""

EXECUTORS: Registry[Executor] = Registry(
    "executor",
    Executor,  # type: ignore[type-abstract]
    ENTRY_POINT_GROUP,
    {
        "compiled_graph": "slipstream.models.executor.compiled_graph:CompiledGraphExecutor",
        "cpu_kernels": "slipstream.models.executor.cpu_kernels:CpuKernels",
        "cuda_graph": "slipstream.models.executor.cuda_graph:CudaGraphExecutor",
        "eager": "slipstream.models.executor.eager:EagerExecutor",
    },
)


def check_executor(name: str) -> None:
    """Raise `ConfigError` for a name that no executor has, or whose class cannot be imported."""
    if name == AUTO:
        return
    if ":" not in name:
        reject_unknown([name], [AUTO, *EXECUTORS.names()], "executor")
    EXECUTORS.load(name)


def choose_executor(name: str, given: ProbedModel) -> type[Executor]:
    """The executor called `name` for a model; raises `ConfigError` where it cannot run it."""
    found = EXECUTORS.load(given.backend.executor if name == AUTO else name)
    reason = found.refusal(given)
    if reason is not None:
        family = given.model.config.model_type
        raise ConfigError(f"executor {name!r} cannot run {family}: {reason}; use {AUTO!r}")
    return found
