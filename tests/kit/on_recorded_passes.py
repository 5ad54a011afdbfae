"""A pytest plugin (`-p tests.kit.on_recorded_passes`): every engine replays recorded passes, unless a test says
otherwise. The variable RECORDED_EXECUTOR names the stand-in of `slipstream.testing.recorded_graph` that computes them.
"""

from __future__ import annotations

import os
from typing import Any

from slipstream.config import EngineConfig

RECORDED = {
    "attention_backend": "slipstream.testing.recorded_graph:TritonOnCpu",
    "executor": f"slipstream.testing.recorded_graph:{os.environ.get('RECORDED_EXECUTOR', 'ComputedExecutor')}",
    "cpu_kernels": "torch",
}
_init = EngineConfig.__init__


def _recorded(self: EngineConfig, *arguments: Any, **named: Any) -> None:
    if not named.keys() & (RECORDED.keys() | {"quantization"}):
        named |= RECORDED
    _init(self, *arguments, **named)


EngineConfig.__init__ = _recorded  # type: ignore[method-assign]
