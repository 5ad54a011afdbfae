"""Families by name.

A family is a subclass of `Family` that says by what names a model has its parts. A package adds one with one line of
its own `pyproject.toml`, under the `model_type` of the configuration:

    [project.entry-points."slipstream.families"]
    my_model_type = "my_package.module:MyFamily"

or a script calls `FAMILIES.register`. Whatever a description says, the model is compared with Transformers' own logits
when it is loaded, and refused where they differ.
"""

from __future__ import annotations

from typing import Any

from slipstream.models.families.family import Family
from slipstream.registry import Registry

FAMILIES = Registry(
    "family",
    Family,
    "slipstream.families",
    {
        name: f"slipstream.models.families.known:{family}"
        for name, family in {
            "arcee": "Arcee",
            "cwm": "Llama",
            "gemma": "Gemma",
            "gemma2": "Gemma2",
            "gemma3_text": "Gemma3",
            "gemma4_text": "Gemma4",
            "gemma4_unified_text": "Gemma4",
            "gpt_neox": "GptNeoX",
            "gpt_oss": "GptOss",
            "granite": "Granite",
            "granite_swa": "GraniteSwa",
            "internlm3": "Llama",
            "iquestcoder": "Llama",
            "llama": "Llama",
            "ministral": "Llama",
            "mistral": "Llama",
            "mixtral": "Mixtral",
            "olmo2": "Olmo2",
            "olmo3": "Olmo3",
            "olmoe": "Olmoe",
            "phi3": "Phi3",
            "qwen2": "Llama",
            "qwen3": "Qwen3",
            "qwen3_moe": "Qwen3Moe",
            "seed_oss": "Llama",
            "smollm3": "SmolLM3",
            "starcoder2": "Starcoder2",
            "vaultgemma": "VaultGemma",
        }.items()
    },
)
"""By the configuration's `model_type`. `FAMILIES.register(model_type, cls)` adds one for this process."""


def find_family(model: Any) -> Family | None:
    """The family of a Transformers model; None where none has its `model_type`."""
    model_type = model.config.model_type
    return FAMILIES.load(model_type).of(model.config) if model_type in FAMILIES.names() else None
