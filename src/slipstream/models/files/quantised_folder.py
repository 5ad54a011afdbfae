"""Checkpoint folders whose matrices were saved quantised, by the method that their configuration names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch import Tensor

from slipstream.errors import ModelError
from slipstream.models.files import auto_round, awq, bitsandbytes, compressed, fp4, fp8, gptq, mlx, mxfp4
from slipstream.models.files.converted import ConvertedMatrix
from slipstream.models.files.fp8 import Fp8Matrix
from slipstream.models.files.grouped import GroupedMatrix
from slipstream.models.files.shards import weight_files
from slipstream.models.files.stored import StoredModel

NAMES = {
    "gptq": "GPTQ",
    "awq": "AWQ",
    "auto-round": "AutoRound",
    "compressed-tensors": "compressed-tensors",
    "fp8": "FP8",
    "mxfp4": "MXFP4",
    "mlx": "MLX",
    "bitsandbytes": "bitsandbytes",
    "modelopt": "ModelOpt",
}
"""Methods whose weights are read here, as configurations name them, and their names in messages. MLX names none."""

READ = tuple(NAMES)

_IGNORED = (
    *("input_scale", "input_global_scale", "activation_scale", "input_zero_point", "weight_global_scale"),
    *("output_scale", "k_scale", "v_scale", "q_scale", "prob_scale"),
)
"""Scales of activations and caches that other engines round by them. Ours are rounded as they come, or not at all."""


@dataclass(frozen=True, slots=True)
class _Reader:
    """How the layers of a method are read."""

    parts: tuple[str, ...]
    """Names of a layer's tensors."""
    is_quantised: Callable[[Mapping[str, Tensor]], bool]
    """Whether a layer that has such tensors is quantised: a plain one next to it has a weight too."""
    read: Callable[[str, Mapping[str, Tensor]], GroupedMatrix | ConvertedMatrix | dict[str, GroupedMatrix]]
    """One matrix, or several by their names."""
    converted_bytes: float | None = None
    """Bytes of a weight in the file where it is converted while it is read; None where it stays as it is."""
    by_layer: Callable[[Mapping[str, Mapping[str, Tensor]]], Mapping[str, Mapping[str, Tensor]]] = dict
    """What a file has as layers, as the layers that they are in Transformers."""
    plain: Callable[[str, Tensor], Tensor] = lambda name, tensor: tensor
    """What a file has of plain numbers, as Transformers has it."""


def check_settings(method: str, settings: Mapping[str, Any]) -> None:
    """Raise `ModelError` where a `quantization_config` of one of the methods in `READ` says what cannot be read."""
    _reader(method, settings)


def converted_bytes(method: str, settings: Mapping[str, Any]) -> float | None:
    """Bytes of a weight in the file where those of a method in `READ` are converted while they are read.

    None where they stay as they are stored.
    """
    return _reader(method, settings).converted_bytes


def read_quantised(
    path: str,
    revision: str | None,
    method: str,
    settings: Mapping[str, Any],
    is_unused: Callable[[str], bool] = lambda name: False,
    may_be_plain: bool = False,
) -> StoredModel:
    """The weights of a folder or hub id, mapped from its files; tensors that `is_unused` names are left out.

    Raises `ModelError` where they do not fit together, or where none is quantised unless they `may_be_plain`.
    """
    reader = _reader(method, settings)
    tensors: dict[str, Tensor] = {}
    layers: dict[str, dict[str, Tensor]] = defaultdict(dict)
    files = safetensors_files(path, revision)
    if not files:
        raise ModelError(f"{path!r} has no *.safetensors")
    for file in files:
        try:
            with safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - not a mapping
                    part = next((part for part in reader.parts if name.endswith(f".{part}")), "")
                    if is_unused(name) or (not part and name.rpartition(".")[2] in _IGNORED):
                        continue
                    where, key = (layers[name.removesuffix(f".{part}")], part) if part else (tensors, name)
                    where[key] = opened.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"cannot read {file.name!r} of {path!r}: {str(error).splitlines()[0]}") from None
    kept: dict[str, GroupedMatrix] = {}
    converted: dict[str, ConvertedMatrix] = {}
    for stem, found in reader.by_layer(layers).items():
        if not reader.is_quantised(found):
            tensors |= {f"{stem}.{part}": tensor for part, tensor in found.items()}
            continue
        matrix = reader.read(stem, found)
        if isinstance(matrix, ConvertedMatrix):
            converted[stem] = matrix
        elif isinstance(matrix, dict):
            kept |= matrix
        else:
            kept[stem] = matrix
    if not kept and not converted and not may_be_plain:
        raise ModelError(f"{path!r} says that its weights are {NAMES[method]}, and has none such")
    tensors = {name: reader.plain(name, tensor) for name, tensor in tensors.items()}
    return StoredModel(tensors, kept, _kind(method, kept, converted), converted)


