"""The engines whose settings can be written and read, by name."""

from __future__ import annotations

from slipstream.config import reject_unknown
from slipstream.export.contract import SettingsFormat
from slipstream.export.settings.llama_cpp import LlamaCppSettings
from slipstream.export.settings.openvino import OpenvinoSettings
from slipstream.export.settings.sglang import SglangSettings
from slipstream.export.settings.tensorrt_llm import TensorrtLlmSettings
from slipstream.export.settings.transformers import TransformersSettings
from slipstream.export.settings.vllm import VllmSettings

ENGINES: dict[str, SettingsFormat] = {
    engine.name: engine
    for engine in (
        *(VllmSettings(), SglangSettings(), TensorrtLlmSettings()),
        *(LlamaCppSettings(), OpenvinoSettings(), TransformersSettings()),
    )
}
SYNONYMS = {
    "llama.cpp": "llama-cpp",
    "llamacpp": "llama-cpp",
    "llama_cpp": "llama-cpp",
    "tensorrt": "tensorrt-llm",
    "tensorrt_llm": "tensorrt-llm",
    "trtllm": "tensorrt-llm",
    "openvino-genai": "openvino",
    "hf": "transformers",
}


def settings_format(engine: str) -> SettingsFormat:
    """The form of `engine`; raises `ConfigError` with the nearest name for one that is not known."""
    name = SYNONYMS.get(engine.lower(), engine.lower())
    reject_unknown([name], ENGINES, "engine")
    return ENGINES[name]
