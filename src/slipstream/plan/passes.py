"""What a pass of a model computes with, besides weights and cache: rows between its operations, and logits.

The sizes are those of the code that computes: the buffers of the CPU kernels' decoder (`kernels/worker.h`), or what a
layer of a Transformers model has alive at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from slipstream.config import EngineConfig
from slipstream.kv.pool import LayerShape
from slipstream.models.cpu import threads
from slipstream.models.executor.base import LargestPass
from slipstream.models.identity import ModelIdentity
from slipstream.models.support import experts_of, text_config
from slipstream.sampling.noise import SMALL_VOCABULARY

_LINE = 16
"""Floats of a cache line; the decoder keeps its rows an odd number of them apart."""
ROW_ARRAYS_BYTES = 11 * 8
"""Bytes that the arrays of a `ForwardBatch` hold for each row, those of groups that share entries included."""

_DIVIDED_BYTES = 4 + 8
"""Where the decoder keeps a row's arithmetic: see `divide` in kernels/worker.h."""

_VISIT_NUMBERS = 4
"""Numbers that are kept of a row at one of its experts: see `Routing` in kernels/mixture.h."""

_BEST_TOKEN_BYTES = 1060
"""What a thread knows of a row's best token: see kernels/best_token.h."""

# Rows rounded to bfloat16 and arranged weights: see kernels/bfloat16.h.
_LINE_INPUTS, _LINE_BYTES, _MOST_OUTPUTS = 32, 64, 64

# The decoder's attention: see kernels/attention.h, whose names these are.
_WIDE = 16
_PARTITION = 256
_TILE = 64
_PARTS_A_THREAD = 4
_KEPT = 4 * 2**20
_LATENT_ROWS = 32
_TILE_BYTES, _PART_BYTES, _VISIBLE_BYTES, _PARTIAL_BYTES = 40, 4, 32, 8


