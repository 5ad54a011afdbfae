"""The structures that the CPU kernels read, field by field as the headers in `kernels/` have them."""

from __future__ import annotations

from ctypes import POINTER, Structure, c_double, c_float, c_int32, c_int64, c_void_p

import torch

TABLE_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
SIXTEEN_BIT_KINDS = (TABLE_KINDS[torch.bfloat16], TABLE_KINDS[torch.float16])
"""`WeightKind` of a table that is no format's: an embedding, row by row."""
ENTRY_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}
"""How the kernels number the types of cache entries: `EntryType` of entries.h."""


class RankPanelStruct(Structure):
    """`RankPanel` of low_rank.h."""

    _fields_ = (("first", c_int32), ("count", c_int32), ("offset", c_int64))


class LowRankStruct(Structure):
    """`LowRank` of low_rank.h."""

    _fields_ = (
        *((name, c_int32) for name in ("rank", "in_features")),
        *((name, c_void_p) for name in ("down", "up", "panels")),
    )


class LinearStruct(Structure):
    """`Linear` of linear.h."""

    _fields_ = (
        ("kind", c_int32),
        ("in_features", c_int32),
        ("out_features", c_int32),
        ("group", c_int32),
        ("panels", c_void_p),
        ("scales", c_void_p),
        ("bias", c_void_p),
        ("order", c_void_p),
        ("change", c_void_p),
        ("table", c_void_p),
        ("exact_rows", c_int64),
    )


class NormStruct(Structure):
    """`Norm` of model.h."""

    _fields_ = (("weight", c_void_p), ("bias", c_void_p), ("centred", c_int64))


class MixtureStruct(Structure):
    """`Mixture` of model.h."""

    _fields_ = (
        ("router", LinearStruct),
        ("gate_up", POINTER(LinearStruct)),
        ("down", POINTER(LinearStruct)),
        ("scales", c_void_p),
        *((name, NormStruct) for name in ("router_norm", "input_norm", "mlp_out_norm", "output_norm")),
    )


class RoundedHeadStruct(Structure):
    """`RoundedHead` of model.h."""

    _fields_ = (("linear", LinearStruct), ("errors", c_void_p), ("norms", c_void_p))


class InputsStruct(Structure):
    """`Inputs` of model.h."""

    _fields_ = (
        *((name, c_int32) for name in ("width", "table_kind")),
        *((name, c_float) for name in ("table_scale", "projection_scale", "scale")),
        ("table", c_void_p),
        ("packed_table", LinearStruct),
        ("projection", LinearStruct),
        ("norm", c_void_p),
    )


class LayerStruct(Structure):
    """`Layer` of model.h."""

    _fields_ = (
        *((name, NormStruct) for name in ("attention_norm", "mlp_norm", "attended_norm", "mlp_out_norm")),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("qkv", LinearStruct),
        ("output", LinearStruct),
        ("gate_up", LinearStruct),
        ("down", LinearStruct),
        ("mixture", MixtureStruct),
        ("input_gate", LinearStruct),
        ("input_projection", LinearStruct),
        ("input_norm", NormStruct),
        ("sinks", c_void_p),
        ("reach", c_int64),
        ("rotary", c_int64),
        *(
            (name, c_int32)
            for name in ("num_kv_heads", "head_dim", "rotary_dim", "projected", "norms_values")
        ),
        ("scale", c_float),
    )


class ModelStruct(Structure):
    """`Model` of model.h."""

    _fields_ = (
        *((name, c_int32) for name in ("num_layers", "hidden", "num_heads", "vocab", "num_rotaries")),
        *((name, c_int32) for name in ("rotary_dim", "activation", "gated", "parallel", "whole_norms")),
        *((name, c_int32) for name in ("embedding_kind", "num_experts", "num_chosen", "whole_shares")),
        *((name, c_float) for name in ("norm_epsilon", "attention_scale", "score_cap", "logit_cap")),
        *((name, c_float) for name in ("residual_scale", "embedding_scale", "input_scale", "logit_divisor")),
        *((name, c_float) for name in ("gate_limit", "gate_slope")),
        *((name, c_void_p) for name in ("inverse_frequencies", "rotary_scales", "embedding")),
        ("final_norm", NormStruct),
        ("head", LinearStruct),
        ("rounded_head", RoundedHeadStruct),
        ("table", LinearStruct),
        ("inputs", InputsStruct),
        ("layers", POINTER(LayerStruct)),
    )


class BatchStruct(Structure):
    """`Batch` of model.h."""

    _fields_ = (
        *((name, c_int32) for name in ("num_rows", "num_logit_rows", "num_taps", "num_layers")),
        *((name, c_void_p) for name in ("token_ids", "positions", "slots")),
        *((name, c_void_p) for name in ("run_begin", "run_length", "tail_begin")),
        *((name, c_void_p) for name in ("tail_slots", "tail_positions", "logit_rows")),
        *((name, c_void_p) for name in ("keys", "values", "tap_layers", "taps", "logits", "layers")),
        *((name, c_int64) for name in ("num_slots", "entry_type")),
        *((name, c_void_p) for name in ("key_scales", "value_scales")),
        ("num_fast", c_int64),
        *((name, c_void_p) for name in ("fast_rows", "shared_begin", "shared_length", "added", "best")),
    )


