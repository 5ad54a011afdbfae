"""Sampling parameters that a checkpoint recommends, for requests that give none."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from slipstream.config import EngineConfig, reject_unknown
from slipstream.errors import ConfigError, RequestError
from slipstream.models.huggingface import GenerationConfig
from slipstream.sampling.params import SamplingParams

logger = logging.getLogger(__name__)

NEUTRAL = "vllm"
"""The `generation_config` that ignores the checkpoint's."""
_NAMES = {
    **{name: name for name in ("repetition_penalty", "temperature", "top_k", "top_p", "min_p")},
    "max_new_tokens": "max_tokens",
}
"""Transformers' names, those that vLLM reads, to ours."""


def sampling_defaults(config: EngineConfig, model: Any) -> dict[str, Any]:
    """Names and values of `SamplingParams` where they differ from its defaults.

    `model` is Transformers', with the generation configuration that came with the checkpoint. Raises `ConfigError` for
    values that no request could have.
    """
    found = _recommended(config.generation_config, getattr(model, "generation_config", None))
    override = config.override_generation_config or {}
    reject_unknown(override, [*_NAMES, "max_tokens"], "override_generation_config key")
    values = found | {_NAMES.get(name, name): value for name, value in override.items()}
    try:
        params = SamplingParams(**values)
    except RequestError as error:
        raise ConfigError(
            f'the generation configuration has {error}; generation_config="{NEUTRAL}" does without it'
        ) from None
    neutral = SamplingParams()
    values = {
        name: getattr(params, name) for name in values if getattr(params, name) != getattr(neutral, name)
    }
    if found and values:
        logger.warning(
            'requests that do not say otherwise get the checkpoint\'s %s (generation_config="%s" turns this off)',
            ", ".join(f"{name} {value:g}" for name, value in values.items()),
            NEUTRAL,
        )
    return values


def _recommended(source: str, own: Any) -> dict[str, Any]:
    if source == NEUTRAL:
        return {}
    if source != "auto":
        try:
            own = GenerationConfig.from_pretrained(source)
        except (OSError, ValueError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ConfigError(
                f"generation_config must be auto, {NEUTRAL} or a folder with generation_config.json: {reason}"
            ) from None
    values: Mapping[str, Any] = {} if own is None else own.to_dict()
    return {ours: values[name] for name, ours in _NAMES.items() if values.get(name) is not None}
