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

from safetensors import safe_open
from torch import Tensor

from slipstream.models.files.quantised_folder import safetensors_files
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