class SightStruct(Structure):
    """`Sight` of attention.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("positions", "run_begin", "run_length", "tail_begin")),
        *((name, c_void_p) for name in ("tail_slots", "tail_positions", "shared_begin", "shared_length")),
    )


class LayerAttentionStruct(Structure):
    """`LayerAttention` of attention.h."""

    _fields_ = (
        *((name, c_int32) for name in ("num_rows", "num_heads", "num_kv_heads", "key_dim", "value_dim")),
        *((name, c_int32) for name in ("value_step", "entry_type", "unused")),
        *((name, c_float) for name in ("scale", "cap")),
        *((name, c_int64) for name in ("reach", "num_slots")),
        *((name, c_void_p) for name in ("queries", "sinks", "keys", "values")),
        *((name, c_void_p) for name in ("key_scales", "value_scales", "out")),
        ("sight", SightStruct),
    )


class LatentStruct(Structure):
    """`Latent` of latent.h."""

    _fields_ = (
        *((name, c_int32) for name in ("num_rows", "num_heads", "rank", "rope", "nope", "value")),
        *((name, c_int32) for name in ("weight_kind", "entry_type")),
        *((name, c_float) for name in ("scale", "unused")),
        *((name, c_int64) for name in ("num_slots", "query_row", "query_head")),
        *((name, c_void_p) for name in ("weight", "queries", "made", "slots", "numbers", "scales", "out")),
        ("sight", SightStruct),
    )


class EagleStruct(Structure):
    """`Eagle` of eagle.h."""

    _fields_ = (
        ("model", ModelStruct),
        ("embedder", POINTER(ModelStruct)),
        ("fc", LinearStruct),
        ("embedding_norm", c_void_p),
        ("token_ids", c_void_p),
        ("residual_is_normed", c_int64),
    )


class StatesStruct(Structure):
    """`States` of eagle.h."""

    _fields_ = (("given", c_void_p), ("made", c_void_p), ("from_target", c_int64))


class BlockStruct(Structure):
    """`Block` of heads.h."""

    _fields_ = (("linear", LinearStruct), ("shortcut", LinearStruct))


class HeadsStruct(Structure):
    """`Heads` of heads.h."""

    _fields_ = (
        *((name, c_int32) for name in ("num_heads", "num_blocks", "hidden", "vocab")),
        ("blocks", POINTER(BlockStruct)),
        ("outputs", POINTER(LinearStruct)),
        ("shared", c_int64),
    )


class HeadRowsStruct(Structure):
    """`HeadRows` of heads.h."""

    _fields_ = (
        *((name, c_int32) for name in ("n", "first", "count", "unused")),
        ("rows", c_void_p),
        ("logits", c_void_p),
    )


class WalkStruct(Structure):
    """`Walk` of recurrent.h."""

    _fields_ = (
        *((name, c_int32) for name in ("num_steps", "num_sequences", "num_buffers", "unused")),
        *((name, c_void_p) for name in ("first_steps", "slots", "sources", "targets", "copies")),
    )


class OuterProductsStruct(Structure):
    """`OuterProducts` of recurrent.h."""

    _fields_ = (
        *((name, c_int32) for name in ("heads", "key_heads", "key_dim", "value_dim")),
        *((name, c_void_p) for name in ("query", "key", "value", "decay", "beta", "rates")),
        *((name, c_void_p) for name in ("output", "states")),
        ("slot_stride", c_int64),
        *((name, c_int32) for name in ("decay_rows", "decay_columns")),
    )


class ConvolutionStruct(Structure):
    """`Convolution` of recurrent.h."""

    _fields_ = (
        *((name, c_int32) for name in ("channels", "taps")),
        *((name, c_void_p) for name in ("inputs", "weight", "bias", "output", "windows")),
        ("slot_stride", c_int64),
        *((name, c_void_p) for name in ("read", "kept_steps", "kept_slots")),
        ("num_kept", c_int64),
    )


class DrawingStruct(Structure):
    """`Drawing` of draw.h."""

    _fields_ = (
        *((name, c_double) for name in ("min_p", "top_p", "least_confidence")),
        ("temperature", c_float),
        ("top_k", c_int32),
        ("noisy", c_int64),
    )


class LevelsStruct(Structure):
    """`Levels` of chain.h."""

    _fields_ = (
        ("logits", c_void_p),
        ("firsts", c_void_p),
        ("width", c_int64),
        ("token_ids", c_void_p),
    )


class ChainsStruct(Structure):
    """`Chains` of chain.h."""

    _fields_ = (
        *((name, c_int32) for name in ("depth", "num_tokens")),
        *((name, c_void_p) for name in ("lengths", "drawings", "keys", "confidences", "token_ids")),
    )
