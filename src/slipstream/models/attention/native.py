"""The native CPU kernels: whole passes in one call, for the families that they know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from slipstream.models.attention.base import ModelTraits, Variant
from slipstream.models.attention.packed import PackedBackend
from slipstream.models.cpu.decoder import Decoder, fuse, misfit
from slipstream.models.cpu.families import find_family
from slipstream.models.cpu.layer_trial import LayerTrial
from slipstream.models.linear.formats import WeightFormat


class NativeBackend(PackedBackend):
    """The native CPU kernels compute whole passes, attention included; the model is probed in PyTorch before."""

    takes_over = True

    @classmethod
    def refusal(cls, traits: ModelTraits) -> str | None:
        if not traits.native or traits.device.type != "cpu":
            return "the native CPU kernels are not in use (see cpu_kernels)"
        if traits.dtype != torch.float32:
            return f"the native CPU kernels compute in float32, not in {str(traits.dtype).removeprefix('torch.')}"
        return super().refusal(traits)

    def misfit(self, model: Any, variants: Sequence[Variant], fmt: WeightFormat) -> str | None:
        return misfit(model, variants, fmt.kernel)

    def layer_trial(self, model: Any, variants: Sequence[Variant]) -> LayerTrial | None:
        family = find_family(model)
        return None if family is None else LayerTrial(model, family, variants)

    def take_over(self, model: Any, variants: Sequence[Variant], fmt: WeightFormat) -> Decoder | None:
        return fuse(model, variants, fmt.kernel, fmt.of_head().kernel)
