"""What computes the heads that run with a target, as `models.executor` computes models.

The executor of a head is found by the name of the target's own executor. Where there is none of that name, it is
`recorded` for a target whose passes are recorded, and else `eager`, as where it does not know such a head. A package
adds one with one line of its own `pyproject.toml`:

    [project.entry-points."slipstream.head_executors"]
    "eagle.my_executor" = "my_package.module:MyEagle"
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from collections.abc import Sequence as Seq
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.draft.heads.eagle_head import EagleHead
from slipstream.draft.heads.mtp_head import MtpHead
from slipstream.draft.heads.residual import ProjectedHeads
from slipstream.kv.pool import KVPool
from slipstream.kv.upload import upload
from slipstream.models import CausalLM
from slipstream.models.attention.base import AttentionPass, Variant
from slipstream.models.attention.gpu import without_cudnn
from slipstream.models.attention.packed import PackedAttention
from slipstream.models.batch import ForwardBatch
from slipstream.models.executor.chains import Chains
from slipstream.models.executor.levels import PendingDrafts
from slipstream.models.executor.recorded_drafts import FirstStates
from slipstream.models.linear.formats import UNCHANGED, WeightFormat
from slipstream.models.linear.packing import pack_linears, packed_bytes
from slipstream.registry import Registry


class HeadExecutor(ABC):
    """Computes a head, and holds its weights."""

    @classmethod
    def refusal(cls, head: Any, target: CausalLM, fmt: WeightFormat) -> str | None:
        """Why this executor does not compute such a head; None where it does."""
        return None

    @abstractmethod
    def footprint(self) -> int:
        """Bytes of the head's own weights as they are held."""


class FeatureExecutor(HeadExecutor):
    """Computes a head that reads the target's features, over a cache of its own."""

    target: CausalLM
    records: bool = False
    """Whether `draft` may record drafts."""

    def draft(
        self,
        rows: ForwardBatch,
        pool: KVPool,
        drafts: PendingDrafts,
        features: FirstStates,
        at_once: bool = False,
    ) -> Tensor | None:
        """As `Executor.draft`; `features` are the target's."""
        return None

    @abstractmethod
    def forward(self, rows: ForwardBatch, pool: KVPool, given: Tensor, level: int) -> tuple[Tensor, Tensor]:
        """The states [N, width] behind the rows, and logits [wanted rows, target's vocab].

        `level` is 0 for rows of the text, and else that of the draft tokens in a tree or chain, from 1 on. `given` are
        the states that the rows start from, [N, width]: the target's features for the text, then the head's own states.
        """

    def draft_chain(self, rows: ForwardBatch, pool: KVPool, given: Tensor, chains: Chains) -> Seq[Seq[int]]:
        """As `Executor.draft_chain`, from the target's features `given` [N, width]."""
        last, level = given, 0

        def run(batch: ForwardBatch, above: list[int]) -> Tensor:
            nonlocal last, level
            all_go_on = above in ([], list(range(len(last))))
            last = last if all_go_on else last[upload(above, last.device)]
            states, logits = self.forward(batch, pool, last, level)
            last, level = states[batch.on(states.device).logit_rows], level + 1
            return logits

        return chains.draw(rows, run)


class EagleExecutor(FeatureExecutor):
    """Computes an EAGLE head."""

    @abstractmethod
    def __init__(self, head: EagleHead, target: CausalLM, fmt: WeightFormat) -> None:
        """Takes the head over: the numbers of `head` may be gone afterwards."""


class MtpExecutor(FeatureExecutor):
    """Computes layers for multi-token prediction."""

    @abstractmethod
    def __init__(self, head: MtpHead, target: CausalLM, fmt: WeightFormat) -> None:
        """Takes the head over: the numbers of `head` may be gone afterwards."""


class HeadsExecutor(HeadExecutor):
    """Computes a set of Medusa or Hydra heads."""

    @abstractmethod
    def __init__(self, heads: ProjectedHeads, target: CausalLM, fmt: WeightFormat) -> None:
        """Takes the heads over: the numbers of `heads` may be gone afterwards."""
        self.target = target
        self.reads_tokens = heads.reads_tokens

    def draft(
        self, pool: KVPool, drafts: PendingDrafts, states: FirstStates, token_ids: Seq[int]
    ) -> Tensor | None:
        """As `Executor.draft`, from the target's states in `pool` and the tokens behind them."""
        return None

    @abstractmethod
    def forward(self, rows: Tensor, first: int, count: int) -> Tensor:
        """Logits [count, n, vocab] of the heads from `first` on, all over the same rows [n, width]."""

    def draft_chain(self, states: Tensor, token_ids: Seq[int], chains: Chains) -> list[list[int]]:
        """As `Executor.draft_chain`, from the target's states [chains, hidden] and the tokens behind them."""
        growing: list[int] = list(range(len(states)))
        if not self.reads_tokens:
            logits = self.forward(states, 0, chains.depth)
            for level in range(chains.depth):
                growing = chains.take(logits[level][growing], growing)
            return chains.drawn
        rows, tokens, level = states, list(token_ids), 0
        while growing:
            rows = torch.cat([rows, self.target.embed(upload(tokens, rows.device))], dim=-1)
            before = growing
            growing = chains.take(self.forward(rows, level, 1)[0], growing)
            rows, level = rows[[before.index(chain) for chain in growing]], level + 1
            tokens = [chains.drawn[chain][-1] for chain in growing]
        return chains.drawn


