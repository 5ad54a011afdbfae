"""Tensors of a checkpoint that its model does not read, because they predict further tokens: multi-token prediction.

Such layers lie behind the model's last one, or under `mtp`. Transformers' class of the family, or the configuration,
says that they are there. A tensor that nothing mentions is unknown, and the checkpoint is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from slipstream.models.files.quantised_folder import read_quantised, safetensors_files
from slipstream.models.files.stored import StoredModel
from slipstream.models.huggingface import model_class
from slipstream.models.quiet import one_line

COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
"""Keys by which configurations say how many prediction layers there are."""
_UNDER_MTP = re.compile(r"(^|\.)mtp(_layers)?\.")
_LAYER = re.compile(r"(^|\.)layers\.(\d+)\.")


def unused_by(config: Any) -> Callable[[str], bool]:
    """Whether the model of `config` is known not to read a tensor, by the tensor's name in the checkpoint."""
    declared = any(getattr(config, key, None) for key in COUNTS)
    try:
        ignored = tuple(model_class(config)._keys_to_ignore_on_load_unexpected or ())
    except KeyError:  # code that a checkpoint brings
        ignored = ()

    def is_unused(name: str) -> bool:
        layer = _LAYER.search(name)
        predicts = _UNDER_MTP.search(name) or (layer and int(layer[2]) >= config.num_hidden_layers)
        return bool(predicts) and (declared or any(re.search(pattern, name) for pattern in ignored))

    return is_unused


class UnusedTensors(Mapping[str, Tensor]):
    """The unused tensors of a folder or hub id, by their names there. Nothing is read before it is used.

    The names are read from the headers of all `*.safetensors`; weights in other files are not offered. Raises
    `ModelError` where a file cannot be read.
    """

    def __init__(self, path: str, revision: str | None, is_unused: Callable[[str], bool]) -> None:
        self._path, self._revision, self._is_unused = path, revision, is_unused

    def __getitem__(self, name: str) -> Tensor:
        """A copy, on the CPU and in the type that it is stored in."""
        file = self._file_of[name]
        with one_line(f"cannot read {name} of {self._path!r}"), safe_open(file, "pt") as opened:
            tensor: Tensor = opened.get_tensor(name)
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._file_of

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)

    @cached_property
    def _file_of(self) -> dict[str, Path]:
        found: dict[str, Path] = {}
        with one_line(f"cannot read the weights of {self._path!r}"):
            for file in safetensors_files(self._path, self._revision):
                with safe_open(file, "pt") as opened:
                    found.update((name, file) for name in opened.keys() if self._is_unused(name))  # noqa: SIM118
        return found


class UnusedQuantised(Mapping[str, Tensor]):
    """The unused tensors of a checkpoint that is quantised by a method in `quantised_folder.READ`, as float32 numbers.

    They have the names of weights, and each is widened when it is used. Raises `ModelError` where a file cannot be
    read, or parts of a weight do not fit together.
    """

    def __init__(
        self,
        path: str,
        revision: str | None,
        method: str,
        settings: Mapping[str, Any],
        is_unused: Callable[[str], bool],
    ) -> None:
        self._path, self._revision, self._is_unused = path, revision, is_unused
        self._method, self._settings = method, settings

    def __getitem__(self, name: str) -> Tensor:
        stored, stem = self._stored, name.removesuffix(".weight")
        if stem in stored.matrices:
            matrix = stored.matrices[stem]
            return matrix.widened(0, matrix.out_features)
        if stem in stored.converted:
            return stored.converted[stem].widened(torch.float32)
        return stored.tensors[name]

    def __iter__(self) -> Iterator[str]:
        stored = self._stored
        yield from stored.tensors
        yield from (f"{stem}.weight" for stem in (*stored.matrices, *stored.converted))

    def __len__(self) -> int:
        stored = self._stored
        return len(stored.tensors) + len(stored.matrices) + len(stored.converted)

    @cached_property
    def _stored(self) -> StoredModel:
        def is_read(name: str) -> bool:
            return not self._is_unused(name)

        with one_line(f"cannot read the weights of {self._path!r}"):
            return read_quantised(
                self._path, self._revision, self._method, self._settings, is_read, may_be_plain=True
            )
