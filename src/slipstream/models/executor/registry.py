"""Executors by name, and the choice of one for a model.

A package adds an executor with one line of its own `pyproject.toml`:

    [project.entry-points."slipstream.executors"]
    my_executor = "my_package.module:MyExecutor"

and code with `EXECUTORS.register("my_executor", MyExecutor)`. Without either, `executor` may itself be
`"my_package.module:MyExecutor"`.
"""

from __future__ import annotations

import functools
import logging

from slipstream.config import reject_unknown
from slipstream.errors import ConfigError
from slipstream.models.attention.base import AttentionBackend
from slipstream.models.attention.registry import ATTENTION
from slipstream.models.executor.base import Executor, ProbedModel
from slipstream.registry import Registry

log = logging.getLogger(__name__)

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


def check_attention(name: str, backend: AttentionBackend) -> None:
    """Raise `ConfigError` where the executor called `name` does not compute passes that attend by `backend`."""
    reason = None if name == AUTO else EXECUTORS.load(name).misfit(backend)
    if reason is not None:
        raise _cannot_run(name, backend.traits.config.model_type, reason)


def choose_executor(name: str, given: ProbedModel) -> type[Executor]:
    """The executor called `name` for a model; raises `ConfigError` where it cannot run it."""
    found = EXECUTORS.load(given.backend.executor if name == AUTO else name)
    reason = found.refusal(given)
    if reason is not None:
        raise _cannot_run(name, given.model.config.model_type, reason)
    if name == AUTO and given.backend.traits.device.type == "cuda" and not found.records:
        # On a GPU most of a step's time is then the host's.
        why = ATTENTION.load("triton").refusal(given.backend.traits) or "its attention_backend is not triton"
        warn_of_eager_passes(given.model.config.model_type, why)
    return found


def _cannot_run(name: str, family: str, reason: str) -> ConfigError:
    return ConfigError(f"executor {name!r} cannot run {family}: {reason}; use {AUTO!r}")


@functools.cache
def warn_of_eager_passes(family: str, why: str) -> None:
    log.warning("passes of %s are not recorded as CUDA graphs, which is slower: %s", family, why)
