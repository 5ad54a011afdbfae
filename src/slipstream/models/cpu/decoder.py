"""A whole forward pass in one call: the CPU kernels' decoder.

It takes over Transformers models of the families in `families.py`; `misfit` says why it cannot take another. Weights
move into the kernels' layout layer by layer and are held once. Rows are computed independently of each other, bit for
bit, so neither drafts nor neighbours can change a row's result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from slipstream.errors import ModelError
from slipstream.kv.pool import KVPool
from slipstream.models.attention.base import Variant
from slipstream.models.cpu import native
from slipstream.models.cpu.chains import Chains
from slipstream.models.cpu.families import FAMILIES, Family, find_family
from slipstream.models.cpu.kernel import Kernel, common_kernel
from slipstream.models.cpu.model_sizes import ModelSizes
from slipstream.models.cpu.packed_model import PackedModel
from slipstream.models.cpu.packed_weight import PackedWeight
from slipstream.models.cpu.pages import free_numbers, trim_heap
from slipstream.models.cpu.parts import NormParts
from slipstream.models.cpu.structs import (
    TABLE_KINDS,
    LayerStruct,
    LinearStruct,
    ModelStruct,
)
from slipstream.models.files.stored import StoredEmbedding
from slipstream.models.linear.grouped import GroupedLinear
from slipstream.models.rows import Rows


class Decoder(PackedModel):
    """A model in the kernels' layout: takes over a CPU model that computes in float32 and is no `misfit`."""

    _head: PackedWeight

    def __init__(
        self,
        model: Any,
        family: Family,
        variants: Sequence[Variant],
        kernel: Kernel,
        head_kernel: Kernel | None = None,
    ) -> None:
        """`head_kernel` is the output layer's, None where it is no other."""
        super().__init__()
        part = partial(family.part, model)
        head, embedding = part(family.head), part(family.embedding)
        norm, model_layers = part(family.final_norm), part(family.layers)
        self.num_layers = len(model_layers)
        self.vocab_size = head.out_features
        self.hidden_size = model.config.hidden_size
        tied = _shares_its_weight(head, embedding)
        sizes = ModelSizes(model, family, variants)
        self._sizes = sizes  # the struct points into it
        self._shared = _shared_weights(model_layers, family)
        layers = (LayerStruct * self.num_layers)(
            *(
                self._packed_layer(layer, family, variant, rotary, kernel)
                for layer, variant, rotary in zip(model_layers, variants, sizes.rotaries, strict=True)
            )
        )
        self._embedding_scale = float(sizes.fields["embedding_scale"])
        final_norm = self._norm(NormParts.of(norm, family.norm_offset))
        self._head = self._pack([head], head_kernel or kernel)
        if not tied and isinstance(embedding, StoredEmbedding):
            self._table = self._pack([embedding.linear], kernel)
        elif not tied:
            self._embedding = self._keep_table(embedding.weight)
        self._struct = ModelStruct(
            **sizes.fields,
            num_layers=self.num_layers,
            vocab=self.vocab_size,
            embedding_kind=0 if self._embedding is None else TABLE_KINDS[self._embedding.dtype],
            embedding=None if self._embedding is None else self._embedding.data_ptr(),
            final_norm=final_norm,
            head=self._head.struct,
            table=LinearStruct() if self._table is None else self._table.struct,
            layers=layers,
        )
        free_numbers(model)

    def forward(
        self,
        rows: Rows,
        pool: KVPool,
        hidden_layers: Sequence[int] = (),
        layers: Sequence[int] | None = None,
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """See `CausalLM.forward`; returns logits and hidden states. A run must lie in consecutive slots."""
        logits = native.empty_rows(rows.num_logit_rows, self.vocab_size)
        hidden = {layer: native.empty_rows(rows.num_rows, self.hidden_size) for layer in hidden_layers}
        self._run("slipstream_forward", self._struct, self._batch(rows, pool, logits, hidden, layers))
        return logits, hidden

    def draft(
        self, rows: Rows, pool: KVPool, chains: Chains, layers: Sequence[int] | None = None
    ) -> list[list[int]]:
        """The tokens of whole chains, behind the rows whose logits are wanted; see `Chains` and `CausalLM.forward`.

        Their entries but the last tokens' are in `pool`, behind those rows'. Raises `ValueError` where a sequence has
        no slots for them.
        """
        logits = native.empty_rows(rows.num_logit_rows, self.vocab_size)
        batch = self._chain_batch(rows, pool, logits, chains, layers)
        self._run("slipstream_draft", self._struct, batch, chains.struct)
        return chains.tokens()

    @property
    def struct(self) -> ModelStruct:
        """As the kernels see it; valid as long as this object lives."""
        return self._struct

    @property
    def layer_structs(self) -> list[LayerStruct]:
        """Its layers, as the kernels see them."""
        return [self._struct.layers[number] for number in range(self.num_layers)]

    @property
    def embeddings_are_packed(self) -> bool:
        """Whether embeddings are read out of packed weights, the output layer's or their own."""
        return self._embedding is None

    @property
    def head(self) -> PackedWeight:
        """The output layer."""
        return self._head

    def embed(self, token_ids: Tensor) -> Tensor:
        """See `CausalLM.embed`; a tied embedding is read out of the packed head."""
        flat = token_ids.reshape(-1)
        if self._embedding is None:
            rows = (self._head if self._table is None else self._table).unpack(flat)
        else:
            rows = self._embedding[flat].float()
        if self._embedding_scale != 1.0:
            rows = rows * self._embedding_scale
        return rows.view(*token_ids.shape, self.hidden_size)

    def project(self, hidden: Tensor) -> Tensor:
        """See `CausalLM.project`."""
        logits = self._head.multiply(hidden.reshape(-1, self.hidden_size))
        return logits.view(*hidden.shape[:-1], self.vocab_size)

    def _packed_layer(
        self, layer: nn.Module, family: Family, variant: Variant, rotary: int, kernel: Kernel
    ) -> LayerStruct:
        parts = family.layer_parts(layer)
        struct = self._layer(parts, kernel, variant.sliding_window, rotary)
        if self._shared.isdisjoint(matrix.data_ptr() for matrix in parts.matrices):
            free_numbers(layer)  # no other layer reads it
            trim_heap()
        return struct


def _shares_its_weight(head: Any, embedding: Any) -> bool:
    """Whether the embedding is read out of the output layer's weight."""
    if isinstance(embedding, StoredEmbedding):
        return embedding.linear is head
    return isinstance(head, nn.Linear) and head.weight.data_ptr() == embedding.weight.data_ptr()


def misfit(model: Any, variants: Sequence[Variant], kernel: Kernel | None) -> str | None:
    """Why the kernels' decoder does not compute a model in float32 on a CPU; None where it does.

    `variants` says how each layer attends, `kernel` how the kernels hold the weight format, if they can.
    """
    family = find_family(model)
    if family is None:
        return f"the fused decoder knows {', '.join(FAMILIES.names())}"
    if kernel is None:
        return "its weight format has no kernel"
    return next(_misfits(model, family, variants), None)


def fuse(
    model: Any, variants: Sequence[Variant], kernel: Kernel | None, head_kernel: Kernel | None = None
) -> Decoder:
    """Take over a float32 CPU model that is no `misfit`; `head_kernel` is the output layer's where it is another."""
    family = find_family(model)
    assert family is not None
    assert kernel is not None
    return Decoder(model, family, variants, kernel, head_kernel)


def _shared_weights(layers: Sequence[nn.Module], family: Family) -> frozenset[int]:
    """Where weights begin that several linear layers or experts of a model read."""
    users = Counter(matrix.data_ptr() for layer in layers for matrix in family.layer_parts(layer).matrices)
    return frozenset(address for address, count in users.items() if count > 1)


def _misfits(model: Any, family: Family, variants: Sequence[Variant]) -> Iterator[str]:
    """Why the kernels' decoder does not compute the layers of this model, in float32 on a CPU."""
    yield from family.misfits(model, variants)
    for layer in family.part(model, family.layers):
        parts = family.layer_parts(layer)
        if not all(_can_be_stacked(stack) for stack in (parts.qkv, parts.gate_up)):
            yield "layers that the fused decoder computes as one were not quantised alike"


def _can_be_stacked(linears: Sequence[nn.Linear | GroupedLinear]) -> bool:
    """Whether one kernel can hold these layers as one; plain ones always are."""
    grouped = [linear for linear in linears if isinstance(linear, GroupedLinear)]
    if not grouped:
        return True
    try:
        common_kernel(grouped)
    except ModelError:  # their inputs are in different orders
        return False
    return len(grouped) == len(linears)
