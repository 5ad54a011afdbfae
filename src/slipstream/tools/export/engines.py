"""The engines whose settings can be written and read, by name."""

from __future__ import annotations

from slipstream.config import reject_unknown
from slipstream.tools.export.contract import ExportedSetting, SettingsFormat
from slipstream.tools.export.record import SpeculativeRecord
from slipstream.tools.export.refusals import ExportError
from slipstream.tools.export.settings.llama_cpp import LlamaCppSettings
from slipstream.tools.export.settings.openvino import OpenvinoSettings
from slipstream.tools.export.settings.sglang import SglangSettings
from slipstream.tools.export.settings.tensorrt_llm import TensorrtLlmSettings
from slipstream.tools.export.settings.transformers import TransformersSettings
from slipstream.tools.export.settings.vllm import VllmSettings

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


def setting_or_nearest(
    engine: str, record: SpeculativeRecord, version: str, nearest: bool
) -> tuple[SpeculativeRecord, ExportedSetting, tuple[str, ...]]:
    """(the record, its setting, why it is another), with `nearest` of the nearest record that the engine runs.

    Raises `ExportError` without it, or where nothing that the engine runs comes near.
    """
    why: list[str] = []
    while True:
        try:
            return record, settings_format(engine).to_engine(record, version), tuple(why)
        except ExportError as error:
            if error.nearest is None:
                raise
            if not nearest:
                raise ExportError(f"{error} (--nearest takes that)") from None
            why.append(str(error))
            record = error.nearest