@dataclass(frozen=True, slots=True)
class PassSizes:
    """The widths that a pass computes with."""

    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    itemsize: int
    """Bytes of a number between the operations."""
    fused: bool
    """Whether the CPU kernels' decoder computes the whole pass."""
    quantised: bool
    """Whether it rounds its rows to 8 bits."""
    rounds_head: bool = False
    """Whether its output layer is held in 8 bits besides, for rows that are rounded."""
    fast: bool = False
    """Whether it may round them to bfloat16 (`fast_prompts`)."""
    num_rotaries: int = 1
    """Rotary embeddings, by kinds of layers."""
    num_experts: int = 0
    """Experts of a layer; 0: it has none."""
    num_chosen: int = 1
    """How many of them a row visits."""
    expert_width: int = 0
    """Width inside one expert; `intermediate` is that of the MLP beside them, 0: there is none."""
    heads: tuple[tuple[int, int], ...] = ()
    """Numbers of key heads and widths of a head, of layers that differ in them."""
    num_inputs: int = 0
    """Numbers that all layers are given of a token besides the states."""
    input_width: int = 0
    """Those of one layer."""
    latent: int = 0
    """Numbers of a token's latent, where the CPU kernels attend over latents; see `models.mixers.latent`."""
    in_kernels: bool = False
    """Whether the CPU kernels attend in the layers of a model that is not fused."""
    has_biases: bool = False
    """Whether attention adds a bias, which PyTorch does."""

    @classmethod
    def of(cls, model: ModelIdentity) -> PassSizes:
        """Return the sizes of a model that is loaded, or not."""
        config = text_config(model.config)
        widest = max(model.shapes, key=LayerShape.elements)
        hidden = int(config.hidden_size)
        num_experts, num_chosen = experts_of(config)
        is_mixture = num_experts > 0 and model.is_fused
        input_width = (getattr(config, "hidden_size_per_layer_input", None) or 0) if model.is_fused else 0
        return cls(
            hidden=hidden,
            intermediate=0 if is_mixture and not _is_beside(config) else _intermediate(config, hidden),
            num_heads=_num_heads(config, widest.num_kv_heads),
            num_kv_heads=widest.num_kv_heads,
            head_dim=max(widest.key_dim, widest.value_dim),
            vocab=model.vocab_size,
            itemsize=model.dtype.itemsize,
            fused=model.is_fused,
            quantised=model.rounds_rows,
            rounds_head=model.rounds_head,
            fast=model.fast_prompts,
            num_rotaries=_num_rotaries(config),
            num_experts=num_experts if is_mixture else 0,
            num_chosen=num_chosen if is_mixture else 1,
            expert_width=_expert_width(config) if is_mixture else 0,
            heads=tuple(dict.fromkeys(_heads(shape) for shape in model.shapes if shape.num_kv_heads)),
            num_inputs=input_width * len(model.shapes),
            input_width=input_width,
            latent=_latent(widest) if model.is_native else 0,
            in_kernels=model.backend.in_kernels and not model.has_biases,
            has_biases=model.has_biases,
        )

    def row_bytes(self) -> int:
        """What a pass holds for each of its rows, without logits and scores."""
        if self.fused:
            return self._fused_row_bytes()
        query = self.num_heads * self.head_dim
        qkv = query + 2 * self.num_kv_heads * self.head_dim
        # A layer of a Transformers model: residual, normed rows, queries, keys and values before and after rotation,
        # what attention returns; in the MLP gate, up and their product.
        attention = 3 * self.hidden + 2 * qkv + query
        mlp = 2 * self.hidden + 3 * self.intermediate
        return self.itemsize * max(attention, mlp) + ROW_ARRAYS_BYTES

    def _fused_row_bytes(self) -> int:
        """Return what the decoder holds: see `Scratch` in kernels/worker.h."""
        visits, query = self.num_chosen, self._query_width
        of_mlp = _stride(max(self.intermediate, self.input_width))
        floats = self.hidden + _stride(self.hidden) + _stride(query) + 2 * self.num_inputs
        floats += max((self.num_heads + 2 * num_kv_heads) * dim for num_kv_heads, dim in self.heads)
        if self.num_experts:
            floats += max(of_mlp, visits * _stride(self.expert_width)) + (
                self.hidden if self.intermediate else 0
            )
            floats += visits * _stride(self.hidden) + self.num_experts + _VISIT_NUMBERS * visits
        else:
            floats += of_mlp
        widest = self._widest
        rounded = visits * _quantised_bytes(widest) if self.quantised else 0
        if self.fast:
            rounded += _LINE_BYTES * (-(-widest // _LINE_INPUTS) | 1)
        floats += self.num_rotaries * max(dim for _, dim in self.heads)
        return 4 * floats + rounded + _DIVIDED_BYTES + ROW_ARRAYS_BYTES

    def copied_bytes(self, num_threads: int) -> int:
        """Return what a pass of one row holds besides `row_bytes`: each thread's own copy of what its products read."""
        if not self.fused or self.fast or self.num_experts or self.num_inputs or num_threads == 1:
            return 0
        angles = self.num_rotaries * max(dim for _, dim in self.heads)
        rounded = _quantised_bytes(self._widest) if self.quantised else 0
        normed = 4 * _stride(self.hidden)
        return num_threads * normed + (num_threads - 1) * (4 * angles + rounded)

    def best_bytes(self, num_rows: int, num_threads: int) -> int:
        """Return what best tokens of so many rows are found with: see `begin_best` in kernels/worker.h."""
        if not self.fused:
            return 0
        of_head = _quantised_bytes(self.hidden) * (num_rows + num_threads) if self.rounds_head else 0
        return num_rows * num_threads * _BEST_TOKEN_BYTES + of_head

    @property
    def _query_width(self) -> int:
        """Numbers of all heads in the layer with the widest ones."""
        return self.num_heads * max(dim for _, dim in self.heads)

    @property
    def _widest(self) -> int:
        """The widest rows that the decoder multiplies."""
        inner = max(self.intermediate, self.expert_width, self.input_width)
        return max(self.hidden, inner, self._query_width)

    def score_bytes(self, num_rows: int, num_tokens: int, num_threads: int) -> int:
        """What attention computes with, in passes of up to `num_rows` rows over texts of up to `num_tokens` tokens.

        And the list of a layer's experts.
        """
        if self.fused:
            of_experts = 4 * (2 * self.num_experts + 1) if self.num_experts else 0
            of_heads = (
                self._attention_bytes(*heads, num_rows, num_tokens, num_threads) for heads in self.heads
            )
            return sum(of_heads) + num_threads * self._arranged_bytes() + of_experts
        if self.latent:
            rows = num_rows * self.num_heads * (self.head_dim + self.latent)
            desks = num_threads * _LATENT_ROWS * (_PARTITION + self.latent)
            return 4 * (rows + desks) + self._attention_bytes(
                self.num_kv_heads, self.head_dim, num_rows, num_tokens, num_threads
            )
        if self.in_kernels:
            of_layers = (
                self._attention_bytes(*heads, num_rows, num_tokens, num_threads) for heads in self.heads
            )
            return max(of_layers, default=0)
        if (
            self.has_biases
        ):  # distances in 64 bits; of each head what is added to scores, masked and not, and the scores
            return min(num_rows, num_tokens) * num_tokens * (2 * 8 + 4 * self.num_heads * self.itemsize)
        rows = min(num_rows, num_tokens) * max(self.num_heads // max(self.num_kv_heads, 1), 1)
        return rows * num_tokens * (1 + self.itemsize)  # the mask, as it is made and as it is added

    def _attention_bytes(
        self, num_kv_heads: int, head_dim: int, num_rows: int, num_tokens: int, num_threads: int
    ) -> int:
        """Return the bytes of attention of such heads: each thread's room, and partitions that threads share."""
        group = max(self.num_heads // num_kv_heads, 1)
        width, tile_rows = _up(head_dim, _WIDE), max(_TILE // group, 1)
        rows = min(num_rows, tile_rows)
        floats = rows * group * (3 * width + _PARTITION) + (_PARTITION + 1) * width
        room = 4 * floats + 2 * rows * group * _PARTIAL_BYTES + rows * _VISIBLE_BYTES
        tiles = num_rows * (_TILE_BYTES + _PART_BYTES) + _PART_BYTES
        # Tiles are shared where there are fewer than some a thread, and where there is something to share.
        num_shared = (_PARTS_A_THREAD * num_threads - 1) // num_kv_heads
        num_partitions = -(-num_tokens // _PARTITION)
        shared_rows = min(num_rows, num_shared * tile_rows) if num_threads > 1 and num_partitions > 1 else 0
        each = shared_rows * self.num_heads * (_PARTIAL_BYTES + 4 * width)
        kept = min((1 + num_partitions) * each, max(_KEPT * num_threads, 2 * each))
        return num_threads * room + tiles + kept

    def _arranged_bytes(self) -> int:
        """Return the bytes of weights that a thread arranges for `fast_prompts`, with the widest vectors."""
        return _MOST_OUTPUTS * _LINE_BYTES * -(-self._widest // _LINE_INPUTS) if self.fast else 0

    def logit_bytes(self, num_rows: int, num_texts: int) -> int:
        """`num_rows` checked rows of `num_texts` texts: raw logits, processed ones, and what choosing tokens takes."""
        row = 4 * self.vocab
        held = 2 * row + (row if num_texts > 1 else 0)  # raw, processed, and side by side for all texts
        if self.vocab <= SMALL_VOCABULARY:
            return num_rows * (held + 4 * row)  # two arrays of 64 bits: the noise of all rows at once
        return num_rows * held + 8 * row  # row by row

    def draft_logit_bytes(self, rows_per_text: int, num_texts: int) -> int:
        """The rows of a drafter's logits for all texts, and what choosing from those of one text takes."""
        row = 4 * self.vocab
        return rows_per_text * row * (num_texts + 5)


@dataclass(frozen=True, slots=True)
class PassLimits:
    """The largest passes of an engine."""

    num_rows: int
    num_logit_rows: int
    context: int
    num_threads: int

    @classmethod
    def of(cls, config: EngineConfig, batch: int, context: int, max_nodes: int) -> PassLimits:
        """Where `batch` texts of up to `context` tokens run, with proposals of `max_nodes` nodes."""
        most = config.max_num_batched_tokens
        return cls(
            num_rows=min(most, batch * context),
            num_logit_rows=min(most, batch * (1 + max_nodes)),
            context=context,
            num_threads=config.num_threads or threads.available(),
        )

    def over(self, model: ModelIdentity) -> PassLimits:
        """The limits of a model's passes: its encoder's, if it has one, are over the whole input."""
        longest = model.encoder_length
        return replace(self, num_rows=max(self.num_rows, longest), context=max(self.context, longest))


def activation_bytes(sizes: PassSizes, limits: PassLimits) -> int:
    """Rows between operations, and scores of attention."""
    scores = sizes.score_bytes(limits.num_rows, limits.context, limits.num_threads)
    of_one = sizes.row_bytes() + sizes.copied_bytes(limits.num_threads)
    best = sizes.best_bytes(limits.num_logit_rows, limits.num_threads)
    return max(limits.num_rows * sizes.row_bytes(), of_one) + scores + best


def recorded_bytes(model: ModelIdentity, limits: PassLimits, tap_bytes: int = 0) -> int:
    """What an executor that records passes holds of them, and the slots of its cache that only fill passes.

    `tap_bytes` of hidden states are kept of a token with its keys and values.
    """
    executor, sizes = model.executor_type, PassSizes.of(model)
    largest = LargestPass(
        num_rows=limits.num_rows,
        context=limits.context,
        vocab=sizes.vocab,
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        itemsize=sizes.itemsize,
        is_int8=model.cache_dtype == torch.int8,
        row_bytes=sizes.row_bytes(),
        tap_bytes=tap_bytes,
    )
    scratch = executor.num_scratch_slots * (model.kv_bytes_per_token + tap_bytes)
    return executor.recorded_bytes(largest) + scratch


def _quantised_bytes(width: int) -> int:
    """Return the bytes of a row that is rounded to 8 bits, with what is kept of every 16 of its numbers.

    See `RowGroup` in kernels/groups.h.
    """
    return (width // 16 + 8) * 32


def _up(number: int, unit: int) -> int:
    """The next multiple of `unit`."""
    return -(-number // unit) * unit


def _stride(width: int) -> int:
    """Floats from one row to the next in the decoder's buffers."""
    return ((width + _LINE - 1) // _LINE | 1) * _LINE


def _num_rotaries(config: Any) -> int:
    """Where the configuration has parameters of rotary embeddings by kinds of layers, the number of kinds."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return max(sum(isinstance(each, dict) for each in parameters.values()), 1)


def _num_heads(config: Any, num_kv_heads: int) -> int:
    """Query heads; code of a checkpoint's own may call them otherwise, and then there are as many as in the cache."""
    number = getattr(config, "num_attention_heads", None)
    return number if isinstance(number, int) else num_kv_heads


def _is_beside(config: Any) -> bool:
    """Whether experts stand beside an MLP."""
    return bool(getattr(config, "enable_moe_block", False))


def _expert_width(config: Any) -> int:
    """Width inside one expert."""
    return int(getattr(config, "moe_intermediate_size", None) or config.intermediate_size)


def _heads(shape: LayerShape) -> tuple[int, int]:
    """Key heads and the width of one."""
    return shape.num_kv_heads, max(shape.key_dim, shape.value_dim)


def _latent(shape: LayerShape) -> int:
    """Numbers of a latent that the CPU kernels attend over; 0 where there is none, or it fills no vectors."""
    return shape.value_dim if shape.values_in_keys and shape.value_dim % _WIDE == 0 else 0


def _intermediate(config: Any, hidden: int) -> int:
    """Width inside the widest MLP; of experts all that a row visits."""
    shares = getattr(config, "num_kv_shared_layers", None) and getattr(config, "use_double_wide_mlp", False)
    for name in ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size"):
        width = getattr(config, name, None)
        if isinstance(width, int):
            return 2 * width if shares else width
    return 4 * hidden
