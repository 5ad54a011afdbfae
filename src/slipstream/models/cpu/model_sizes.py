"""What a model of the fused decoder is besides its weights: its sizes, scales, caps and rotary frequencies."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from slipstream.models.attention.base import Variant
from slipstream.models.families.family import Family


class HeadSizes(NamedTuple):
    """The fields of `LayerStruct` that say how a layer's heads lie in its rows, and how they are rotated."""

    num_kv_heads: int
    head_dim: int
    rotary: int
    """The number of its frequencies; -1: none."""
    rotary_dim: int


class ModelSizes:
    """The fields of `ModelStruct` that are no weights, of a model that is no misfit of its family."""

    def __init__(self, model: Any, family: Family, variants: Sequence[Variant]) -> None:
        """`variants` says how each layer attends."""
        config = model.config
        part, number = partial(family.part, model), partial(family.number, model)
        layers = [family.layer_parts(layer) for layer in part(family.layers)]
        first = layers[0]
        experts = first.experts
        clamp = None if experts is None else experts.clamp
        ways = family.rotations(model)
        rotations = list(dict.fromkeys(way for way in ways if way is not None))
        width = max((way.width for way in rotations), default=0)
        self._frequencies = torch.zeros(len(rotations), width // 2)  # float32
        for row, way in zip(self._frequencies, rotations, strict=True):
            row[: way.width // 2] = way.inverse_frequencies
        self._scales = torch.tensor([rotation.scale for rotation in rotations], dtype=torch.float32)
        self.heads = [
            HeadSizes(
                *family.heads(model, layer),
                rotary=-1 if way is None else rotations.index(way),
                rotary_dim=0 if way is None else way.width,
            )
            for layer, way in zip(layers, ways, strict=True)
        ]
        """Each layer's."""
        query_norm = first.query_norm
        self.fields: dict[str, Any] = {
            "hidden": config.hidden_size,
            "num_heads": config.num_attention_heads,
            "rotary_dim": width,
            "num_rotaries": len(rotations),
            "activation": family.activation_number(model),
            "gated": first.is_gated,
            "parallel": bool(number(family.parallel, 0.0)),
            "whole_norms": query_norm is not None and query_norm.weight.numel() != self.heads[0].head_dim,
            "num_experts": 0 if experts is None else experts.num_experts,
            "num_chosen": 0 if experts is None else experts.num_chosen,
            "whole_shares": experts is not None and experts.has_whole_shares,
            "norm_epsilon": family.part(part(family.final_norm), family.norm_epsilon),
            "attention_scale": variants[0].scaling,
            "score_cap": variants[0].softcap or 0.0,
            "logit_cap": number(family.logit_cap, 0.0),
            "residual_scale": number(family.residual_scale, 1.0),
            "embedding_scale": number(family.embedding_scale, 1.0),
            "input_scale": number(family.input_scale, 1.0),
            "logit_divisor": number(family.logit_divisor, 1.0),
            "gate_limit": 0.0 if clamp is None else clamp.limit,
            "gate_slope": 0.0 if clamp is None else clamp.slope,
            "inverse_frequencies": self._frequencies.data_ptr(),
            "rotary_scales": self._scales.data_ptr(),
        }
