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
"""The executor that the model's attention backend names, or the one that takes its place (`Executor.otherwise`)."""

EXECUTORS: Registry[Executor] = Registry(
    "executor",
    Executor,  # type: ignore[type-abstract]
    ENTRY_POINT_GROUP,
    {
        "compiled_graph": "slipstream.models.executor.compiled_graph:CompiledGraphExecutor",
        "cpu_kernels": "slipstream.models.executor.cpu_kernels:CpuKernels",
        "cuda_kernels": "slipstream.models.executor.cuda_kernels:CudaKernels",
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


def candidates(name: str, backend: AttentionBackend) -> list[type[Executor]]:
    """The executor called `name`; with `auto` all that it takes for models that attend by `backend`, the best first."""
    found: list[type[Executor]] = []
    following: str | None = backend.executor if name == AUTO else name
    while following is not None:
        found.append(EXECUTORS.load(following))
        following = found[-1].otherwise if name == AUTO else None
    return found


def likely_executor(name: str, backend: AttentionBackend) -> type[Executor]:
    """As `choose_executor`, by what the attention tells before any weights are read."""
    found = candidates(name, backend)
    return next((each for each in found if each.misfit(backend) is None), found[-1])


def choose_executor(name: str, given: ProbedModel) -> type[Executor]:
    """The executor called `name` for a model; raises `ConfigError` where it cannot run it."""
    found, *others = candidates(name, given.backend)
    reason = found.refusal(given)
    for other in others:
        if reason is None:
            break
        log.info("%s is not run by %s: %s", given.model.config.model_type, found.name, reason)
        found, reason = other, other.refusal(given)
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
