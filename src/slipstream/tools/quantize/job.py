"""One run of `slipstream quantize`: reads a checkpoint, rounds its layers, writes another."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from slipstream.config import check_at_least
from slipstream.errors import ConfigError
from slipstream.models import load_plain, load_tokenizer
from slipstream.models.configuration import load_config, meta_model
from slipstream.models.files.gguf import open_gguf
from slipstream.models.files.gguf_model import find_gguf, quantised_kinds
from slipstream.tools.quantize import folder
from slipstream.tools.quantize.calibration import (
    LayerDone,
    as_rows,
    decoder_layers,
    linear_layers,
    read_texts,
    round_layers,
    unrounded,
)
from slipstream.tools.quantize.rounding import RoundedWeight, rounded

FORMATS: dict[str, tuple[int, int | None]] = {
    "int4": (4, 32),
    "int4_g64": (4, 64),
    "int4_g128": (4, 128),
    "int8": (8, None),
}
"""Bits of a weight and inputs of a group; None is a scale an output."""


@dataclass(frozen=True)
class QuantizeOptions:
    """How a checkpoint is quantised."""

    quantization: str = "int4"
    """int4 (4 bits in groups of 32 inputs), int4_g64, int4_g128, or int8 (8 bits, a scale an output)."""
    calibration: bool = True
    """Round each weight so that the layer's outputs on sample text change least (GPTQ); without, to the nearest."""
    num_texts: int = 128
    """Rows of text to calibrate on."""
    length: int = 512
    """Tokens of a row."""
    seed: int = 0
    """Seed of the choice of texts."""

    def __post_init__(self) -> None:
        if self.quantization not in FORMATS:
            raise ConfigError(f"unknown quantization {self.quantization!r}; there are {', '.join(FORMATS)}")
        check_at_least("quantize", 1, num_texts=self.num_texts)
        check_at_least("quantize", 2, length=self.length)
        check_at_least("quantize", 0, seed=self.seed)


@dataclass
class SavedCheckpoint:
    """What a run wrote."""

    bytes_before: int
    bytes_after: int = 0
    num_tokens: int = 0
    """Tokens that were calibrated on."""
    num_rows: int = 0
    """Rows of sample text that were calibrated on."""
    lost: dict[str, float] = field(default_factory=dict)
    """By linear layer: energy of its outputs' error over that of the outputs, on calibration's text."""
    left: dict[str, int] = field(default_factory=dict)
    """See `unrounded`: what stays as it is in the decoder's layers."""
    seconds: float = 0.0

    @property
    def bytes_left(self) -> int:
        """Return the bytes of experts and of all else in the decoder's layers that is no plain linear layer."""
        return sum(self.left.values())

    @property
    def mean_lost(self) -> float | None:
        """None without calibration."""
        return fmean(self.lost.values()) if self.lost else None


def quantise(
    model_path: str,
    out: Path,
    options: QuantizeOptions,
    texts_file: Path | None,
    report: Callable[[LayerDone], None],
) -> SavedCheckpoint:
    """Quantise the linear layers of a checkpoint's decoder layers; embedding, output layer and experts that are kept in
    stacks stay as they are.

    Raises `ModelError` for a checkpoint that cannot be read or is quantised already, `ConfigError` for one whose layers
    are not found, or an `out` that is there already.
    """
    began = time.monotonic()
    _check_new(out)
    texts = read_texts(texts_file) if options.calibration else []
    config = load_config(model_path)
    if _is_quantised(model_path, config):
        raise ConfigError(
            f"{model_path!r} is quantised already; start from the checkpoint that it was made of"
        )
    bits, group = FORMATS[options.quantization]
    _check_groups(meta_model(config, "sdpa", trust_remote_code=False), group)
    tokenizer = load_tokenizer(model_path)
    stored = getattr(config, "dtype", None)
    kind = stored if stored in (torch.float16, torch.bfloat16) else torch.float32
    model = load_plain(model_path, dtype=kind, attention="sdpa").eval().requires_grad_(False)
    saved = SavedCheckpoint(sum(part.nbytes for part in model.parameters()))  # a tied one counts once
    rows: Tensor | None = None
    if options.calibration:
        limit = getattr(model.config, "max_position_embeddings", None) or options.length
        rows = as_rows(tokenizer, texts, options.num_texts, min(options.length, limit), options.seed)
        saved.num_tokens, saved.num_rows = rows.numel(), len(rows)
    symmetric = group is None
    tensors: dict[str, Tensor] = {}
    scale_type = kind if kind != torch.float32 else torch.bfloat16
    for done in round_layers(model, rows, partial(_rounded, bits, group, scale_type)):
        for name, weight in done.weights.items():
            found = folder.layer_tensors(weight, symmetric)
            tensors |= {f"{name}.{part}": tensor for part, tensor in found.items()}
        saved.lost |= done.lost
        report(done)
    saved.left = unrounded(model)
    plain = _plain_layers(model, saved.left, tensors)
    saved.bytes_after = folder.write(
        model, tokenizer, tensors, folder.settings(bits, group, symmetric, plain), out
    )
    saved.seconds = time.monotonic() - began
    return saved


def _check_new(out: Path) -> None:
    """Raise `ConfigError` for a folder that holds something already."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{str(out)!r} is there already; name a folder that is not")


def _plain_layers(model: Any, left: Collection[str], tensors: Mapping[str, Tensor]) -> list[str]:
    """The names of the linear layers that stay as they are, and of what else was left."""
    return sorted(
        name
        for name, module in model.named_modules()
        if name in left or (isinstance(module, torch.nn.Linear) and f"{name}.weight_scale" not in tensors)
    )


def _is_quantised(path: str, config: Any) -> bool:
    file = find_gguf(path)
    return bool(quantised_kinds(open_gguf(file)) if file else getattr(config, "quantization_config", None))


def _check_groups(model: torch.nn.Module, group: int | None) -> None:
    """Raise `ConfigError` for a layer whose inputs do not make whole groups: the layout has no others."""
    name, layers = decoder_layers(model)
    for part, linear in linear_layers(layers).items():
        if group is not None and linear.in_features % group:
            fit = [
                other for other, (_, size) in FORMATS.items() if not size or linear.in_features % size == 0
            ]
            raise ConfigError(
                f"{name}.{part} has {linear.in_features} inputs, which groups of {group} do not divide; use "
                f"{' or '.join(fit)}"
            )


def _rounded(
    bits: int, group: int | None, scale_type: torch.dtype, weight: Tensor, correlations: Tensor | None
) -> RoundedWeight:
    return rounded(weight, correlations, bits, group or weight.shape[1], scale_type, symmetric=group is None)
