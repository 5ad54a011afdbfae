"""The benchmark's models on disk: expanded if configured, converted for peers with other formats."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from safetensors import safe_open

from benchmarks.harness.models import expanded
from benchmarks.peers.catalog import Mode, Model
from slipstream.assets import EMBEDDED_DRAFT, EMBEDDED_TARGET

DRAFT = "embedded-draft"
CONVERTED = {"openvino": "", "llamacpp": ".gguf"}
"""Peers that want a format of their own, and how their files' names end."""

BITS = {
    "float32": 32,
    "bfloat16": 16,
    "int8": 8,
    "int4": 4,
    "int4_g128": 4,
    "Q8_0": 8.5,
    "Q4_0": 4.5,
    "Q4_K_M": 4.85,
}
"""Bits of one weight, with the scales where the format's name says what they are."""


def target_path(model: Model, folder: Path) -> Path:
    """The checkpoint of the target; written where it is missing."""
    if model.expand is None and model.positions is None:
        return Path(EMBEDDED_TARGET)
    made = expanded(folder / model.folder, model.expand, dtype=model.stored, positions=model.positions)
    return Path(made)


def num_parameters(checkpoint: Path) -> int:
    total = 0
    for file in checkpoint.glob("*.safetensors"):
        with safe_open(file, "numpy") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                size = 1
                for length in tensors.get_slice(name).get_shape():
                    size *= length
                total += size
    return total


def paths_for(
    mode: Mode, model: Model, folder: Path, convert: Callable[[Path, Path, str], None]
) -> tuple[str, str]:
    """Target and draft as this mode's worker wants them; `convert(source, target, weights)` makes what is missing."""
    checkpoints = {model.folder: target_path(model, folder), DRAFT: Path(EMBEDDED_DRAFT)}
    if mode.peer not in CONVERTED:
        return str(checkpoints[model.folder]), str(checkpoints[DRAFT])
    paths = []
    for name, checkpoint in checkpoints.items():
        path = folder / "converted" / mode.peer / f"{name}-{mode.weights}{CONVERTED[mode.peer]}"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(path.name + ".partial")
            convert(checkpoint, partial, mode.weights)
            partial.rename(path)  # a conversion that was stopped half way does not count
        paths.append(str(path))
    return paths[0], paths[1]


def weight_bytes(parameters: int, weights: str) -> float:
    """Bytes that one decoding step has to read at the least; scales and zero points are not counted."""
    return parameters * BITS[weights] / 8
