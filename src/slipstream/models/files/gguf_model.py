"""A model in a GGUF file: where its name leads, and its tensors under Transformers' names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from torch import Tensor

from slipstream.core.model_path import HUB_FILE, check_model_path, gguf_parts, names_gguf
from slipstream.errors import ModelError
from slipstream.models.cpu.pages import release
from slipstream.models.files.converted import ConvertedMatrix
from slipstream.models.files.gguf import Gguf, GgufTensor
from slipstream.models.files.gguf_architectures import architecture_of, halves_order
from slipstream.models.files.gguf_family import (
    APART,
    GATE_AND_UP,
    LATENT_PARTS,
    NO_WEIGHTS,
    GgufArchitecture,
    Keys,
)
from slipstream.models.files.gguf_joined import take_joined
from slipstream.models.files.gguf_latent import LatentMatrix, take_latents
from slipstream.models.files.grouped import Grouped, GroupedMatrix
from slipstream.models.files.stored import StoredModel
from slipstream.models.linear.grouped import BlockedWeight


def find_gguf(path: str, revision: str | None = None) -> str | None:
    """The GGUF file that a model's name means: a file, a folder that holds one in parts and no other model, or
    `REPO:FILE.gguf` of the hub, which is downloaded with all of its parts.

    None for the name of anything else. Raises `ModelError` where there is no such file.
    """
    if not names_gguf(path):
        return _in_parts(Path(path))
    check_model_path(path)
    named = HUB_FILE.fullmatch(path)
    if named is None or Path(path).is_file():
        return path
    try:
        parts = [hf_hub_download(named[1], part, revision=revision) for part in gguf_parts(named[2])]
    except Exception as error:  # of the network, the hub or the disk
        lines = str(error).strip().splitlines()
        raise ModelError(
            f"cannot download {named[2]!r} of {named[1]!r}: {lines[0] if lines else type(error).__name__}"
        ) from None
    return str(parts[0])


def _in_parts(folder: Path) -> str | None:
    """The first part of the model in a folder; None where it holds another, or several."""
    if not folder.is_dir() or (folder / "config.json").exists():
        return None
    files = sorted(map(str, folder.glob("*.gguf")))
    parts = gguf_parts(files[0]) if files else []
    return files[0] if len(parts) > 1 and set(files) <= set(parts) else None


def read_gguf_model(file: Gguf, config: Any) -> StoredModel:
    """The weights of a file under Transformers' names, mapped from it where nothing changes in them.

    Raises `ModelError` for a tensor that models of the family have not.
    """
    architecture = architecture_of(file)
    _check_complete(file, architecture)
    tensors: dict[str, Tensor] = {}
    matrices: dict[str, GroupedMatrix] = {}
    converted: dict[str, ConvertedMatrix] = {}
    for layer, latent in take_latents(file.path, file.tensors.values()).items():
        stem = f"model.layers.{layer}.self_attn.kv_b_proj"
        if latent.is_quantised:
            converted[stem] = latent
        else:
            tensors[f"{stem}.weight"] = latent.numbers()
    entries = file.tensors.values()
    for stem, joined in take_joined(
        file.path, entries, architecture, lambda part: architecture.rows(part, config)
    ).items():
        if joined.is_of_one_type:
            matrices[stem] = GgufMatrix(joined.parts[0], stem, joined.rows, more=joined.parts[1:])
        elif joined.is_quantised:
            converted[stem] = joined
        else:
            tensors[f"{stem}.weight"] = joined.numbers()
    for entry in _each_matrix(entries, architecture):
        name = transformers_name(file, architecture, entry)
        if name is None:
            continue
        order = row_order(architecture, entry, config)
        columns = architecture.columns(_part(entry), config)
        if entry.format.dtype is None:
            stem, _, part = name.rpartition(".")
            if part != "weight" or len(entry.shape) != 2:
                raise ModelError(
                    f"{file.path!r} holds {entry.format.name} blocks in {entry.name}, which is no matrix"
                )
            matrices[stem] = GgufMatrix(entry, stem, order, columns)
            continue
        numbers = _numbers(entry, architecture, order)
        tensors[name] = numbers if columns is None else numbers[:, columns]
    return StoredModel(_as_gpt_oss_has_them(tensors), matrices, quantised_kinds(file), converted)


def _as_gpt_oss_has_them(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with what only GPT-OSS has under its names: sinks, and biases of experts, of gate and up in turns."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        holder, _, part = name.partition(".experts.{}.")
        if part == "gate_proj.bias":
            pair = torch.stack([tensor, tensors[f"{holder}.experts.{{}}.up_proj.bias"]], dim=-1)
            found[f"{holder}.experts.gate_up_proj_bias"] = pair.flatten(1)
        elif part == "down_proj.bias":
            found[f"{holder}.experts.down_proj_bias"] = tensor
        elif part != "up_proj.bias":
            found[name.replace(".sinks.weight", ".sinks")] = tensor
    return found


def _numbers(entry: GgufTensor, architecture: GgufArchitecture, order: Tensor | None) -> Tensor:
    """A tensor of plain numbers as the model has it."""
    tensor = entry.numbers()
    if order is not None:
        tensor = tensor[order]
    if architecture.norms_hold_one_more and entry.name.endswith("norm.weight") and _part(entry) != "ssm_norm":
        tensor = tensor.float() - 1
    return architecture.numbers(_part(entry), tensor)


class GgufPrediction(Mapping[str, Tensor]):
    """The tensors of a file's layers for multi-token prediction, named as in DeepSeek-V3's checkpoint.

    Each is read when it is used, quantised ones as float32 numbers.
    """

    def __init__(self, file: Gguf, config: Any) -> None:
        self._file, self._config = file, config

    def __getitem__(self, name: str) -> Tensor:
        if name in self._latents:
            return self._latents[name].widened(torch.float32)
        entry, architecture = self._entry_of[name], architecture_of(self._file)
        order = row_order(architecture, entry, self._config)
        if entry.format.dtype is None:
            return GgufMatrix(entry, name, order).widened(0, entry.shape[0])
        return _numbers(entry, architecture, order).clone()

    def __contains__(self, name: object) -> bool:
        return name in self._entry_of or name in self._latents

    def __iter__(self) -> Iterator[str]:
        return iter([*self._entry_of, *self._latents])

    def __len__(self) -> int:
        return len(self._entry_of) + len(self._latents)

    @cached_property
    def _latents(self) -> dict[str, LatentMatrix]:
        found = take_latents(self._file.path, self._file.prediction.values())
        return {f"model.layers.{layer}.self_attn.kv_b_proj.weight": each for layer, each in found.items()}

    @cached_property
    def _entry_of(self) -> dict[str, GgufTensor]:
        """Raises `ModelError` for a tensor that models of the family have not."""
        found: dict[str, GgufTensor] = {}
        architecture = architecture_of(self._file)
        for entry in _each_matrix(self._file.prediction.values(), architecture):
            if _part(entry) in NO_WEIGHTS:
                continue
            name = architecture.prediction_name(entry.name)
            if name is None:
                raise ModelError(
                    f"{self._file.path!r} has a tensor that {architecture.model_type} models have not: {entry.name}"
                )
            found[name if entry.expert is None else name.format(entry.expert)] = entry
        return found


def _check_complete(file: Gguf, architecture: GgufArchitecture) -> None:
    """Raise `ModelError` where a layer lacks a weight, before anything is made of the size that the keys say."""
    layers = sorted({int(name.split(".")[1]) for name in file.tensors if name.startswith("blk.")})
    for layer in layers:
        lacks = architecture.lacks(Keys(file), layer)
        for part in (*architecture.layer, *architecture.experts):
            has_both = part in APART and f"blk.{layer}.{GATE_AND_UP}.weight" in file.tensors
            if part in lacks or has_both:
                continue
            name = f"blk.{layer}.{part}.weight"
            if name not in file.tensors:
                ours = str(architecture.name(name)).format(0)
                raise ModelError(f"the checkpoint {file.path!r} lacks weights: {ours} ({name})")


def _each_matrix(tensors: Iterable[GgufTensor], architecture: GgufArchitecture) -> Iterator[GgufTensor]:
    """The tensors of a file, a stack of experts as the matrices that it is made of; without the parts of those that are
    put together of several."""
    apart = {*LATENT_PARTS, *(part for parts in architecture.joins.values() for part in parts)}
    for entry in tensors:
        if _part(entry) in apart and entry.name.endswith(".weight"):
            continue
        if not architecture.has_experts_in(entry.name):
            yield entry
            continue
        number, rows, width = entry.shape  # which the configuration was made of
        names = [entry.name]
        if _part(entry) == GATE_AND_UP:
            names = [entry.name.replace(GATE_AND_UP, part) for part in APART]
            rows //= 2
        for count in range(number * len(names)):
            expert, part = divmod(count, len(names))
            own = entry.raw[count * rows : (count + 1) * rows]
            yield replace(entry, name=names[part], shape=(rows, width), raw=own, expert=expert)


class GgufMatrix(GroupedMatrix):
    """A quantised tensor of a GGUF file as a layer's weight, or several of one type."""

    def __init__(
        self,
        entry: GgufTensor,
        name: str,
        rows: Tensor | None,
        columns: Tensor | None = None,
        more: Sequence[GgufTensor] = (),
    ) -> None:
        """`rows` says which row of the file each output is, None that they are the same; `columns` likewise.

        `more` are tensors whose rows follow those of the first.
        """
        self.name, self._entry, self._rows = name, entry, rows
        self._raws = [entry.raw, *(each.raw for each in more)]
        self.out_features, self.in_features = sum(map(len, self._raws)), entry.shape[1]
        fmt = entry.format
        self.bits, self.group_size, self.is_symmetric = fmt.bits, fmt.group_size, fmt.is_symmetric
        self.table = fmt.table
        self.order = None if columns is None else columns.argsort()
        self.has_blocks = fmt.unpack_blocks is not None and columns is None

    def part(self, begin: int, end: int) -> Grouped:
        """See `GroupedMatrix.part`."""
        found = self._entry.format.read(self._raw(begin, end))
        self._release()
        return found

    def blocks(self, begin: int, end: int) -> BlockedWeight | None:
        """See `GroupedMatrix.blocks`."""
        if not self.has_blocks:
            return None
        found = self._entry.format.read_blocks(self._raw(begin, end))
        self._release()
        return found

    def _raw(self, begin: int, end: int) -> Tensor:
        """uint8 [end - begin, bytes of an output]"""
        if self._rows is None and len(self._raws) == 1:
            return self._raws[0][begin:end]
        return self._of_outputs(torch.arange(begin, end))

    def _of_outputs(self, outputs: Tensor) -> Tensor:
        """int64 [n] -> uint8 [n, bytes of an output]"""
        places = outputs if self._rows is None else self._rows[outputs]
        if len(self._raws) == 1:
            return self._raws[0][places]
        found = self._raws[0].new_empty(len(places), self._raws[0].shape[1])
        for raw in self._raws:
            own = (places >= 0) & (places < len(raw))
            found[own] = raw[places[own]]
            places = places - len(raw)
        return found

    def _release(self) -> None:
        """Give back the file's pages, which are read again where they are needed."""
        for raw in self._raws:
            release(raw)

    def rows(self, indices: Tensor) -> Tensor:
        """See `GroupedMatrix.rows`."""
        return self._entry.format.read(self._of_outputs(indices)).widened()


