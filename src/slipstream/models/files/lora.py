"""LoRA adapters, put into a model while it is loaded.

They are merged into plain weights, so that a pass multiplies no more with one. Weights that stay as a file holds them,
quantised, keep theirs apart: what it adds is computed in float32 and added to the product of integers.
"""

from __future__ import annotations

import json
import logging
import re
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.utils.peft_utils import find_adapter_config_file

from slipstream.errors import ConfigError, ModelError
from slipstream.models.linear.low_rank import LowRankChange

log = logging.getLogger(__name__)

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")

WIDENS = "--dtype float32 widens them"
"""What to do about weights that cannot be kept as they are."""


def has_adapter(folder: Path) -> bool:
    """Whether an adapter lies next to a model's weights."""
    return (folder / ADAPTER_CONFIG).is_file()


def chosen_adapter(path: str, revision: str | None, wanted: str | None) -> str | None:
    """The folder of the adapter for the model of `path`: `wanted`, or one that lies next to the weights.

    Raises `ModelError` or `ConfigError` for an adapter that cannot be merged, and where there are two.
    """
    if Path(path).is_dir():
        found = path if has_adapter(Path(path)) else None
    elif Path(path).is_file():  # a GGUF file
        found = None
    elif find_adapter_config_file(path, revision=revision):
        raise ModelError(
            f"{path!r} holds a LoRA adapter next to its weights, which is merged from a folder only: download it with "
            f"`hf download {path} --local-dir FOLDER` and give that folder"
        )
    else:
        found = None
    if wanted and found and Path(wanted).resolve() != Path(found).resolve():
        raise ModelError(
            f"two LoRA adapters: {wanted!r} is asked for, and another lies next to the weights of {path!r}; "
            "move its adapter_* files away, or merge them into the weights first"
        )
    chosen = wanted or found
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
    if not any((where / name).is_file() for name in ADAPTER_WEIGHTS):
        # PEFT would look for them in a repository of the hub.
        raise ModelError(f"the LoRA adapter {folder!r} has no weights: no {' or '.join(ADAPTER_WEIGHTS)}")
    try:
        import peft  # noqa: F401
    except ImportError:
        raise ConfigError('LoRA adapters need the package peft: pip install "slipstream-llm[lora]"') from None


def apply_adapter(
    model: Any, folder: str, kept: Iterable[str] = (), stacks: Iterable[str] = ()
) -> tuple[Any, dict[str, LowRankChange]]:
    """The model with an adapter's changes in its weights, and those of quantised layers apart, by the layers' names.

    `kept` names the layers of `model` whose weights are stand-ins for quantised ones, and `stacks` the parameters of
    experts that are. Raises `ModelError` where the
    adapter was not made for this model, or changes such a layer in another way than by a product of low rank.
    """
    from peft import PeftConfig, PeftModel

    stand_ins = {id(model.get_submodule(name).weight) for name in kept}
    stand_ins |= {id(model.get_parameter(name)) for name in stacks}
    config: Any = PeftConfig.from_pretrained(folder)
    if stand_ins:
        _check_kind(config)
        _check_whole_weights(model, folder, stand_ins)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*tie_word_embeddings.*")  # see `_untie`
        adapted: Any = PeftModel(model, config)
    loaded = adapted.load_adapter(folder, adapter_name="default")
    # PEFT initialises missing weights at random and ignores unknown ones.
    for what, names in (("lacks", loaded.missing_keys), ("has unknown", loaded.unexpected_keys)):
        odd = [name for name in names if "lora_" in name or what == "has unknown"]
        if odd:
            raise ModelError(
                f"the LoRA adapter {folder!r} does not fit the model: it {what} weights: {min(odd)}"
            )
    changes = _take_apart(adapted.base_model.model, stand_ins)
    _untie(model, adapted, stand_ins)
    with torch.no_grad():
        merged = adapted.merge_and_unload(safe_merge=True)
    merged.requires_grad_(True)  # as Transformers had loaded it
    if changes:
        log.info("the LoRA adapter %s is kept apart from %d quantised layers", folder, len(changes))
    else:
        log.info("merged the LoRA adapter %s into the weights", folder)
    return merged, changes


_PART = re.compile(r"\.(?=lora_|base_layer\.|token_adapter\.)")
"""Between the name of a layer and that of an adapter's part of it."""
_NEED_NO_WEIGHTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""PEFT's ways to begin an adapter that neither read nor change the weights that it is for."""


