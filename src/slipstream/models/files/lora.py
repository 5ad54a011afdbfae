"""LoRA adapters: merged into the weights while a model is loaded, so that a pass costs no more with one."""

from __future__ import annotations

import json
import logging
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.utils.peft_utils import find_adapter_config_file

from slipstream.errors import ConfigError, ModelError

log = logging.getLogger(__name__)

ADAPTER_CONFIG = "adapter_config.json"


def has_adapter(folder: Path) -> bool:
    """Whether an adapter lies beside a model's weights."""
    return (folder / ADAPTER_CONFIG).is_file()


def chosen_adapter(path: str, revision: str | None, wanted: str | None) -> str | None:
    """The folder of the adapter to merge into the model of `path`: `wanted`, or one that lies beside the weights.

    Raises `ModelError` or `ConfigError` for an adapter that cannot be merged, and where there are two.
    """
    if Path(path).is_dir():
        beside = path if has_adapter(Path(path)) else None
    elif find_adapter_config_file(path, revision=revision):
        raise ModelError(
            f"{path!r} holds a LoRA adapter beside its weights, which is merged from a folder only: download it with "
            f"`hf download {path} --local-dir FOLDER` and give that folder"
        )
    else:
        beside = None
    if wanted and beside and Path(wanted).resolve() != Path(beside).resolve():
        raise ModelError(
            f"two LoRA adapters: {wanted!r} is asked for, and another lies beside the weights of {path!r}; "
            "move its adapter_* files away, or merge them into the weights first"
        )
    chosen = wanted or beside
    if chosen is not None:
        _check_adapter(chosen)
    return chosen


def _check_adapter(folder: str) -> None:
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

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*tie_word_embeddings.*")  # see `_untie`
        adapted: Any = PeftModel(model, PeftConfig.from_pretrained(folder))
    loaded = adapted.load_adapter(folder, adapter_name="default")
    # PEFT initialises missing weights at random and ignores unknown ones.
    for what, names in (("lacks", loaded.missing_keys), ("has unknown", loaded.unexpected_keys)):
        odd = [name for name in names if "lora_" in name or what == "has unknown"]
        if odd:
            raise ModelError(
                f"the LoRA adapter {folder!r} does not fit the model: it {what} weights: {min(odd)}"
            )
    _untie(model, adapted)
    with torch.no_grad():
        merged = adapted.merge_and_unload(safe_merge=True)
    merged.requires_grad_(True)  # as Transformers had loaded it
    log.info("merged the LoRA adapter %s into the weights", folder)
    return merged


def _untie(model: Any, adapted: Any) -> None:
    """Give the output layer weights of its own where it shares those of the embedding and one of them is adapted.

    Merged into shared weights, a change that was learned for one layer would change the other too.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    kind: Any = BaseTunerLayer
    layers = [adapted.get_input_embeddings(), adapted.get_output_embeddings()]
    if not any(isinstance(layer, kind) for layer in layers):
        return
    first, last = (layer.get_base_layer() if isinstance(layer, kind) else layer for layer in layers)
    if first.weight is last.weight:
        last.weight = nn.Parameter(last.weight.detach().clone(), requires_grad=False)
        model.config.tie_word_embeddings = False
