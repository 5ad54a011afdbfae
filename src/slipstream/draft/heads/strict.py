"""A checkpoint whose tensors must be exactly those of a module: nothing missing, nothing left over."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NoReturn

from torch import nn

from slipstream.draft.heads.checkpoints import read_checkpoint
from slipstream.errors import ModelError


class Checkpoint:
    """The configuration and the tensors of a folder, or of a hub id."""

    def __init__(self, path: str, weight_files: tuple[str, ...], revision: str | None = None) -> None:
        """Reads the first of `weight_files` that is there. Raises `ModelError` where something is not."""
        self.path = path
        self.config, self.tensors = read_checkpoint(path, revision=revision, weight_files=weight_files)

    def size(self, *keys: str, default: int | None = None) -> int:
        """The configuration's whole number under the first of `keys` that it has."""
        value = next((self.config[key] for key in keys if self.config.get(key) is not None), default)
        if type(value) is not int or value < 0:
            self.refuse(
                f"has no {keys[0]} in its config.json" if value is None else f"has {keys[0]} {value!r}"
            )
        return value

    def length(self, tensor: str) -> int:
        """How many rows a matrix has, for sizes that a configuration leaves out."""
        if tensor not in self.tensors:
            self.refuse(f"lacks the tensor {tensor}")
        return len(self.tensors[tensor])

    def rename(self, usual: Callable[[str], str]) -> None:
        """Call the tensors otherwise."""
        self.tensors = {usual(name): tensor for name, tensor in self.tensors.items()}

    def load_into(self, module: nn.Module, names: Mapping[str, str]) -> None:
        """Copy the tensors into `module`; `names` says what the file calls each entry of its state.

        Raises `ModelError`, naming the first, for tensors that are missing, unknown or of another shape.
        """
        state = module.state_dict()
        expected = {names[name]: tensor.shape for name, tensor in state.items()}
        present = {name: tensor.shape for name, tensor in self.tensors.items()}
        if missing := sorted(expected.keys() - present.keys()):
            self.refuse(f"lacks the tensor {_first(missing)}")
        if unknown := sorted(present.keys() - expected.keys()):
            self.refuse(f"has an unknown tensor: {_first(unknown)}")
        for name in sorted(expected):
            if expected[name] != present[name]:
                self.refuse(f"has {name} of shape {list(present[name])}, not {list(expected[name])}")
        module.load_state_dict({name: self.tensors[names[name]] for name in state})

    def refuse(self, why: str) -> NoReturn:
        """Raise `ModelError`."""
        raise ModelError(f"the heads {self.path!r}: the checkpoint {why}")


def _first(names: list[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
