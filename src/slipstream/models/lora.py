"""LoRA adapters: read and merged into the weights while a model is loaded, so that a pass costs what it cost before."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch

from slipstream.errors import ConfigError, ModelError

log = logging.getLogger(__name__)

ADAPTER_CONFIG = "adapter_config.json"


def adapter_beside(path: str) -> str | None:
    """The model's own folder where an adapter lies in it."""
    return path if (Path(path) / ADAPTER_CONFIG).is_file() else None


def check_adapter(folder: str) -> None:
    """Raise `ModelError` or `ConfigError` for what cannot be merged, before any weights are read."""
    where = Path(folder)
    if not (where / ADAPTER_CONFIG).is_file():
        raise ModelError(f"{folder!r} is no LoRA adapter: it has no {ADAPTER_CONFIG}")
    try:
        kind = json.loads((where / ADAPTER_CONFIG).read_text())["peft_type"]
    except (OSError, ValueError, KeyError, TypeError):
        raise ModelError(
            f"cannot read {where / ADAPTER_CONFIG}: it must be a JSON object with peft_type"
        ) from None
    if kind != "LORA":
        raise ModelError(f"{folder!r} is an adapter of type {kind}; only LORA adapters can be merged")
    try:
        import peft  # noqa: F401
    except ImportError:
        raise ConfigError('LoRA adapters need the package peft: pip install "slipstream-llm[lora]"') from None


def merge_adapter(model: Any, folder: str) -> Any:
    """The model with the adapter's changes in its weights; raises `ModelError` where it was not made for this model."""
    from peft import PeftConfig, PeftModel

    adapted: Any = PeftModel(model, PeftConfig.from_pretrained(folder))
    loaded = adapted.load_adapter(folder, adapter_name="default")
    # What is missing was drawn at random, what is unknown was left out.
    for what, names in (("lacks", loaded.missing_keys), ("has unknown", loaded.unexpected_keys)):
        odd = [name for name in names if "lora_" in name or what == "has unknown"]
        if odd:
            raise ModelError(
                f"the LoRA adapter {folder!r} does not fit the model: it {what} weights: {min(odd)}"
            )
    with torch.inference_mode():
        merged = adapted.merge_and_unload(safe_merge=True)
    log.info("merged the LoRA adapter %s into the weights", folder)
    return merged
