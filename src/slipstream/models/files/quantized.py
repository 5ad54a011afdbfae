"""Checkpoints whose weights were saved quantised: which can be read, and what to do about the others."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Mapping
from typing import Any

from slipstream.errors import ModelError

log = logging.getLogger(__name__)

_NAMES = {
    "gptq": "GPTQ",
    "awq": "AWQ",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed-tensors",
    "auto-round": "AutoRound",
    "gguf": "GGUF",
    "hqq": "HQQ",
    "torchao": "torchao",
    "quanto": "Quanto",
    "aqlm": "AQLM",
    "bitnet": "BitNet",
    "fbgemm_fp8": "FBGEMM FP8",
    "nvfp4": "NVFP4",
    "mxfp8": "MXFP8",
}

WIDENED = {"fp8": "block-wise FP8", "mxfp4": "MXFP4"}
"""Formats that Transformers converts to 16-bit weights while it loads them."""


def settle_quantized(path: str, config: Any) -> None:
    """Decide how the quantised weights of a checkpoint are read.

    Where they are widened, logs a warning and sets `config` so that they are widened on any device. Raises `ModelError`
    where they cannot be read.
    """
    quantization = getattr(config, "quantization_config", None)
    if quantization is None:
        return
    settings = quantization if isinstance(quantization, Mapping) else quantization.to_dict()
    method = str(settings.get("quant_method", "")).removeprefix("QuantizationMethod.").lower()
    if not method and (settings.get("load_in_4bit") or settings.get("load_in_8bit")):
        method = "bitsandbytes"
    if method in WIDENED and importlib.util.find_spec("accelerate") is None:
        raise ModelError(
            f"{path!r} holds {WIDENED[method]} weights, which Transformers widens with the package accelerate: "
            "pip install accelerate, or use the checkpoint that it was made from"
        )
    if method in WIDENED:
        log.warning(
            "%r holds %s weights, which are widened: they take the memory of the dtype that runs, not the file's. "
            "--quantization int8 keeps 8 bits on a CPU",
            path,
            WIDENED[method],
        )
        config.quantization_config = {
            **settings,
            "dequantize": True,
        }  # on some GPUs Transformers would keep them
        return
    what = _NAMES.get(method, f"{method or 'unknown'}-quantised")
    bits = _bits(settings)
    raise ModelError(
        f"{path!r} holds {what} weights{bits}, which Slipstream cannot read; use the checkpoint that they were made "
        "from (--quantization int8 quantises it while it is loaded)"
    )


def _bits(settings: Mapping[str, Any]) -> str:
    """' (4 bits, groups of 128)', as far as the configuration says."""
    bits, group = (
        settings.get("bits", settings.get("w_bit")),
        settings.get("group_size", settings.get("q_group_size")),
    )
    if settings.get("load_in_4bit"):
        bits = 4
    elif settings.get("load_in_8bit"):
        bits = 8
    parts = [
        *([f"{bits} bits"] if bits else []),
        *([f"groups of {group}"] if isinstance(group, int) and group > 0 else []),
    ]
    return f" ({', '.join(parts)})" if parts else ""
