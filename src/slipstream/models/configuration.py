"""The Transformers configuration of a checkpoint, and the model without numbers that it describes."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn

from slipstream.core.model_path import names_gguf
from slipstream.errors import ModelError
from slipstream.models.encoder_decoder import as_decoder
from slipstream.models.files.folder import check_folder
from slipstream.models.files.gguf import open_gguf
from slipstream.models.files.gguf_architectures import read_config
from slipstream.models.files.gguf_model import find_gguf
from slipstream.models.huggingface import AutoConfig, GenerationConfig, auto_class, creating_models
from slipstream.models.quiet import one_line, silenced


def load_config(path: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """The checkpoint's Transformers configuration: of a folder, a hub id, or a GGUF file."""
    file = find_gguf(path, revision)
    if file is not None:
        return read_config(open_gguf(file))
    check_folder(path)
    with one_line(f"cannot read the configuration of {named(path)}"), silenced():
        return AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=trust_remote_code)


def read_config_file(file: str, *, trust_remote_code: bool = False) -> Any:
    """The Transformers configuration in a file of its own: a `config.json` without a checkpoint."""
    with one_line(f"cannot read the configuration {file!r}"), silenced():
        return AutoConfig.from_pretrained(file, trust_remote_code=trust_remote_code)


def read_generation_config(model: Any, path: str, revision: str | None) -> None:
    """Give a Transformers model what most checkpoints have besides their weights: how to sample, where answers end.

    A GGUF file and a bare `config.json` have none, and the model keeps what its configuration says.
    """
    if names_gguf(path) or Path(path).is_file():
        return
    with contextlib.suppress(OSError):
        model.generation_config = GenerationConfig.from_pretrained(path, revision=revision or "main")


def meta_model(config: Any, attention: str, trust_remote_code: bool) -> Any:
    """The Transformers model without numbers. Its type is none that counts, and `config` stays as it is."""
    try:
        with silenced(), creating_models(config), torch.device("meta"):
            model = auto_class(config).from_config(
                copy.deepcopy(config),
                dtype=torch.bfloat16,  # experts' products have no other type on this device
                attn_implementation=attention,
                trust_remote_code=trust_remote_code,
            )
        _forget_numbers(model)
        model.tie_weights()
    except Exception as error:
        lines = str(error).strip().splitlines()
        reason = lines[0] if lines else type(error).__name__
        raise ModelError(
            f"no {config.model_type} model can be made of this configuration: {reason}"
        ) from None
    return as_decoder(model).eval()


def _forget_numbers(model: nn.Module) -> None:
    """Weights whose first numbers are a range, which is made on the CPU, go to the meta device as all others do."""
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None and not weight.is_meta:
                module._parameters[name] = nn.Parameter(weight.detach().to("meta"), requires_grad=False)


def named(path: str) -> str:
    """The path as a message names it; what is no folder is said to be a hub id."""
    return repr(path) if Path(path).is_dir() else f"{path!r} (no folder of that name, so taken as a hub id)"
