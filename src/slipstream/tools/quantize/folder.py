"""Writes a quantised checkpoint in the layouts of compressed-tensors.

Four bits are `pack-quantized`, codes in words. Eight bits are `int-quantized`, bytes with activations that are
rounded to 8 bits row by row as they come (W8A8): engines that have integer products for CPUs have them for this form.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from torch import Tensor, nn

from slipstream.models.quiet import silenced
from slipstream.tools.quantize.rounding import RoundedWeight


def packed(codes: Tensor, bits: int) -> Tensor:
    """uint8 [rows, n] -> int32 [rows, words]: 32 / `bits` codes a word, the first in the lowest bits."""
    each = 32 // bits
    wide = nn.functional.pad(codes, (0, -codes.shape[1] % each)).view(len(codes), -1, each)
    words = torch.zeros(wide.shape[:2], dtype=torch.int64)
    for place in range(each):
        words |= wide[..., place].long() << (bits * place)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def is_bytes(bits: int, symmetric: bool) -> bool:
    """Whether weights are written as bytes, in two's complement, and not as words of codes."""
    return bits == 8 and symmetric


def layer_tensors(weight: RoundedWeight, symmetric: bool) -> dict[str, Tensor]:
    """A linear layer's tensors by their names behind the layer's own."""
    if is_bytes(weight.bits, symmetric):
        return {"weight": (weight.codes ^ 128).view(torch.int8), "weight_scale": weight.scales}
    tensors = {
        "weight_packed": packed(weight.codes, weight.bits),
        "weight_scale": weight.scales,
        "weight_shape": torch.tensor(weight.codes.shape, dtype=torch.int64),
    }
    if not symmetric:
        tensors["weight_zero_point"] = packed(weight.zeros.T.contiguous(), weight.bits).T.contiguous()
    return tensors


def settings(bits: int, group: int | None, symmetric: bool, ignored: list[str]) -> dict[str, Any]:
    """The `quantization_config` of a checkpoint; `group` None is a scale an output."""
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "channel" if group is None else "group",
        "group_size": group,
        "dynamic": False,
        "actorder": None,
        "observer": "minmax",
    }
    as_bytes = is_bytes(bits, symmetric)
    rows = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized" if as_bytes else "pack-quantized",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "ignore": ignored,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": rows if as_bytes else None,
                "output_activations": None,
            }
        },
    }


def write(model: Any, tokenizer: Any, tensors: dict[str, Tensor], config: dict[str, Any], out: Path) -> int:
    """Write configuration, tokenizer and weights; returns the bytes of the weights.

    `tensors` are those of the quantised layers by their full names; they replace the layers' own weights.
    """
    replaced = {f"{name.rpartition('.')[0]}.weight" for name in tensors}
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in replaced}
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    state = {name: tensor for name, tensor in state.items() if name not in tied} | tensors
    model.config.quantization_config = config
    contiguous = {name: tensor.contiguous() for name, tensor in state.items()}
    out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=out.parent, prefix=f"{out.name}.") as own:
        written = Path(own) / "checkpoint"  # a disk that is full leaves nothing half-written at `out`
        written.mkdir()
        with silenced():
            save_torch_state_dict(contiguous, str(written), max_shard_size="4GB", metadata={"format": "pt"})
        model.config.save_pretrained(written)
        if model.can_generate() and model.generation_config is not None:
            model.generation_config.save_pretrained(written)
        tokenizer.save_pretrained(written)
        for file in written.glob("*.safetensors"):  # they are written for their owner alone
            file.chmod((written / "config.json").stat().st_mode)
        if out.exists():
            out.rmdir()  # it is empty: that was checked before any work
        written.rename(out)
    return sum(tensor.nbytes for tensor in contiguous.values())
