"""Slipstream: LLM inference whose first primitive is speculative decoding.

    from slipstream import LLM, SamplingParams
    llm = LLM("path-or-hub-id", speculative_config={"method": "ngram", "num_speculative_tokens": 4})
    print(llm.generate("Once upon a time", SamplingParams(temperature=0))[0].outputs[0].text)

Names are imported when they are first used, so that `import slipstream` is cheap.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from slipstream.core.garbage import uncollected
from slipstream.core.version import __version__ as __version__

if TYPE_CHECKING:
    from slipstream.config import EngineConfig, SpeculativeConfig
    from slipstream.core.request import RequestOptions
    from slipstream.engine.async_engine import AsyncEngine
    from slipstream.engine.llm import LLM
    from slipstream.engine.logprobs import Logprob
    from slipstream.engine.outputs import CompletionOutput, RequestOutput, Update
    from slipstream.errors import SlipstreamError
    from slipstream.sampling.params import RequestOutputKind, SamplingParams
    from slipstream.sampling.structured import StructuredOutput
    from slipstream.sampling.structured_outputs import StructuredOutputsParams
    from slipstream.text.prompts import TextPrompt, TokensPrompt

_HOMES = {
    "AsyncEngine": "slipstream.engine.async_engine",
    "CompletionOutput": "slipstream.engine.outputs",
    "EngineConfig": "slipstream.config",
    "LLM": "slipstream.engine.llm",
    "Logprob": "slipstream.engine.logprobs",
    "RequestOptions": "slipstream.core.request",
    "RequestOutput": "slipstream.engine.outputs",
    "RequestOutputKind": "slipstream.sampling.params",
    "SamplingParams": "slipstream.sampling.params",
    "SlipstreamError": "slipstream.errors",
    "SpeculativeConfig": "slipstream.config",
    "StructuredOutput": "slipstream.sampling.structured",
    "StructuredOutputsParams": "slipstream.sampling.structured_outputs",
    "TextPrompt": "slipstream.text.prompts",
    "TokensPrompt": "slipstream.text.prompts",
    "Update": "slipstream.engine.outputs",
}

__all__ = [
    "LLM",
    "AsyncEngine",
    "CompletionOutput",
    "EngineConfig",
    "Logprob",
    "RequestOptions",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "SlipstreamError",
    "SpeculativeConfig",
    "StructuredOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "Update",
]


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'slipstream' has no attribute {name!r}")
    with uncollected():
        return getattr(import_module(_HOMES[name]), name)
