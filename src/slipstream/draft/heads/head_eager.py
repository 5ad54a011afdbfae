"""Heads in PyTorch, with linear layers packed in the target's weight format or one of their own."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from slipstream.draft.heads.eagle_head import EagleHead
from slipstream.draft.heads.head_executor import EagleExecutor, HeadsExecutor
from slipstream.draft.heads.residual import ProjectedHeads
from slipstream.kv.pool import KVPool
from slipstream.models import CausalLM
from slipstream.models.attention.base import Variant
from slipstream.models.attention.gpu import without_cudnn
from slipstream.models.attention.packed import PackedAttention
from slipstream.models.batch import ForwardBatch
from slipstream.models.linear.formats import UNCHANGED, WeightFormat
from slipstream.models.linear.packing import pack_linears, packed_bytes


class EagerEagle(EagleExecutor):
    """Calls the head's module; rows attend in PyTorch's operators, sequence by sequence."""

    def __init__(self, head: EagleHead, target: CausalLM, fmt: WeightFormat) -> None:
        pack_beside(head, target, fmt)
        self.head, self.target = head, target
        self._variant = Variant(head.config.head_dim**-0.5)
        self._own_ids = not torch.equal(head.draft_token_ids.cpu(), torch.arange(target.vocab_size))
        """Whether the head's tokens are numbered otherwise than the target's."""

    def footprint(self) -> int:
        table = 0 if self.head.embedding is None else int(self.head.embedding.nbytes)
        return table + _held_bytes(self.head)

    def forward(
        self, rows: ForwardBatch, pool: KVPool, given: Tensor, from_target: bool
    ) -> tuple[Tensor, Tensor]:
        head, device = self.head, self.target.device
        attention = PackedAttention(rows, pool)
        on = rows.on(device)
        embeds = self.target.embed(on.token_ids) if head.embedding is None else head.embedding[on.token_ids]
        states = head.encode(given) if from_target else given
        with without_cudnn(device):
            states = head(
                embeds[None],
                states[None],
                on.positions[None],
                lambda query, key, value: attention.attend(0, query, key, value, self._variant),
            )[0]
        wanted = states[on.logit_rows]
        if head.config.version == 1:
            return states, self.target.project(wanted)
        logits: Tensor = head.logits(wanted)  # [wanted, draft vocab]
        if self._own_ids:
            full = logits.new_full((len(logits), self.target.vocab_size), float("-inf"))
            full[:, head.draft_token_ids] = logits
            logits = full
        return states, logits


class EagerHeads(HeadsExecutor):
    """Calls the heads' module."""

    def __init__(self, heads: ProjectedHeads, target: CausalLM, fmt: WeightFormat) -> None:
        super().__init__(heads, target, fmt)
        pack_beside(heads, target, fmt)
        self.heads = heads

    def footprint(self) -> int:
        return _held_bytes(self.heads)

    def forward(self, rows: Tensor, first: int, count: int) -> Tensor:
        return self.heads.some(rows, first, count)


def pack_beside(head: nn.Module, target: CausalLM, fmt: WeightFormat) -> None:
    """Pack the linear layers of a head for the kernels that its target's are packed for."""
    native = target.kernels != "torch"
    if native or fmt.name != UNCHANGED:
        pack_linears(head, fmt, native)


def _held_bytes(head: nn.Module) -> int:
    return packed_bytes(head) + sum(int(weight.nbytes) for weight in head.parameters())
