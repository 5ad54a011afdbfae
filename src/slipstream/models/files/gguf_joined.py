"""Matrices of Transformers' whose rows a GGUF file has in several tensors: gate and up of an MLP, queries to gates."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import reduce

import torch
from torch import Tensor

from slipstream.errors import ModelError
from slipstream.models.files.converted import ConvertedMatrix
from slipstream.models.files.gguf import GgufTensor
from slipstream.models.files.gguf_family import GgufArchitecture


class JoinedMatrix(ConvertedMatrix):
    """A matrix [out, in] of the rows of several tensors, one after the other."""

    def __init__(self, parts: Sequence[GgufTensor], rows: Tensor | None) -> None:
        """`rows` int64 [out]: which of those rows each output is; None where they are in order."""
        self.parts, self.rows = parts, rows
        kinds = list(dict.fromkeys(each.format.name for each in parts))
        self.kind = "/".join(kinds)
        self.is_quantised = any(each.format.dtype is None for each in parts)
        self.is_of_one_type = self.is_quantised and len(kinds) == 1  # so kernels can hold it as the file does

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return sum(each.shape[0] for each in self.parts), self.parts[0].shape[1]

    def widened(self, dtype: torch.dtype) -> Tensor:
        """See `ConvertedMatrix.widened`."""
        whole = torch.cat([each.widened().to(dtype) for each in self.parts])
        return whole if self.rows is None else whole[self.rows]

    def numbers(self) -> Tensor:
        """[out, in]: the matrix in the type that the file has it in, where that is one of plain numbers."""
        kinds = [each.format.dtype for each in self.parts if each.format.dtype is not None]
        return self.widened(reduce(torch.promote_types, kinds))


def take_joined(
    path: str,
    tensors: Iterable[GgufTensor],
    architecture: GgufArchitecture,
    rows: Callable[[str], Tensor | None],
) -> dict[str, JoinedMatrix]:
    """Those of a file's layers, by Transformers' names; `rows` gives what `JoinedMatrix.rows` is, by the last part of
    a name.

    Raises `ModelError` where a layer has some of the tensors of a matrix and not others, or has it as a whole too.
    """
    held: dict[str, dict[str, GgufTensor]] = defaultdict(dict)
    all_names = {}
    for entry in tensors:
        name = architecture.name(entry.name)
        part = entry.name.removesuffix(".weight").rpartition(".")[2]
        if name is not None and name.endswith(".weight"):
            all_names[entry.name] = name
            if any(part in parts for parts in architecture.joins.values()):
                held[name.removesuffix(".weight")][part] = entry
    found = {}
    for stem, by_part in held.items():
        parts = next(each for name, each in architecture.joins.items() if stem.endswith(f".{name}"))
        layer = stem.split(".")[2]
        for part in parts:
            if part not in by_part or len(by_part[part].shape) != 2:
                raise ModelError(f"{path!r}: blk.{layer}.{part}.weight is missing, or is no matrix")
        twice = [own for own, name in all_names.items() if name == f"{stem}.weight"]
        if len(twice) > len(parts):
            raise ModelError(f"{path!r} has a matrix twice: {', '.join(sorted(twice))}")
        found[stem] = JoinedMatrix([by_part[part] for part in parts], rows(stem.rpartition(".")[2]))
    return found
