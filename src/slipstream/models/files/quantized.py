"""Checkpoints whose weights were saved quantised: which can be read, and what to do about the others."""

from __future__ import annotations

import importlib.util
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.errors import ModelError
from slipstream.models.files.mlx import names_mlx
from slipstream.models.files.quantised_folder import READ, check_settings, converted_bytes

log = logging.getLogger(__name__)

_NAMES = {
    "gguf": "GGUF",
    "hqq": "HQQ",
    "torchao": "torchao",
    "quanto": "Quanto",
    "aqlm": "AQLM",
    "bitnet": "BitNet",
    "fbgemm_fp8": "FBGEMM FP8",
    "nvfp4": "NVFP4",
    "exl2": "EXL2",
    "exl3": "EXL3",
    "fp_quant": "FP-Quant",
    "quark": "Quark",
    "eetq": "EETQ",
    "higgs": "HIGGS",
    "spqr": "SpQR",
    "vptq": "VPTQ",
    "mxfp8": "MXFP8",
}

WIDENED = {"fp8": "FP8", "mxfp4": "MXFP4"}
"""Formats that Transformers converts to 16-bit weights while it loads them, where we do not read the model."""


@dataclass(frozen=True, slots=True)
class Quantised:
    """How a checkpoint says that its weights are quantised, for those that we read."""

    method: str
    settings: Mapping[str, Any]

    @property
    def is_kept(self) -> bool:
        """Whether they stay as they are stored; others are converted while they are read."""
        return self.converted_bytes is None

    @property
    def converted_bytes(self) -> float | None:
        """Bytes of a weight in the file, where they are converted while they are read."""
        return converted_bytes(self.method, self.settings)


def resolve_quantized(path: str, config: Any, by_transformers: bool = False) -> Quantised | None:
    """Decide how the quantised weights of a checkpoint are read.

    Those that we read are returned, and `config` no longer speaks of them. Where Transformers widens weights, logs a
    warning and sets `config` so that they are widened on any device; `by_transformers` says that it has to read this
    model. Raises `ModelError` where they cannot be read.
    """
    quantization = getattr(config, "quantization_config", None)
    if quantization is None:
        quantization = _otherwise_said(path, config)
    if quantization is None:
        return None
    settings = quantization.to_dict() if hasattr(quantization, "to_dict") else quantization
    if not isinstance(settings, Mapping):
        raise ModelError(f"{path!r} has a damaged quantization_config: it must be a JSON object")
    method = _method_of(settings)
    is_widened = method in WIDENED and (by_transformers or method not in READ)
    if is_widened:
        _check_widening(path, method)
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
        return None
    if method in READ:
        try:
            check_settings(method, settings)
        except ModelError as error:
            raise ModelError(f"{path!r} holds {' '.join(str(error).split())}") from None
        if getattr(config, "quantization_config", None) is not None:
            del config.quantization_config
        if method == "mlx":  # whose files differ from Transformers' by family
            settings = {**settings, "model_type": config.model_type}
        return Quantised(method, settings)
    what = _NAMES.get(method, f"{method or 'unknown'}-quantised")
    bits = _bits(settings)
    raise ModelError(
        f"{path!r} holds {what} weights{bits}, which Slipstream cannot read; use the checkpoint that they were made "
        "from (--quantization int8 quantises it while it is loaded)"
    )


def _check_widening(path: str, method: str) -> None:
    """Raise `ModelError` where Transformers lacks what it widens weights with."""
    if importlib.util.find_spec("accelerate") is None:
        raise ModelError(
            f"{path!r} holds {WIDENED[method]} weights, which Transformers widens with the package accelerate: "
            "pip install accelerate, or use the checkpoint that it was made from"
        )


def _otherwise_said(path: str, config: Any) -> Mapping[str, Any] | None:
    """What tools say that do not say it in the key `quantization_config`: MLX, and older versions of ModelOpt."""
    found = getattr(config, "quantization", None)
    if isinstance(found, Mapping) and names_mlx(found):
        return found
    file = Path(path) / "hf_quant_config.json"
    if not file.is_file():
        return None
    try:
        says = json.loads(file.read_text(encoding="utf-8"))["quantization"]
        return {**says, "quant_method": "modelopt"}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise ModelError(f"cannot read {str(file)!r}: it must be a JSON object with quantization") from None


def _method_of(settings: Mapping[str, Any]) -> str:
    """The method of quantisation by the name that Transformers gives it; empty where none is named."""
    method = " ".join(str(settings.get("quant_method", "")).split())
    method = method.removeprefix("QuantizationMethod.").lower().removeprefix("intel/")
    if names_mlx(settings):
        return "mlx"
    if not method and (settings.get("load_in_4bit") or settings.get("load_in_8bit")):
        return "bitsandbytes"
    return method


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
        *([f"{bits} bits"] if isinstance(bits, int) and bits > 0 else []),
        *([f"groups of {group}"] if isinstance(group, int) and group > 0 else []),
    ]
    return f" ({', '.join(parts)})" if parts else ""