def _kind(method: str, kept: Mapping[str, GroupedMatrix], converted: Mapping[str, ConvertedMatrix]) -> str:
    """How messages name the weights of a folder."""
    if method == "mxfp4":
        return NAMES[method]
    if kept:
        bits = "/".join(sorted({str(matrix.bits) for matrix in kept.values()}))
        return f"{NAMES[method]}, {bits} bits"
    return "/".join(sorted({matrix.kind for matrix in converted.values()}))


def _reader(method: str, settings: Mapping[str, Any]) -> _Reader:
    """Raises `ModelError` for settings of a method in `READ` that cannot be read."""
    if method == "fp8":
        block = fp8.block_size(settings)
        return _Reader(fp8.PARTS, fp8.is_fp8, lambda name, found: Fp8Matrix(name, found, block), 1.0)
    if method == "auto-round":
        return _reader(*auto_round.as_packed(settings))
    if method == "mxfp4":
        return _Reader(mxfp4.PARTS, bool, mxfp4.expert_matrices)
    if method == "gptq":
        of_gptq = gptq.GptqSettings.read(settings)
        return _Reader(gptq.PARTS, _has("qweight"), lambda name, found: gptq.GptqMatrix(name, found, of_gptq))
    if method == "awq":
        group = awq.awq_group_size(settings)
        return _Reader(awq.PARTS, _has("qweight"), lambda name, found: awq.AwqMatrix(name, found, group))
    if method == "mlx":
        of_mlx = mlx.MlxSettings.read(settings)
        read = lambda name, found: mlx.MlxMatrix(name, found, of_mlx)  # noqa: E731
        plain = partial(mlx.as_transformers_has_it, str(settings.get("model_type")))
        return _Reader(mlx.PARTS, _has("scales"), read, by_layer=mlx.by_expert, plain=plain)
    if method == "bitsandbytes":
        if bitsandbytes.has_4_bits(settings):
            is_quantised = _has("weight.absmax")
            return _Reader(bitsandbytes.PARTS_4, is_quantised, bitsandbytes.Table4Matrix, 0.5)
        return _Reader(bitsandbytes.PARTS_8, _has("SCB"), bitsandbytes.Bytes8Matrix)
    if method == "modelopt" and fp4.check_modelopt(settings) == "NVFP4":
        return _Reader(
            fp4.MODELOPT_PARTS, _has("weight_scale_2"), lambda name, found: fp4.Fp4Matrix(name, found, 16)
        )
    if method == "modelopt":
        return _Reader(fp8.PARTS, fp8.is_fp8, lambda name, found: Fp8Matrix(name, found, None), 1.0)
    if compressed.is_fp8(settings):
        of_floats = compressed.fp8_block(settings)
        return _Reader(fp8.PARTS, fp8.is_fp8, lambda name, found: Fp8Matrix(name, found, of_floats), 1.0)
    group_size = fp4.fp4_group(settings)
    if group_size is not None:
        size = group_size
        return _Reader(fp4.PARTS, _has("weight_packed"), lambda name, found: fp4.Fp4Matrix(name, found, size))
    of_integers = compressed.CompressedSettings.read(settings)
    return _Reader(
        compressed.PARTS,
        _has("weight_scale"),
        lambda name, found: compressed.CompressedMatrix(name, found, of_integers),
    )


def _has(part: str) -> Callable[[Mapping[str, Tensor]], bool]:
    return lambda found: part in found


def safetensors_files(path: str, revision: str | None) -> list[Path]:
    """The `*.safetensors` that hold the weights of a folder or hub id."""
    folder = Path(path)
    if not folder.is_dir():
        folder = Path(snapshot_download(path, revision=revision, allow_patterns=["*.safetensors", "*.json"]))
    return [file for file in weight_files(folder) if file.suffix == ".safetensors"]
