"""`fast_prompts`: which models can have it, and what it says when it is on.

Which rows are fast goes by the request alone (`Sequence.num_fast_tokens`), what they are multiplied with and in which
order is `cpu/kernels/bfloat16.h`'s.
"""

from __future__ import annotations

import logging

import torch

from slipstream.errors import ConfigError
from slipstream.models.causal_lm import CausalLM
from slipstream.models.cpu.native import has_bfloat16_tiles, instructions

log = logging.getLogger(__name__)

FORMATS = ("bfloat16", "float16")
"""Weight formats whose products have the faster arithmetic; those of int8 and int4 are of integers without it."""


def check_fast_prompts(device: torch.device, native: bool, weights: str | None) -> None:
    """Raise `ConfigError` where a model on `device` cannot have `fast_prompts`, before its weights are read.

    `weights` is the format that they are to be held in, None where only the checkpoint says.
    """
    if device.type != "cpu":
        raise ConfigError(f"fast_prompts is for CPUs; leave it out on {device.type}")
    if not native:
        raise ConfigError("fast_prompts needs the native kernels (cpu_kernels), and PyTorch's would be used")
    if weights is not None:
        check_format(weights)


def turn_on_fast_prompts(lm: CausalLM) -> None:
    """Let a loaded model have `fast_prompts`; raises `ConfigError` where it cannot, and logs what it gives up."""
    executor = lm.executor
    check_model(lm.family, lm.weight_type, executor.computes_fast_rows, executor.has_experts)
    lm.fast_prompts = True
    log.info(
        "fast_prompts: the rows of prompts are computed in bfloat16, and text differs a little from that without it"
    )
    if not has_bfloat16_tiles():
        log.warning(
            "fast_prompts is no faster here (%s): it needs AMX. Prompts get the bits that they get there, and take "
            "longer than without it",
            instructions(),
        )


def check_model(family: str, weights: str, fused: bool, has_experts: bool) -> None:
    """Raise `ConfigError` for a model that cannot have `fast_prompts`; `fused`: whether whole passes are one call."""
    check_format(weights)
    if not fused:
        raise ConfigError(
            f"fast_prompts needs the fused decoder, and this {family} model runs layer by layer; leave it out"
        )
    if has_experts:
        raise ConfigError(
            "fast_prompts is not for models with experts, whose rows go different ways; leave it out"
        )


def check_format(weights: str) -> None:
    """Raise `ConfigError` for weights that are held in another format than those of `fast_prompts`."""
    if weights not in FORMATS:
        raise ConfigError(
            f"fast_prompts is for weights kept in {' or '.join(FORMATS)}, and this model's are {weights}; leave it "
            "out, or choose such a dtype"
        )