def transformers_name(file: Gguf, architecture: GgufArchitecture, entry: GgufTensor) -> str | None:
    """Transformers' name of a tensor; None for one that says how positions are rotated."""
    if _part(entry) in NO_WEIGHTS:
        return None
    name = architecture.name(entry.name)
    if name is None:
        raise ModelError(
            f"{file.path!r} has a tensor that {architecture.model_type} models have not: {entry.name}"
        )
    return name if entry.expert is None else name.format(entry.expert)


def _part(entry: GgufTensor) -> str:
    """'attn_q' of 'blk.0.attn_q.weight', and 'ssm_a' of 'blk.0.ssm_a'."""
    *before, last = entry.name.split(".")
    return before[-1] if before and last in ("weight", "bias", "scale") else last


def row_order(architecture: GgufArchitecture, entry: GgufTensor, config: Any) -> Tensor | None:
    """int64 [rows]: which row of the file each row of the model is; None where they are the same."""
    count = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(_part(entry))
    if count is None or not architecture.rotates_neighbours:
        return architecture.rows(_part(entry), config)
    rows, heads = entry.shape[0], getattr(config, count)
    if rows % (2 * heads):
        raise ModelError(f"{entry.name} has {rows} rows, which {heads} heads cannot share")
    return halves_order(rows, heads)


def quantised_kinds(file: Gguf) -> str:
    """The quantised types of a file's tensors: 'Q4_K, Q6_K'; empty where it has none."""
    return ", ".join(
        dict.fromkeys(each.format.name for each in file.tensors.values() if each.format.dtype is None)
    )
