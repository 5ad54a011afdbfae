"""The frequencies of rotary embeddings, with the same bits on every machine.

Transformers computes them by additions, divisions and powers of float32 tensors. All but the powers are rounded alike
everywhere; PyTorch's powers depend on the width of the processor's vectors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class _RoundedPowers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Powers are computed in float64 and rounded once: float32 that is right on any machine."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is not torch.ops.aten.pow:
            return func(*args, **(kwargs or {}))
        wide = [arg.double() if isinstance(arg, Tensor) else arg for arg in args]
        return func(*wide, **(kwargs or {})).float()


def inverse_frequencies(rotary: Any) -> Tensor:
    """float32 [rotary dim / 2]: those of a rotary embedding of Transformers, computed anew.

    They differ from its own by a rounding at most; otherwise it is not what its configuration says, and its own are
    returned.
    """
    own: Tensor = rotary.inv_freq.float()
    try:
        with _RoundedPowers():  # type: ignore[no-untyped-call]
            again: Tensor = type(rotary)(rotary.config).inv_freq.float()
    except (AttributeError, TypeError):  # of a package that makes it from something else
        return own.contiguous().clone()
    same = again.shape == own.shape and torch.allclose(again, own, rtol=1e-6, atol=0.0)
    return (again if same else own).contiguous().clone()
