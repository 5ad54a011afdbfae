"""The native CPU kernels: whole passes in one call, for the families that they know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from slipstream.models.attention.base import ModelTraits, Variant
from slipstream.models.attention.packed import PackedBackend
from slipstream.models.cpu.fit import misfit
from slipstream.models.linear.formats import WeightFormat


def native_refusal(traits: ModelTraits) -> str | None:
    """Why the CPU kernels may not be used for a model, whatever it is; None where they may."""
    if traits.device.type == "cuda":
        return f"the native kernels run on a CPU, and this is {traits.device.type}"
    if not traits.native or traits.device.type != "cpu":
        return "the native CPU kernels are not in use (see cpu_kernels)"
    if traits.dtype != torch.float32:
        return f"the native CPU kernels compute in float32, not in {str(traits.dtype).removeprefix('torch.')}"
    return None


class NativeBackend(PackedBackend):
    """The native CPU kernels compute whole passes, attention included; the model is probed in PyTorch before."""

    executor = "cpu_kernels"

    @classmethod
    def refusal(cls, traits: ModelTraits) -> str | None:
        if not traits.fuses:
            return "the native CPU kernels compute no whole passes of it"
        return native_refusal(traits) or super().refusal(traits)

    def misfit(self, model: Any, variants: Sequence[Variant], fmt: WeightFormat) -> str | None:
        return misfit(model, variants, fmt.kernel)
