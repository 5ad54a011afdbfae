"""The layers of a head as the CPU kernels' fused decoder reads them."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import torch

from slipstream.draft.heads.head_config import HeadConfig
from slipstream.models.cpu.kernel import Kernel
from slipstream.models.cpu.model_sizes import HeadSizes
from slipstream.models.cpu.packed_model import PackedModel
from slipstream.models.cpu.structs import LayerStruct, ModelStruct
from slipstream.models.families.activations import ACTIVATIONS
from slipstream.models.families.frequencies import Rotation
from slipstream.models.families.parts import LayerParts


class PackedHead(PackedModel):
    """Weights of a head that has ordinary layers."""

    def _decoder(
        self, config: HeadConfig, rotary: Any, layers: Seq[LayerParts], kernel: Kernel, **own: Any
    ) -> ModelStruct:
        """The head as a decoder; `own` are the fields of what embeds tokens, and of what stands behind the layers."""
        self.num_layers = len(layers)
        self._frequencies = Rotation(rotary).inverse_frequencies
        width = 2 * len(rotary.inv_freq)
        heads = HeadSizes(config.num_key_value_heads, config.head_dim, rotary=0, rotary_dim=width)
        self._scales = torch.tensor([rotary.attention_scaling], dtype=torch.float32)
        return ModelStruct(
            num_layers=len(layers),
            hidden=config.hidden_size,
            num_heads=config.num_attention_heads,
            rotary_dim=width,
            num_rotaries=1,
            activation=ACTIVATIONS[config.hidden_act],
            gated=True,
            norm_epsilon=config.rms_norm_eps,
            attention_scale=config.head_dim**-0.5,
            residual_scale=1.0,
            input_scale=1.0,
            logit_divisor=1.0,
            inverse_frequencies=self._frequencies.data_ptr(),
            rotary_scales=self._scales.data_ptr(),
            layers=(LayerStruct * len(layers))(*(self._layer(layer, kernel, heads) for layer in layers)),
            **own,
        )
