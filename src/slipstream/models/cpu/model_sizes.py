"""What a model of the fused decoder is besides its weights: its sizes, scales, caps and rotary frequencies."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from slipstream.models.attention.base import Variant
from slipstream.models.families.family import Family


class ModelSizes:
    """The fields of `ModelStruct` that are no weights, of a model that is no misfit of its family."""

    def __init__(self, model: Any, family: Family, variants: Sequence[Variant]) -> None:
        """`variants` says how each layer attends."""
        config = model.config
        part, number = partial(family.part, model), partial(family.number, model)
        first = family.layer_parts(part(family.layers)[0])
        experts = first.experts
        clamp = None if experts is None else experts.clamp
        num_heads = config.num_attention_heads
        num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
        head_dim = sum(linear.out_features for linear in first.qkv) // (num_heads + 2 * num_kv_heads)
        ways = family.rotations(model)
        rotations = list(dict.fromkeys(way for way in ways if way is not None))
        found = [rotation.inverse_frequencies for rotation in rotations]
        self._frequencies = torch.stack(found) if found else torch.empty(0)  # float32 [rotations, width / 2]
        self._scales = torch.tensor([rotation.scale for rotation in rotations], dtype=torch.float32)
        self.rotaries = [-1 if way is None else rotations.index(way) for way in ways]
        """The number of each layer's frequencies; -1: none."""
        self.fields: dict[str, Any] = {
            "hidden": config.hidden_size,
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "rotary_dim": rotations[0].width if rotations else 0,
            "intermediate": first.intermediate,
            "num_rotaries": len(rotations),
            "activation": family.activation_number(model),
            "gated": first.is_gated,
            "parallel": bool(number(family.parallel, 0.0)),
            "whole_norms": first.query_norm is not None and first.query_norm.weight.numel() != head_dim,
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
