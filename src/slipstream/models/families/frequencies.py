"""The frequencies of rotary embeddings, with the same bits on every machine.

Transformers computes them by additions, divisions and powers of float32 tensors. All but the powers are rounded alike
everywhere; PyTorch's powers depend on the width of the processor's vectors.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream.models.huggingface import unused_deferred
from slipstream.models.longrope import FIXED, fixed_frequencies

log = logging.getLogger(__name__)

STATIC_ROTARY = ("default", "linear", "llama3", "yarn", "proportional")
"""Kinds of rotary embedding whose frequencies do not change with the length of the text."""
RESOLVED_ROTARY = ("longrope", FIXED)
"""Kinds that do not once they are resolved for a model; see `models.longrope`."""


class _RoundedPowers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Powers are computed in float64 and rounded once: float32 that is right on any machine."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is not torch.ops.aten.pow:
            return func(*args, **(kwargs or {}))
        wide = [arg.double() if isinstance(arg, Tensor) else arg for arg in args]
        return func(*wide, **(kwargs or {})).float()


@dataclass(frozen=True)
class Rotation:
    """A rotary embedding of Transformers, or one of those that one module holds by kinds of layers."""

    module: Any
    kind: str | None = None
    """The kind of layer; None where the module holds one for all."""

    @property
    def rope_type(self) -> str:
        found = self.module.rope_type
        return str(found if self.kind is None else found[self.kind])

    @property
    def is_static(self) -> bool:
        """Whether the frequencies do not change with the length of the text."""
        return self.rope_type in (*STATIC_ROTARY, *RESOLVED_ROTARY)

    @property
    def width(self) -> int:
        """The part of a head that is rotated."""
        return 2 * len(self._named(self.module, "inv_freq"))

    @property
    def scale(self) -> float:
        """Scale of sines and cosines."""
        return float(self._named(self.module, "attention_scaling"))

    @cached_property
    def inverse_frequencies(self) -> Tensor:
        """float32 [width / 2], computed anew, on the CPU.

        They differ from the module's own by a rounding at most; otherwise it is not what its configuration says, and
        its own are returned, which the log says.
        """
        own: Tensor = self._named(self.module, "inv_freq").float().cpu()
        try:
            with unused_deferred(), _RoundedPowers():  # type: ignore[no-untyped-call]
                again = self._again().float()
            why = "" if _are_close(again, own) else "its configuration gives others"
        except Exception as error:  # of a package that makes it from something else
            lines = str(error).splitlines()
            why = lines[0] if lines else type(error).__name__
        if why:
            log.info(
                "the rotary frequencies of %s are taken as they are, so the last bits of logits may depend on the "
                "machine (%s)",
                type(self.module).__name__,
                why,
            )
        return (own if why else again).contiguous().clone()

    def _again(self) -> Tensor:
        config = self.module.config
        if getattr(self.module, "rope_type", None) == FIXED:
            return fixed_frequencies(config, self.module.inv_freq.device)
        found: Tensor = self._named(type(self.module)(config), "inv_freq")
        return found

    def _named(self, module: Any, name: str) -> Any:
        return getattr(module, name if self.kind is None else f"{self.kind}_{name}")


def rotations(module: Any, kinds: Iterable[str | None]) -> dict[str | None, Rotation]:
    """The rotary embeddings that a module holds for these kinds of layers; raises `AttributeError` for what is none."""
    found = {kind: Rotation(module, kind) for kind in kinds}
    for rotation in found.values():
        try:
            rotation.rope_type, rotation.width, rotation.scale  # noqa: B018
        except KeyError as error:
            raise AttributeError(f"{type(module).__name__} has no {error}") from None
    return found


def _are_close(again: Tensor, own: Tensor) -> bool:
    return again.shape == own.shape and torch.allclose(again, own, rtol=1e-6, atol=0.0)
