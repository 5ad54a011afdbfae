"""DeepSeek's matrix that makes keys and values of a latent vector, of which GGUF files hold two parts apart."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

from slipstream.errors import ModelError
from slipstream.models.files.converted import ConvertedMatrix
from slipstream.models.files.gguf import GgufTensor
from slipstream.models.files.gguf_family import LATENT_PARTS


class LatentMatrix(ConvertedMatrix):
    """The matrix [heads * (key + value), latent] of a layer.

    The keys' part [heads, latent, key] is transposed, so its blocks run across outputs, and nothing can keep them.
    """

    def __init__(self, keys: GgufTensor, values: GgufTensor) -> None:
        """`keys` [heads, latent, key] and `values` [heads, value, latent]."""
        self._parts = (keys, values)
        self.kind = "/".join(dict.fromkeys(each.format.name for each in self._parts))
        self.is_quantised = any(each.format.dtype is None for each in self._parts)

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        keys, values = self._parts
        return keys.shape[0] * (keys.shape[2] + values.shape[1]), keys.shape[1]

    def widened(self, dtype: torch.dtype) -> Tensor:
        """See `ConvertedMatrix.widened`."""
        keys, values = (each.widened() for each in self._parts)
        return torch.cat([keys.transpose(1, 2).to(dtype), values.to(dtype)], 1).flatten(0, 1).contiguous()

    def numbers(self) -> Tensor:
        """[out, in]: the matrix in the type that the file has it in, where that is one of plain numbers."""
        return self.widened(torch.promote_types(*(each.widened().dtype for each in self._parts)))


def take_latents(path: str, tensors: Iterable[GgufTensor]) -> dict[int, LatentMatrix]:
    """Those of a file's layers, by the layers' numbers; raises `ModelError` where one has a part of two."""
    held: dict[int, dict[str, GgufTensor]] = defaultdict(dict)
    for entry in tensors:
        parts = entry.name.split(".")
        if len(parts) == 4 and parts[1].isdecimal() and parts[2] in LATENT_PARTS and parts[3] == "weight":
            held[int(parts[1])][parts[2]] = entry
    found = {}
    for layer, both in held.items():
        for part in LATENT_PARTS:
            if part not in both or len(both[part].shape) != 3:
                raise ModelError(
                    f"{path!r}: blk.{layer}.{part}.weight is missing, or has not three dimensions"
                )
        found[layer] = LatentMatrix(*(both[part] for part in LATENT_PARTS))
    return found
