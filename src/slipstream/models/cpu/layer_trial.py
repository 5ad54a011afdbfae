"""Single layers of a model in the fused decoder, on states that they are given, with weights that nothing rounds.

The kernels compute a layer by the same code whatever its weights are held as, so a layer whose weights are the
checkpoint's numbers, in floating point, tells whether they compute what the Transformers model computes. Errors of
earlier layers do not reach it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.kv.pool import KVPool, LayerShape
from slipstream.models.attention.base import Variant
from slipstream.models.batch import ForwardBatch
from slipstream.models.cpu import native
from slipstream.models.cpu.kernel import Kernel
from slipstream.models.cpu.model_sizes import ModelSizes
from slipstream.models.cpu.packed_model import PackedModel
from slipstream.models.cpu.structs import (
    TABLE_KINDS,
    InputsStruct,
    LayerStruct,
    LinearStruct,
    ModelStruct,
    NormStruct,
)
from slipstream.models.families.family import Family
from slipstream.models.families.inputs import GivenInputs, InputParts
from slipstream.models.families.parts import LayerParts, NormParts
from slipstream.models.linear.grouped import GroupedLinear
from slipstream.models.rows import RowGroup

NUM_TRIAL_LAYERS = 2
"""Of which one runs: the states behind the last one would go through the final norm."""
_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


class LayerTrial(PackedModel):
    """Holds one layer at a time."""

    num_layers = 1
    _keeps_experts = False

    def __init__(self, model: Any, family: Family, variants: Sequence[Variant]) -> None:
        """`variants` says how each layer attends."""
        super().__init__()
        self.family = family
        self._model, self._variants = model, variants
        self._sizes = ModelSizes(model, family, variants)
        self.final_norm = NormStruct()
        """As `logits` packed it, valid until something else is packed."""

    @property
    def layers(self) -> list[nn.Module]:
        """The Transformers model's."""
        return list(self.family.part(self._model, self.family.layers))

    @property
    def head(self) -> nn.Linear | GroupedLinear:
        """The Transformers model's output layer."""
        found: nn.Linear | GroupedLinear = self.family.part(self._model, self.family.head)
        return found

    @property
    def input_parts(self) -> InputParts | None:
        """What makes the inputs of the Transformers model's layers besides the states."""
        return self.family.input_parts(self._model)

    def pack(self, number: int, parts: LayerParts) -> LayerStruct:
        """The layer of this number, in the type that its weights have; none of them may be quantised.

        It is valid until the next call, and the model keeps its own weights.
        """
        self._kept.clear()
        self._shared = frozenset(matrix.data_ptr() for matrix in parts.matrices)
        reach = self._variants[number].reach
        return self._layer(parts, _kernel(parts.matrices), self._sizes.heads[number], reach)

    def clear(self) -> None:
        """Forget the layer that was packed last."""
        self._kept.clear()

    def inputs(self, parts: InputParts, tokens: Sequence[int], states: Tensor, layer: LayerStruct) -> Tensor:
        """float32 [n, layers * width]: what all layers are given of `tokens` [n], whose embeddings are `states`.

        `layer` is any that is packed, and stays valid.
        """
        ids = torch.tensor(tokens)
        rows = parts.table.weight.detach()[ids] if parts.stored is None else parts.stored.rows(ids)
        table = self._keep_table(rows.float())
        plain = parts.plain_projection()
        self._shared |= {plain.weight.data_ptr()}
        num_layers = len(self._sizes.heads)
        inputs = InputsStruct(
            width=parts.width,
            table_kind=TABLE_KINDS[torch.float32],
            table_scale=parts.table_scale,
            projection_scale=parts.projection_scale,
            scale=parts.scale,
            table=table.data_ptr(),
            projection=self._pack([plain], _kernel([plain.weight])).struct,
            norm=self._norm(parts.norm).weight,
        )
        layers = (LayerStruct * num_layers)(*[layer] * num_layers)
        struct = self._struct(states, NormStruct(), LinearStruct(), 0, layers, inputs)
        found = native.empty_rows(len(states), num_layers * parts.width)
        self._run_rows(struct, len(states), {-1: found}, 0)
        return found

    def outputs(
        self,
        layer: LayerStruct,
        pool: KVPool,
        states: Tensor,
        passes: Sequence[Sequence[RowGroup]],
        given: GivenInputs | None = None,
    ) -> Tensor:
        """float32 [wanted rows, hidden]: what the layer makes of states [n, hidden], which are the tokens of `passes`.

        `layer` may be one of a model that is packed. `pool` is of this layer alone; one that reads another's entries
        finds them there. `given` are its inputs besides the states.
        """
        inputs = InputsStruct()
        if given is not None:
            inputs = InputsStruct(
                width=given.width,
                table_kind=TABLE_KINDS[torch.float32],
                table_scale=1.0,
                table=given.rows.data_ptr(),
            )
        layers = (LayerStruct * NUM_TRIAL_LAYERS)(*[layer] * NUM_TRIAL_LAYERS)
        struct = self._struct(states, NormStruct(), LinearStruct(), 0, layers, inputs)
        found = []
        for groups in passes:
            rows = ForwardBatch(groups)
            after = {1: native.empty_rows(rows.num_rows, states.shape[1])}
            logits = native.empty_rows(rows.num_logit_rows, 0)
            self._run("slipstream_forward", struct, self._batch(rows, pool, logits, after, [0]))
            found.append(after[1][rows.on(pool.features.device).logit_rows])
        return torch.cat(found)

    def logits(self, head: nn.Linear, states: Tensor) -> Tensor:
        """float32 [n, out]: what the final norm and an output layer, or a part of it, make of states [n, hidden]."""
        self._kept.clear()
        self._shared = frozenset({head.weight.data_ptr()})
        norm = self._norm(
            NormParts.of(self.family.part(self._model, self.family.final_norm), self.family.norm_offset)
        )
        self.final_norm = norm
        packed = self._pack([head], _kernel([head.weight])).struct
        struct = self._struct(states, norm, packed, head.out_features, (LayerStruct * 0)())
        return self._run_rows(struct, len(states), None, head.out_features)

    def _run_rows(
        self, struct: ModelStruct, count: int, taps: dict[int, Tensor] | None, width: int
    ) -> Tensor:
        """The logits [count, width] of `count` states through no layer."""
        pool = KVPool([LayerShape(1, 1, 1)], count, torch.float32, torch.device("cpu"))
        rows = ForwardBatch([RowGroup(range(count), 0, list(range(count)), range(count))])
        logits = native.empty_rows(count, width)
        self._run("slipstream_forward", struct, self._batch(rows, pool, logits, taps, []))
        return logits

    def _struct(
        self,
        states: Tensor,
        norm: NormStruct,
        head: LinearStruct,
        vocab: int,
        layers: Any,
        inputs: InputsStruct | None = None,
    ) -> ModelStruct:
        """A model whose embeddings are the states."""
        fields = self._sizes.fields | {"embedding_scale": 1.0, "input_scale": 1.0}
        return ModelStruct(
            **fields,
            num_layers=len(layers),
            vocab=vocab,
            embedding_kind=TABLE_KINDS[torch.float32],
            embedding=states.data_ptr(),
            final_norm=norm,
            head=head,
            table=LinearStruct(),
            inputs=inputs or InputsStruct(),
            layers=layers,
        )


def _kernel(matrices: Sequence[Tensor]) -> Kernel:
    """How the kernels hold these numbers as they are."""
    types = {matrix.dtype for matrix in matrices}
    dtype = types.pop() if len(types) == 1 else torch.float32
    dtype = dtype if dtype in TABLE_KINDS else torch.float32
    return Kernel(TABLE_KINDS[dtype], f"slipstream_pack_{_NAMES[dtype]}", dtype.itemsize, dtype=dtype)
