"""llama.cpp's families of Granite: their multipliers, and Granite 4, in which most layers keep a state of Mamba 2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from slipstream.errors import ModelError
from slipstream.models.files.gguf_family import (
    ATTENTION,
    MLP,
    NORMS,
    USUAL_KEYS,
    GgufArchitecture,
    Keys,
)
from slipstream.models.files.gguf_hybrids import heads_of_layers


def _multipliers(keys: Keys, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Without a key, or with 0, llama.cpp multiplies scores with what is usual, and nothing else."""
    return {
        "attention_multiplier": keys.number("attention.scale", 0.0) or sizes["head_dim"] ** -0.5,
        "embedding_multiplier": keys.number("embedding_scale", 0.0) or 1.0,
        "residual_multiplier": keys.number("residual_scale", 0.0) or 1.0,
        "logits_scaling": keys.number("logit_scale", 0.0) or 1.0,
    }


_MAMBA = {
    **{f"ssm_{part}": f"mamba.{name}" for part, name in (("in", "in_proj"), ("out", "out_proj"))},
    **{f"ssm_{part}": f"mamba.{part}" for part in ("conv1d", "norm")},
}
_INPUT = "shared_mlp.input_linear"


def _hybrid_sizes(keys: Keys) -> dict[str, Any]:
    attends, number = heads_of_layers(keys)
    hidden, inner = keys.size("embedding_length"), keys.size("ssm.inner_size")
    heads, groups = keys.size("ssm.time_step_rank"), keys.size("ssm.group_count")
    if inner % hidden or inner % heads or inner % groups or heads % groups:
        raise ModelError(
            f"{keys.file.path!r}: {inner} numbers of a state, {heads} heads, {groups} groups and states of {hidden} "
            "numbers do not fit together"
        )
    return {
        "num_key_value_heads": number,
        "layer_types": ["full_attention" if each else "linear_attention" for each in attends],
        "mamba_expand": inner // hidden,
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_n_groups": groups,
        "mamba_d_state": keys.size("ssm.state_size"),
        "mamba_d_conv": keys.size("ssm.conv_kernel"),
        "mamba_proj_bias": False,
        "mamba_conv_bias": keys.has("ssm_conv1d.bias"),
        "attention_bias": keys.has("attn_q.bias"),
    }


def _hybrid_lacks(keys: Keys, layer: int) -> dict[str, str]:
    return _MAMBA if heads_of_layers(keys)[0][layer] else ATTENTION


def _hybrid_shapes(keys: Keys, sizes: Mapping[str, Any], layer: int) -> dict[str, tuple[int, ...]]:
    hidden, inner = sizes["hidden_size"], sizes["mamba_expand"] * sizes["hidden_size"]
    mixed = inner + 2 * sizes["mamba_n_groups"] * sizes["mamba_d_state"]
    shared = _shared_size(keys)
    return {
        "ssm_in": (inner + mixed + sizes["mamba_n_heads"], hidden),
        "ssm_conv1d": (mixed, sizes["mamba_d_conv"]),
        "ssm_out": (hidden, inner),
        **{"ffn_gate_shexp": (shared, hidden), "ffn_up_shexp": (shared, hidden)},
        "ffn_down_shexp": (hidden, shared),
    }


def _hybrid_numbers(part: str, tensor: Tensor) -> Tensor:
    """One number a head, and one a channel of its norm, have a dimension more in llama.cpp, or fewer."""
    if part == "ssm_a":
        return (-tensor.float()).log().flatten()
    if part in ("ssm_d", "ssm_norm"):
        return tensor.flatten()
    return tensor[:, None] if part == "ssm_conv1d" and tensor.ndim == 2 else tensor


def _shared_size(keys: Keys) -> int:
    """Inner numbers of the MLP that every token takes: without experts, a plain one."""
    own = "expert_shared_feed_forward_length" if keys.get("expert_count") else "feed_forward_length"
    return keys.size(own)


def _rotated(keys: Keys, sizes: Mapping[str, Any]) -> dict[str, Any]:
    if not keys.choice("rope.scaling.finetuned", True):
        raise ModelError(
            f"{keys.file.path!r} rotates no positions (granite.rope.scaling.finetuned is false), and Transformers' "
            "Granite rotates all"
        )
    return _multipliers(keys, sizes)


GRANITE = GgufArchitecture("granite", NORMS | ATTENTION | MLP, rotates_neighbours=True, more=_rotated)


def _hybrid(keys: Keys, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Positions are rotated unless the file says otherwise."""
    is_rotated = keys.choice("rope.scaling.finetuned", True)
    rotated = keys.size("rope.dimension_count", sizes["head_dim"])
    if is_rotated and rotated != sizes["head_dim"]:
        raise ModelError(
            f"{keys.file.path!r} rotates {rotated} of the {sizes['head_dim']} numbers of a head, as Bamba does; read "
            "are hybrids of Granite, which rotate all or none"
        )
    number = keys.count("expert_count", 0)
    return _multipliers(keys, sizes) | {
        "position_embedding_type": "rope" if is_rotated else None,
        "shared_intermediate_size": _shared_size(keys),
        "num_local_experts": number,
        **({"num_experts_per_tok": keys.size("expert_used_count")} if number else {}),
    }


GRANITE_HYBRID = GgufArchitecture(
    "granitemoehybrid",
    NORMS
    | ATTENTION
    | _MAMBA
    | {"ffn_gate": _INPUT, "ffn_up": _INPUT, "ffn_down": "shared_mlp.output_linear"},
    rotates_neighbours=True,
    lacks=_hybrid_lacks,
    joins={_INPUT: ("ffn_gate", "ffn_up")},
    keys=USUAL_KEYS
    | {
        *(f"ssm.{part}" for part in ("conv_kernel", "state_size", "group_count")),
        *("ssm.time_step_rank", "ssm.inner_size", "expert_shared_feed_forward_length"),
        *("attention.scale", "embedding_scale", "residual_scale", "logit_scale"),
    },
    whole={"ssm_a": "mamba.A_log", "ssm_d": "mamba.D", "ssm_dt.bias": "mamba.dt_bias"},
    sizes=_hybrid_sizes,
    shapes=_hybrid_shapes,
    numbers=_hybrid_numbers,
    more=_hybrid,
)
_MIXTURE = replace(
    GRANITE_HYBRID,
    layer=NORMS
    | ATTENTION
    | _MAMBA
    | {"ffn_gate_inp": "block_sparse_moe.router"}
    | {"ffn_gate_shexp": _INPUT, "ffn_up_shexp": _INPUT, "ffn_down_shexp": "shared_mlp.output_linear"},
    experts={
        f"ffn_{part}_exps": f"block_sparse_moe.experts.{{}}.{part}_proj" for part in ("gate", "up", "down")
    },
    joins={_INPUT: ("ffn_gate_shexp", "ffn_up_shexp")},
)


def granite_hybrid(keys: Keys) -> GgufArchitecture:
    """Some sizes of Granite 4 have experts."""
    return _MIXTURE if keys.get("expert_count") else GRANITE_HYBRID
