"""A whole forward pass, or a whole draft chain, in one call of the native CPU kernels: the fused decoder.

It takes over Transformers models of the families in `models.families`, whose `misfit` says why it cannot take
another. Weights move into the kernels' layout layer by layer and are held once. Rows are computed independently of each
other, bit for bit, so neither drafts nor neighbours can change a row's result.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from slipstream.kv.pool import KVPool
from slipstream.models.attention.base import AttentionBackend, Variant
from slipstream.models.batch import ForwardBatch
from slipstream.models.cpu import native
from slipstream.models.cpu.kernel import Kernel
from slipstream.models.cpu.layer_trial import LayerTrial
from slipstream.models.cpu.model_sizes import HeadSizes, ModelSizes
from slipstream.models.cpu.packed_model import PackedModel
from slipstream.models.cpu.packed_weight import PackedWeight, packed_adapter_bytes
from slipstream.models.cpu.pages import free_numbers, trim_heap
from slipstream.models.cpu.part_times import PartTimes, PassPart
from slipstream.models.cpu.rounded_head import RoundedHead, rounded_head_bytes
from slipstream.models.cpu.structs import (
    TABLE_KINDS,
    InputsStruct,
    LayerStruct,
    LinearStruct,
    ModelStruct,
    RoundedHeadStruct,
)
from slipstream.models.executor.base import (
    Executor,
    PackedChecks,
    PassOutput,
    ProbedModel,
    ReadWeights,
)
from slipstream.models.executor.chains import Chains
from slipstream.models.executor.choices import TokenChoices
from slipstream.models.families.family import Family
from slipstream.models.families.parts import LayerParts, NormParts
from slipstream.models.families.registry import find_family
from slipstream.models.files.stored import StoredEmbedding
from slipstream.models.linear.grouped import GroupedLinear

log = logging.getLogger(__name__)

LEAST_UNKNOWN = 64
"""So many rows are computed twice before rounded logits are given up."""


class CpuKernels(PackedModel, Executor):
    """A model in the kernels' layout: takes over a CPU model that computes in float32 and is no `misfit`."""

    name: ClassVar[str] = "cpu_kernels"
    widens_entries: ClassVar[bool] = True
    computes_fast_rows: ClassVar[bool] = True
    is_fused: ClassVar[bool] = True
    finds_best: ClassVar[bool] = True
    num_operator_threads = 1
    _head: PackedWeight
    _times: PartTimes | None = None
    """Where the parts of passes are timed."""
    _num_found = _num_unknown = 0
    """Best tokens that were asked for, and those that took their logits."""

    def __init__(self, given: ProbedModel) -> None:
        PackedModel.__init__(self)
        model, variants, fmt = given.model, given.probed.variants, given.weight_format
        family, kernel, head_kernel = find_family(model), fmt.kernel, fmt.of_head().kernel
        assert family is not None
        assert kernel is not None
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
                self._packed_layer(layer, family, variant, heads, kernel)
                for layer, variant, heads in zip(model_layers, variants, sizes.heads, strict=True)
            )
        )
        self._embedding_scale = float(sizes.fields["embedding_scale"])
        final_norm = self._norm(NormParts.of(norm, family.norm_offset))
        self._head = self._pack([head], head_kernel or kernel)
        rounded_head = self._round_head(model) if given.rounds_head else RoundedHeadStruct()
        if not tied and isinstance(embedding, StoredEmbedding):
            self._table = self._pack([embedding.linear], kernel)
        elif not tied:
            self._embedding = self._keep_table(embedding.weight)
        given_inputs = family.input_parts(model)
        self._struct = ModelStruct(
            **sizes.fields,
            num_layers=self.num_layers,
            vocab=self.vocab_size,
            embedding_kind=0 if self._embedding is None else TABLE_KINDS[self._embedding.dtype],
            embedding=None if self._embedding is None else self._embedding.data_ptr(),
            final_norm=final_norm,
            head=self._head.struct,
            rounded_head=rounded_head,
            table=LinearStruct() if self._table is None else self._table.struct,
            inputs=InputsStruct() if given_inputs is None else self._inputs(given_inputs, kernel),
            layers=layers,
        )
        free_numbers(model)

    @classmethod
    def misfit(cls, backend: AttentionBackend) -> str | None:
        if backend.executor == cls.name:
            return None
        device = backend.traits.device.type
        if device == "cuda":
            return f"the native kernels run on a CPU, and this is {device}"
        return "its attention_backend is not native, or the native kernels do not know it"

    @classmethod
    def refusal(cls, given: ProbedModel) -> str | None:
        return cls.misfit(given.backend)

    @classmethod
    def layer_trial(cls, given: ProbedModel) -> LayerTrial | None:
        family = find_family(given.model)
        return None if family is None else LayerTrial(given.model, family, given.probed.variants)

    @classmethod
    def layer_parts(cls, model: Any) -> list[LayerParts]:
        family = find_family(model)
        assert family is not None
        return [family.layer_parts(layer) for layer in family.part(model, family.layers)]

    @classmethod
    def packed_groups(cls, model: Any) -> list[list[nn.Linear | GroupedLinear]]:
        groups: list[list[nn.Linear | GroupedLinear]] = [[_head_of(model)], *_input_projections(model)]
        for parts in cls.layer_parts(model):
            groups += [[*parts.qkv], [parts.output], [*parts.gate_up]]
            groups += [] if parts.down is None else [[parts.down]]
            groups += [] if parts.inputs is None else [[parts.inputs.gate], [parts.inputs.last]]
        return [group for group in groups if group]

    @classmethod
    def rounded_head_bytes(cls, model: Any, kernel: Kernel) -> int:
        head, family = _head_of(model), find_family(model)
        assert family is not None
        number = partial(family.number, model)
        if (
            head.bias is not None
            or number(family.logit_divisor, 1.0) != 1
            or number(family.logit_cap, 0.0) != 0
        ):
            return 0  # what is done to products may make different ones equal
        return rounded_head_bytes(kernel, head.in_features, head.out_features)

    @classmethod
    def adapter_bytes(cls, model: Any, is_native: bool) -> int:
        stacks: list[tuple[Sequence[nn.Module], bool]] = [([_head_of(model)], False)]
        stacks += [(group, False) for group in _input_projections(model)]
        for parts in cls.layer_parts(model):
            stacks += [(parts.ordered_qkv, False), ([parts.output], False)]
            if parts.down is not None:
                stacks += [(parts.ordered_gate_up, parts.is_gated), ([parts.down], False)]
            if parts.inputs is not None:
                stacks += [([parts.inputs.gate], False), ([parts.inputs.last], False)]
        return sum(
            packed_adapter_bytes([part for part in stack if isinstance(part, GroupedLinear)], alternates)
            for stack, alternates in stacks
        )

    @property
    def reads(self) -> ReadWeights:
        return ReadWeights(self.num_read, self.read_bytes)

    @property
    def has_experts(self) -> bool:  # type: ignore[override]
        return bool(self.experts)

    def footprint(self) -> int:
        return self.nbytes

    def forward(
        self,
        rows: ForwardBatch,
        pool: KVPool,
        hidden_layers: Sequence[int] = (),
        layers: Sequence[int] | None = None,
        choices: TokenChoices | None = None,
        best: bool = False,
    ) -> PassOutput:
        """As `Executor.forward`; a run must lie in consecutive slots. The hidden states -1 are what layers are given
        besides the states."""
        logits = native.empty_rows(rows.num_logit_rows, self.vocab_size)
        inputs_width = self.num_layers * self._struct.inputs.width
        hidden = {
            layer: native.empty_rows(rows.num_rows, self.hidden_size if layer >= 0 else inputs_width)
            for layer in hidden_layers
        }
        batch = self._batch(rows, pool, logits, hidden, layers)
        tokens = np.zeros(rows.num_logit_rows if best else 0, dtype=np.int64)
        if best:
            batch.best = tokens.ctypes.data
        if self._times is None:
            self._run("slipstream_forward", self._struct, batch)
        else:
            self._run_timed(self._times, self._struct, batch)
        if not best:
            return PassOutput(logits, hidden)
        self._count_unknown(tokens)
        return PassOutput(logits[:, :0], hidden, best=known(tokens, logits))

    def _count_unknown(self, tokens: NDArray[np.int64]) -> None:
        """Give up rounded logits that say too little of this model's rows: each that they leave unknown costs more."""
        self._num_found += len(tokens)
        self._num_unknown += int((tokens < 0).sum())
        if self._num_unknown > max(LEAST_UNKNOWN, self._num_found // 4) and self.rounded is not None:
            log.info(
                "best tokens are found among exact logits from here on: rounded ones are too close to each other"
            )
            with self._lock:
                self._struct.rounded_head = RoundedHeadStruct()
            self._kept = [kept for kept in self._kept if kept is not self.rounded]
            self.rounded = None

    @contextmanager
    def timing_parts(self) -> Iterator[PartTimes]:
        """Time the parts of each pass in the body, which takes some microseconds a pass; of one thread's passes."""
        self._times = PartTimes(self.num_threads, self.num_layers)
        try:
            yield self._times
        finally:
            self._times = None

    def bytes_by_part(self) -> dict[PassPart, int]:
        """Bytes of the weights that each part of a pass reads, all layers together; experts' are not counted."""
        of_panels = {linear.panels.data_ptr(): linear.least_bytes for linear in self.linears}
        layers = [self._struct.layers[number] for number in range(self.num_layers)]
        names = {
            PassPart.QKV: ("qkv",),
            PassPart.OUTPUT: ("output",),
            PassPart.GATE_UP: ("gate_up",),
            PassPart.DOWN: ("down",),
            PassPart.LAYER_INPUTS: ("input_gate", "input_projection"),
        }
        found = {
            part: sum(of_panels.get(getattr(layer, name).panels, 0) for layer in layers for name in own)
            for part, own in names.items()
        }
        return {**found, PassPart.HEAD: self._head.least_bytes}

    def draft_chain(
        self, rows: ForwardBatch, pool: KVPool, chains: Chains, layers: Sequence[int] | None = None
    ) -> list[list[int]]:
        chains.begin(rows)
        logits = native.empty_rows(rows.num_logit_rows, self.vocab_size)
        batch = self._batch(rows, pool, logits, None, layers)
        self._run("slipstream_draft", self._struct, batch, chains.struct)
        return chains.take_struct()

    def check_packed(self, checks: PackedChecks) -> None:
        assert checks.layers is not None
        layers = [self._struct.layers[number] for number in range(self.num_layers)]
        checks.weights.check_layers(layers)
        checks.weights.check_tables(self._struct)
        checks.layers.check_packed(layers, self._struct.final_norm)
        checks.check_embedding(self, is_packed=self._embedding is None)

    @property
    def struct(self) -> ModelStruct:
        """As the kernels see it; valid as long as this object lives."""
        return self._struct

    @property
    def head(self) -> PackedWeight:
        """The output layer."""
        return self._head

    def embed(self, token_ids: Tensor) -> Tensor:
        """As `Executor.embed`; a tied embedding is read out of the packed head."""
        flat = token_ids.reshape(-1)
        if self._embedding is None:
            rows = (self._head if self._table is None else self._table).unpack(flat)
        else:
            rows = self._embedding[flat].float()
        if self._embedding_scale != 1.0:
            rows = rows * self._embedding_scale
        return rows.view(*token_ids.shape, self.hidden_size)

    def project(self, hidden: Tensor) -> Tensor:
        logits = self._head.multiply(hidden.reshape(-1, self.hidden_size))
        return logits.view(*hidden.shape[:-1], self.vocab_size)

    def _round_head(self, model: Any) -> RoundedHeadStruct:
        """Hold the output layer in 8 bits besides, where best tokens are found with it."""
        if not self.rounded_head_bytes(model, self._head.kernel):
            return RoundedHeadStruct()
        rounded = RoundedHead(self._head)
        if not rounded.is_bounded:
            return RoundedHeadStruct()
        self.rounded = rounded
        self._kept.append(rounded)
        return rounded.struct

    def _packed_layer(
        self, layer: nn.Module, family: Family, variant: Variant, heads: HeadSizes, kernel: Kernel
    ) -> LayerStruct:
        parts = family.layer_parts(layer)
        struct = self._layer(parts, kernel, heads, variant.reach)
        if self._shared.isdisjoint(matrix.data_ptr() for matrix in parts.matrices):
            free_numbers(layer)  # no other layer reads it
            trim_heap()
        return struct


def known(tokens: NDArray[np.int64], logits: Tensor) -> list[int]:
    """The best tokens; where one is -1, its row of the logits was needed."""
    for row in np.flatnonzero(tokens < 0):
        tokens[row] = int(logits[row].argmax())
    return list(tokens.tolist())


def _shares_its_weight(head: Any, embedding: Any) -> bool:
    """Whether the embedding is read out of the output layer's weight."""
    if isinstance(embedding, StoredEmbedding):
        return embedding.linear is head
    return isinstance(head, nn.Linear) and head.weight.data_ptr() == embedding.weight.data_ptr()


def _shared_weights(layers: Sequence[nn.Module], family: Family) -> frozenset[int]:
    """Return where weights begin that several linear layers or experts of a model read."""
    users = Counter(matrix.data_ptr() for layer in layers for matrix in family.layer_parts(layer).matrices)
    return frozenset(address for address, count in users.items() if count > 1)


def _head_of(model: Any) -> nn.Linear:
    """The output layer of a model whose family the kernels know."""
    family = find_family(model)
    assert family is not None
    head: nn.Linear = family.part(model, family.head)
    return head


def _input_projections(model: Any) -> list[list[nn.Linear | GroupedLinear]]:
    """The linear layer that makes the inputs of all layers, where there are such."""
    family = find_family(model)
    found = None if family is None else family.input_parts(model)
    return [] if found is None else [[found.projection]]
