"""Passes in the GPU's fused decoder, recorded once a shape as a CUDA graph and replayed.

It takes over Transformers models of the families in `models.families`, and computes every pass of theirs, recorded or
not, in the same kernels. They compute rows independently of each other; experts compute in Transformers' own code,
whose rows may depend on their neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor

from slipstream.kv.pool import KVPool
from slipstream.models.attention.base import AttentionBackend, AttentionPass
from slipstream.models.batch import ForwardBatch
from slipstream.models.cuda.decoder import GpuDecoder
from slipstream.models.cuda.decoder_layer import Packing
from slipstream.models.cuda.linear import DeviceWeight
from slipstream.models.cuda.norm import WIDEST
from slipstream.models.executor.base import PackedChecks, PassOutput, ProbedModel, ReadWeights
from slipstream.models.executor.cuda_graph import CudaGraphExecutor
from slipstream.models.families.family import Family
from slipstream.models.families.registry import FAMILIES, find_family


class CudaKernels(CudaGraphExecutor):
    """Replays recorded passes of the decoder. Weights that are not packed stay where the model has them."""

    name: ClassVar[str] = "cuda_kernels"
    decodes: ClassVar[bool] = True
    otherwise: ClassVar[str | None] = "cuda_graph"

    def __init__(self, given: ProbedModel, packs: bool = True) -> None:
        super().__init__(given, packs=False)
        family, fmt = find_family(given.model), given.weight_format
        assert family is not None
        rounds = fmt.weight_error is not None  # others are of the model's type already
        packing = Packing(
            fmt if packs and rounds else None,
            packs,
            given.model.config,
            self.model.device,
            given.reproducible,
        )
        self.decoder = GpuDecoder(given.model, family, given.probed.variants, given.dtype, packing)
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()  # of matrices that became one, which PyTorch would keep
        self._layers: Sequence[int] | None = None
        """Those that the pass runs; None: all."""

    @classmethod
    def misfit(cls, backend: AttentionBackend) -> str | None:
        config = backend.traits.config
        if config.model_type not in FAMILIES.names():
            return f"the fused decoder knows {', '.join(FAMILIES.names())}"
        if FAMILIES.load(config.model_type).of(config).is_of_cpu_kernels():
            return f"the fused decoder of a GPU does not compute {config.model_type}"
        return super().misfit(backend)

    @classmethod
    def refusal(cls, given: ProbedModel) -> str | None:
        family = find_family(given.model)
        reason = super().refusal(given)
        if reason is not None or family is None:
            return reason
        return next(_misfits(given, family), None)

    @classmethod
    def unpacked(cls, given: ProbedModel) -> CudaKernels:
        made = cls(given, packs=False)
        made._failure = "a model that is tried out"
        return made

    @property
    def reads(self) -> ReadWeights:
        return self.decoder.reads

    def footprint(self) -> int:
        return self.decoder.nbytes

    def run(
        self,
        rows: ForwardBatch,
        attention: AttentionPass,
        hidden_layers: Sequence[int] = (),
        call: Callable[..., Any] | None = None,
    ) -> PassOutput:
        """As `EagerExecutor.run`; there is no other model to call."""
        on = rows.on(self.model.device)
        embedded = self.embed(on.token_ids)
        if rows.added is not None:
            embedded = embedded + rows.added
        return self.decoder.run(on, embedded, attention, hidden_layers, self._layers)

    @contextmanager
    def only(self, layers: Sequence[int]) -> Iterator[None]:
        self._layers = layers
        try:
            yield
        finally:
            self._layers = None

    def embed(self, token_ids: Tensor) -> Tensor:
        with _launching_on(self.model.device):
            return self.decoder.embed(token_ids.to(self.model.device))

    def project(self, hidden: Tensor) -> Tensor:
        with _launching_on(self.model.device):
            return self.decoder.project(hidden)

    def check_layers(self, trial: ForwardBatch, pool: KVPool) -> None:
        return  # each layer has its own rotation and its own place

    def check_packed(self, checks: PackedChecks) -> None:
        return  # compared as a whole before they were packed, see `unpacked`


def _launching_on(device: torch.device) -> AbstractContextManager[Any]:
    """Kernels are launched on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _misfits(given: ProbedModel, family: Family) -> Iterator[str]:
    """Why the decoder does not compute a model of this family."""
    model, fmt = given.model, given.weight_format
    yield from family.misfits(model, given.probed.variants)
    layers = [family.layer_parts(layer) for layer in family.part(model, family.layers)]
    widths = {tuple(linear.out_features for linear in parts.linears) for parts in layers}
    rotated = {way.width for way in family.rotations(model) if way is not None}
    if len(widths) > 1 or len(rotated) > 1:
        yield "its layers differ in width"
    if max((norm.weight.numel() for parts in layers for norm in parts.norms), default=0) > WIDEST:
        yield f"the fused decoder takes norms of at most {WIDEST} numbers"
    stacks = [(fmt.of_head(), [family.part(model, family.head)])]
    if family.experts is not None and fmt.weight_error is not None:
        yield f"its experts are not held in {fmt.name} on a GPU"
    for parts in layers:
        if parts.experts is not None and parts.experts.are_in_a_file:
            yield "its experts stay in a file"
            return
        stacks += [(fmt, [*stack]) for stack in (parts.qkv, [parts.output], parts.gate_up) if stack]
        stacks += [] if parts.down is None else [(fmt, [parts.down])]
    for held, stack in stacks:
        reason = DeviceWeight.holds(held, stack)
        if reason is not None:
            yield f"weights that the fused decoder computes as one are not held so: {reason}"
            return