def outlined_changes(
    model: Any, folder: str, kept: Iterable[str], stacks: Iterable[str] = ()
) -> dict[str, LowRankChange]:
    """What an adapter adds to quantised layers, by their names and without its numbers.

    `kept` names the layers of `model` that will be replaced by quantised ones, and `stacks` the parameters of experts
    that will be; others may share their weights. Raises `ModelError` for what `apply_adapter` would not keep apart.
    """
    from peft import PeftConfig
    from peft.utils.save_and_load import load_peft_weights

    found: dict[str, LowRankChange] = {}
    weights = load_peft_weights(folder, device="cpu")
    replaced = {id(model.get_submodule(name).weight) for name in kept}
    replaced |= {id(model.get_parameter(name)) for name in stacks}
    if replaced:
        _check_kind(PeftConfig.from_pretrained(folder))
        _check_whole_weights(model, folder, replaced)
        _check_products(model, weights, replaced)
    for name, module in model.named_modules():
        if id(getattr(module, "weight", None)) not in replaced:
            continue
        parts = [weights.get(f"base_model.model.{name}.lora_{part}.weight") for part in "AB"]
        down, up = (None if part is None else part.to("meta", torch.float32) for part in parts)
        if down is not None and up is not None:
            found[name] = LowRankChange(down, up)
    return found


def _check_products(model: Any, names: Iterable[str], stand_ins: set[int]) -> None:
    """Raise `ModelError` where a saved number changes a layer of stand-ins by more than a product of low rank."""
    modules = dict(model.named_modules())
    for key in names:
        name, _, part = _PART.sub(" ", key.removeprefix("base_model.model."), count=1).partition(" ")
        layer = modules.get(name)
        if layer is None or not any(id(each) in stand_ins for each in layer.parameters(recurse=False)):
            continue
        if not isinstance(layer, nn.Linear) or part not in ("lora_A.weight", "lora_B.weight"):
            raise _more_than_a_product(name)


def _check_kind(config: Any) -> None:
    """Raise `ModelError` for an adapter that is more than a product of low rank."""
    if config.init_lora_weights not in _NEED_NO_WEIGHTS:
        raise _cannot_be_kept_apart(
            f"it begins with {config.init_lora_weights}, which changes the model's weights"
        )
    if config.use_dora:
        raise _cannot_be_kept_apart("it is of the kind DoRA, which scales the model's weights")


def _check_whole_weights(model: Any, folder: str, stand_ins: set[int]) -> None:
    """Raise `ModelError` where an adapter holds whole weights of layers whose own are stand-ins.

    PEFT saves those of embedding and output layer with an adapter that changes them, unless it is set not to.
    """
    from peft.utils.save_and_load import load_peft_weights

    modules = dict(model.named_modules())
    for key in load_peft_weights(folder, device="cpu"):
        name = key.removeprefix("base_model.model.").removesuffix(".weight").removesuffix(".base_layer")
        if id(getattr(modules.get(name), "weight", None)) in stand_ins:
            raise _cannot_be_kept_apart(f"it holds whole weights for {name}, whose own are quantised")


def _take_apart(adapted: Any, stand_ins: set[int]) -> dict[str, LowRankChange]:
    """Take the adapter's layers off those whose weights are stand-ins, and return what they add, by names."""
    from peft.tuners.lora import LoraLayer
    from peft.utils import AuxiliaryTrainingWrapper

    changes: dict[str, LowRankChange] = {}
    for name, layer in list(adapted.named_modules()):
        is_wrapper = isinstance(layer, AuxiliaryTrainingWrapper)
        if not is_wrapper and not isinstance(layer, LoraLayer):
            continue
        base: Any = layer.original_module if is_wrapper else layer.get_base_layer()
        if not any(id(parameter) in stand_ins for parameter in base.parameters(recurse=False)):
            continue
        is_product = not is_wrapper and isinstance(base, nn.Linear)
        if not is_product or layer.lora_variant or any(layer.lora_bias.values()):
            raise _more_than_a_product(name)
        up = layer.lora_B["default"].weight.detach().float() * layer.scaling["default"]
        changes[name] = LowRankChange(layer.lora_A["default"].weight.detach().float(), up)
        adapted.set_submodule(name, base)
    return changes


def _more_than_a_product(name: str) -> ModelError:
    return _cannot_be_kept_apart(f"it changes {name} by more than a product of low rank")


def _cannot_be_kept_apart(reason: str) -> ModelError:
    return ModelError(f"the adapter cannot be kept apart from quantised weights: {reason}; {WIDENS}")


def _untie(model: Any, adapted: Any, stand_ins: set[int]) -> None:
    """Give the output layer weights of its own where it shares those of the embedding and one of them is adapted.

    Merged into shared weights, a change that was learned for one layer would change the other too. Nothing is merged
    into `stand_ins`.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    kind: Any = BaseTunerLayer
    layers = [adapted.get_input_embeddings(), adapted.get_output_embeddings()]
    if not any(isinstance(layer, kind) for layer in layers):
        return
    first, last = (layer.get_base_layer() if isinstance(layer, kind) else layer for layer in layers)
    if first.weight is last.weight and id(first.weight) not in stand_ins:
        last.weight = nn.Parameter(last.weight.detach().clone(), requires_grad=False)
        model.config.tie_word_embeddings = False
