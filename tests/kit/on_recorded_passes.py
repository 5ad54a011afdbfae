"""A pytest plugin (`-p tests.kit.on_recorded_passes`): every engine replays recorded passes, unless a test says
otherwise."""

from __future__ import annotations

from typing import Any

from slipstream.config import EngineConfig

RECORDED = {
    "attention_backend": "slipstream.testing.recorded_graph:TritonOnCpu",
    "executor": "slipstream.testing.recorded_graph:ComputedExecutor",
    "cpu_kernels": "torch",
}
_init = EngineConfig.__init__


def _recorded(self: EngineConfig, *arguments: Any, **named: Any) -> None:
    if not named.keys() & (RECORDED.keys() | {"quantization"}):
        named |= RECORDED
    _init(self, *arguments, **named)


EngineConfig.__init__ = _recorded  # type: ignore[method-assign]