class EagerEagle(EagleExecutor):
    """Calls the head's module; rows attend in PyTorch's operators, sequence by sequence."""

    def __init__(self, head: EagleHead, target: CausalLM, fmt: WeightFormat) -> None:
        pack_head(head, target, fmt)
        self.head, self.target = head, target
        self._variant = Variant(head.config.head_dim**-0.5)
        self._own_ids = not torch.equal(head.draft_token_ids.cpu(), torch.arange(target.vocab_size))
        """Whether the head's tokens are numbered otherwise than the target's."""

    def footprint(self) -> int:
        table = 0 if self.head.embedding is None else int(self.head.embedding.nbytes)
        return table + head_bytes(self.head)

    def forward(self, rows: ForwardBatch, pool: KVPool, given: Tensor, level: int) -> tuple[Tensor, Tensor]:
        return self.compute(rows, PackedAttention(rows, pool), given, level)

    def compute(
        self, rows: ForwardBatch, attention: AttentionPass, given: Tensor, level: int
    ) -> tuple[Tensor, Tensor]:
        """`forward` with an attention that was prepared for it."""
        head, device = self.head, self.target.device
        on = rows.on(device)
        embeds = self.target.embed(on.token_ids) if head.embedding is None else head.embedding[on.token_ids]
        states = given if level else head.encode(given)
        with without_cudnn(device):
            states = head(
                embeds[None],
                states[None],
                on.positions[None],
                lambda layer, query, key, value: attention.attend(layer, query, key, value, self._variant),
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
        pack_head(heads, target, fmt)
        self.heads = heads

    def footprint(self) -> int:
        return head_bytes(self.heads)

    def forward(self, rows: Tensor, first: int, count: int) -> Tensor:
        return self.heads.some(rows, first, count)


def pack_head(
    head: nn.Module, target: CausalLM, fmt: WeightFormat, called: Collection[str] | None = None
) -> None:
    """Pack the linear layers of a head for the kernels that its target's are packed for. `called`: `pack_linears`."""
    if target.is_native or fmt.name != UNCHANGED:
        pack_linears(head, fmt, target.is_native, called=called)


def head_bytes(head: nn.Module) -> int:
    """Bytes of a head's weights, packed or not."""
    return packed_bytes(head) + sum(int(weight.nbytes) for weight in head.parameters())


HEAD_EXECUTORS: Registry[HeadExecutor] = Registry(
    "head executor",
    HeadExecutor,  # type: ignore[type-abstract]
    "slipstream.head_executors",
    {
        "block.cpu_kernels": "slipstream.draft.heads.block_native:NativeBlocks",
        "block.eager": "slipstream.draft.heads.block_executor:EagerBlocks",
        "block.recorded": "slipstream.draft.heads.recorded_blocks:RecordedBlocks",
        "eagle.cpu_kernels": "slipstream.draft.heads.heads_native:NativeEagle",
        "eagle.eager": "slipstream.draft.heads.head_executor:EagerEagle",
        "eagle.recorded": "slipstream.draft.heads.recorded_heads:RecordedEagle",
        "heads.cpu_kernels": "slipstream.draft.heads.heads_native:NativeHeads",
        "heads.eager": "slipstream.draft.heads.head_executor:EagerHeads",
        "heads.recorded": "slipstream.draft.heads.recorded_heads:RecordedHeads",
        "mtp.eager": "slipstream.draft.heads.mtp_executor:EagerMtp",
        "mtp.recorded": "slipstream.draft.heads.recorded_heads:RecordedMtp",
    },
)


def eagle_executor(head: EagleHead, target: CausalLM, quantization: str | None) -> EagleExecutor:
    """The executor of an EAGLE head that drafts for `target`, in this weight format; None: see `head_format`.

    Raises `ConfigError` where the format cannot be used.
    """
    made = made_executor("eagle", head, target, quantization)
    assert isinstance(made, EagleExecutor)
    return made


def mtp_executor(head: MtpHead, target: CausalLM, quantization: str | None) -> MtpExecutor:
    """As `eagle_executor`, of layers for multi-token prediction."""
    made = made_executor("mtp", head, target, quantization)
    assert isinstance(made, MtpExecutor)
    return made


def heads_executor(heads: ProjectedHeads, target: CausalLM, quantization: str | None) -> HeadsExecutor:
    """As `eagle_executor`, of a set of Medusa or Hydra heads."""
    made = made_executor("heads", heads, target, quantization)
    assert isinstance(made, HeadsExecutor)
    return made


def made_executor(kind: str, head: Any, target: CausalLM, quantization: str | None) -> HeadExecutor:
    """The executor of a head of this kind, such as `eagle`; see `eagle_executor`."""
    fmt = target.head_format(quantization)
    known = HEAD_EXECUTORS.names()
    own = [target.executor.name, *(["recorded"] if target.executor.records else [])]
    name = next((f"{kind}.{each}" for each in own if f"{kind}.{each}" in known), f"{kind}.eager")
    found = HEAD_EXECUTORS.load(name)
    if found.refusal(head, target, fmt) is not None:
        found = HEAD_EXECUTORS.load(f"{kind}.eager")
    return found(head, target, fmt)  # type: ignore[call-arg]
