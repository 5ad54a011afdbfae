"""Slipstream: LLM inference whose first primitive is speculative decoding.

    from slipstream import LLM, SamplingParams
    llm = LLM("path-or-hub-id", speculative_config={"method": "ngram", "num_speculative_tokens": 4})
    print(llm.generate("Once upon a time", SamplingParams(temperature=0))[0].outputs[0].text)

Names are imported when they are first used, so that `import slipstream` is cheap.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipstream.config import EngineConfig, SpeculativeConfig
    from slipstream.engine.async_engine import AsyncEngine
    from slipstream.engine.llm import LLM
    from slipstream.engine.outputs import CompletionOutput, RequestOutput, Update
    from slipstream.errors import SlipstreamError
    from slipstream.sampling.params import SamplingParams
    from slipstream.sampling.structured import StructuredOutput

__version__ = "0.1.0"

_HOMES = {
    "AsyncEngine": "slipstream.engine.async_engine",
    "CompletionOutput": "slipstream.engine.outputs",
    "EngineConfig": "slipstream.config",
    "LLM": "slipstream.engine.llm",
    "RequestOutput": "slipstream.engine.outputs",
    "SamplingParams": "slipstream.sampling.params",
    "SlipstreamError": "slipstream.errors",
    "SpeculativeConfig": "slipstream.config",
    "StructuredOutput": "slipstream.sampling.structured",
    "Update": "slipstream.engine.outputs",
}

__all__ = [
    "LLM",
    "AsyncEngine",
    "CompletionOutput",
    "EngineConfig",
    "RequestOutput",
    "SamplingParams",
    "SlipstreamError",
    "SpeculativeConfig",
    "StructuredOutput",
    "Update",
]


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'slipstream' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
