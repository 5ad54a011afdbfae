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
from slipstream.models.cpu.structs import TABLE_KINDS, LayerStruct, LinearStruct, ModelStruct, NormStruct
from slipstream.models.families.family import Family
from slipstream.models.families.parts import LayerParts, NormParts
from slipstream.models.linear.grouped import GroupedLinear
from slipstream.models.rows import RowGroup

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

    def pack(self, number: int, parts: LayerParts) -> LayerStruct:
        """The layer of this number, in the type that its weights have; none of them may be quantised.

        It is valid until the next call, and the model keeps its own weights.
        """
        self._kept.clear()
        self._shared = frozenset(matrix.data_ptr() for matrix in parts.matrices)
        reach = self._variants[number].reach
        return self._layer(parts, _kernel(parts.matrices), reach, self._sizes.rotaries[number])

    def clear(self) -> None:
        """Forget the layer that was packed last."""
        self._kept.clear()

    def outputs(
        self, layer: LayerStruct, shape: LayerShape, states: Tensor, passes: Sequence[Sequence[RowGroup]]
    ) -> Tensor:
        """float32 [wanted rows, hidden]: what the layer makes of states [n, hidden], which are the tokens of `passes`.

        `layer` may be one of a model that is packed.
        """
        last = max(group.slots[-1] for groups in passes for group in groups)
        pool = KVPool([shape], last + 1, torch.float32, torch.device("cpu"))
        # Two layers, of which one runs: the states behind the last one would go through the final norm.
        struct = self._struct(states, NormStruct(), LinearStruct(), 0, (LayerStruct * 2)(layer, layer))
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
        count = len(states)
        pool = KVPool([LayerShape(1, 1, 1)], count, torch.float32, torch.device("cpu"))
        rows = ForwardBatch([RowGroup(range(count), 0, list(range(count)), range(count))])
        logits = native.empty_rows(count, head.out_features)
        self._run("slipstream_forward", struct, self._batch(rows, pool, logits, None, []))
        return logits

    def _struct(
        self, states: Tensor, norm: NormStruct, head: LinearStruct, vocab: int, layers: Any
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
            layers=layers,
        )


def _kernel(matrices: Sequence[Tensor]) -> Kernel:
    """How the kernels hold these numbers as they are."""
    types = {matrix.dtype for matrix in matrices}
    dtype = types.pop() if len(types) == 1 else torch.float32
    dtype = dtype if dtype in TABLE_KINDS else torch.float32
    return Kernel(TABLE_KINDS[dtype], f"slipstream_pack_{_NAMES[dtype]}", dtype.itemsize, dtype=dtype)
