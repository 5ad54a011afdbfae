"""AutoRound's folders: layers packed as GPTQ or AWQ pack them, by a configuration of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipstream.errors import ModelError
from slipstream.models.files.gptq import BITS

_LIKE_GPTQ = ("gptq", "exllamav2", "triton")
"""What a packing is called, in part, whose layout is GPTQ's. Only AutoGPTQ's own takes 1 off zero points."""


def as_packed(settings: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The method, `gptq` or `awq`, by whose layout the layers are read, and its settings.

    Layers of other bits than the rest have them from their tensors' shapes. Raises `ModelError` for what cannot be
    read.
    """
    packing = str(settings.get("packing_format") or settings.get("backend") or "auto_round:gptq").lower()
    bits, group, kind = (
        settings.get("bits"),
        settings.get("group_size", 128),
        settings.get("data_type", "int"),
    )
    method = "awq" if "awq" in packing else "gptq" if any(name in packing for name in _LIKE_GPTQ) else ""
    fits = type(bits) is int and bits in (BITS if method == "gptq" else (4,)) and type(group) is int
    if not method or kind != "int" or not fits:
        raise ModelError(
            f"AutoRound weights ({kind} of {bits} bits in groups of {group}, packed as {packing!r}): read are integers "
            "of 2, 3, 4 and 8 bits packed as auto_gptq, and of 4 bits packed as auto_awq"
        )
    return method, {
        "bits": bits,
        "group_size": group,
        "checkpoint_format": "gptq" if "gptq" in packing else "gptq_v2",
        "dynamic": settings.get("extra_config"),
    }
