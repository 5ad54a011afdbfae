"""What computes the heads that draft a block in one pass, as `head_executor` says of heads.

The executors are named `block.` and the name of the target's own: a package adds one with the entry point
`"block.my_executor"` of `slipstream.head_executors`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace

import torch
from torch import Tensor, nn

from slipstream.draft.heads.checkpoints import held_bytes
from slipstream.draft.heads.dflash_head import DFlashConfig, DFlashHead
from slipstream.draft.heads.head_executor import HeadExecutor, head_bytes, made_executor, pack_head
from slipstream.kv.pool import KVPool
from slipstream.models import CausalLM, RowGroup
from slipstream.models.attention.base import AttentionPass, Variant
from slipstream.models.attention.gpu import without_cudnn
from slipstream.models.attention.packed import PackedAttention
from slipstream.models.batch import BatchTensors, ForwardBatch
from slipstream.models.executor.chains import Chains
from slipstream.models.executor.levels import PendingDrafts
from slipstream.models.executor.recorded_drafts import FirstStates
from slipstream.models.linear.formats import WeightFormat
from slipstream.models.outline import ModelOutline

View = tuple[bool, int | None]
"""Whether a row of a block sees only those before it, and how many entries before the block; None is all."""
Ends = tuple[Seq[int], Seq[int]]
"""Of each block its anchor, which is the last committed token, and the token before that."""


class BlockExecutor(HeadExecutor):
    """Computes a head over a cache of its own, which holds entries of committed tokens.

    What the head has behind its layers stays a module in every executor.
    """

    @abstractmethod
    def __init__(self, head: DFlashHead, target: CausalLM, fmt: WeightFormat) -> None:
        """Takes the head over: the numbers of its layers may be gone afterwards."""
        pack_head(behind_layers(head), target, fmt)
        self.head, self.target, self.config = head, target, head.config
        ids = head.draft_token_ids.clone()
        is_target_s = torch.equal(ids.cpu(), torch.arange(target.vocab_size))
        self._token_ids = None if is_target_s else ids
        """[draft vocab]: the target's ids of the head's tokens; None where they are numbered alike."""

    def footprint(self) -> int:
        return head_bytes(behind_layers(self.head))

    @abstractmethod
    def store(self, rows: ForwardBatch, pool: KVPool, features: Tensor) -> None:
        """Write the entries of committed tokens, made of the target's `features` [N, width] of these tokens."""

    @abstractmethod
    def forward(self, blocks: Seq[RowGroup], pool: KVPool) -> tuple[Tensor, Tensor]:
        """One pass over a block for each sequence: the states [blocks, rows, hidden] behind the final norm, and logits
        [blocks, levels, draft vocab] of the rows whose logits are wanted.

        A block is a chain of rows behind the sequence's entries; it is the head that decides which of them a row sees.
        All have as many rows, and the same ones are wanted. What the pass writes into the pool is not read later.
        """

    def draft(
        self, stored: Seq[RowGroup], features: FirstStates, blocks: Seq[RowGroup], ends: Ends, pool: KVPool,
        drafts: PendingDrafts,
    ) -> Tensor | None:  # fmt: skip
        """`store`, `forward` and what `drafts` draw of the blocks, as `Executor.draft`; None where nothing was done.

        `features` are the target's, of the rows that are stored.
        """
        return None

    def begin(self, states: Tensor, anchor: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """What a left-to-right head reads of the blocks' `states`, [blocks, rows, width], and its own first states.

        `anchor` int64 [blocks] are the last committed tokens, `before` those before them.
        """
        head = self.head.left_to_right
        if head is None:
            return states, states.new_zeros(len(states), 0)
        read = head.read(states)
        return read, head.begin(read, anchor, before, self.embed)

    def step(
        self, slot: int, read: Tensor, logits: Tensor, previous: Tensor, above: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The logits [n, draft vocab] of one row of n paths, and the states [n, ...] that what follows begins with.

        `read` [n, width] and `logits` [n, draft vocab] are what `begin` and `forward` gave for the row, `previous`
        int64 [n] the tokens before it, `above` the states that the paths' last tokens left.
        """
        head = self.head.left_to_right
        if head is not None:
            logits, above = head.step(slot, read, logits, previous, above, self.embed)
        return logits, above

    def draw_levels(self, chains: Chains, logits: Tensor, firsts: Seq[int]) -> list[list[int]]:
        """`Chains.drawn`, from `logits` [rows, draft vocab] of all levels; a chain's begin with row `firsts` of it."""
        return chains.draw_levels(lambda rows: self.spread(logits[rows]), firsts)

    def draw_level(self, chains: Chains, logits: Tensor, growing: Seq[int]) -> list[int]:
        """As `Chains.take`, from `logits` [growing, draft vocab] of one level."""
        return chains.take(self.spread(logits), growing)

    def embed(self, token_ids: Tensor) -> Tensor:
        """int64 [...] -> [..., hidden]: as the blocks' tokens are embedded."""
        table = self.head.embedding
        return self.target.embed(token_ids) if table is None else table[token_ids]

    def confidence(self, states: Tensor, previous: Tensor) -> list[float] | None:
        """The probability that each row's draft is accepted if all before it are; None without such an estimate.

        `states` [n, hidden] are the rows', `previous` int64 [n] the tokens before theirs.
        """
        odds = self.head.confidence(states, previous)
        return None if odds is None else odds.float().sigmoid().tolist()

    def spread(self, logits: Tensor) -> Tensor:
        """[..., draft vocab] -> [..., target's vocab]; minus infinity for tokens that the head does not know."""
        if self._token_ids is None:
            return logits
        full = logits.new_full((*logits.shape[:-1], self.target.vocab_size), float("-inf"))
        full[..., self._token_ids] = logits
        return full


class EagerBlocks(BlockExecutor):
    """Calls the head's module; rows attend in PyTorch's operators, sequence by sequence."""

    def __init__(self, head: DFlashHead, target: CausalLM, fmt: WeightFormat) -> None:
        super().__init__(head, target, fmt)
        pack_head(head, target, fmt)
        self._variant = Variant(head.config.head_dim**-0.5)

    def footprint(self) -> int:
        table = 0 if self.head.embedding is None else int(self.head.embedding.nbytes)
        return table + head_bytes(self.head)

    def store(self, rows: ForwardBatch, pool: KVPool, features: Tensor) -> None:
        device = self.target.device
        self.write(pool, pool.index(rows.slots_on(device)), rows.on(device).positions, features)

    def write(self, pool: KVPool, where: slice | Tensor, positions: Tensor, features: Tensor) -> None:
        """Write the entries of tokens at these positions, into what `KVPool.index` gave for their slots."""
        context = self.head.encode(features[None])
        entries = self.head.context_entries(context, positions[None])
        for layer, (key, value) in enumerate(entries):
            pool.write(layer, where, key[0], value[0])

    def forward(self, blocks: Seq[RowGroup], pool: KVPool) -> tuple[Tensor, Tensor]:
        views = block_views(blocks, self.config)
        attention = {view: PackedAttention(rows, pool) for view, rows in views.items()}
        sizes = (len(blocks), len(blocks[0].token_ids))
        on = next(iter(views.values())).on(self.target.device)
        return self.compute(on, sizes, attention, blocks[0].logit_rows)

    def compute(
        self,
        on: BatchTensors,
        sizes: tuple[int, int],
        attention: Mapping[View, AttentionPass],
        wanted: Seq[int],
    ) -> tuple[Tensor, Tensor]:
        """`forward` of `sizes` blocks and rows each, whose arrays are `on` the device, with an attention for each of
        the views that the layers have."""

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            """Over all blocks as the rows of one pass: [blocks, heads, rows, dim] -> [1, heads, blocks * rows, dim]."""
            query, key, value = (part.transpose(0, 1).flatten(1, 2)[None] for part in (query, key, value))
            over = attention[view_of(self.config, layer)].attend(layer, query, key, value, self._variant)
            return over.view(*sizes, *over.shape[2:])

        with without_cudnn(self.target.device):
            embeds = self.embed(on.token_ids).view(*sizes, -1)
            states: Tensor = self.head(embeds, on.positions.view(*sizes), attend)
        return states, self.head.logits(states[:, wanted[0] : wanted[-1] + 1], self.target.project)


def behind_layers(head: DFlashHead) -> nn.ModuleDict:
    """The modules that a head has behind its layers: it may have none."""
    parts = {"left_to_right": head.left_to_right, "confidence": head.confidence_head}
    return nn.ModuleDict({name: part for name, part in parts.items() if part is not None})


def view_of(config: DFlashConfig, layer: int) -> View:
    """What the rows of a block see in a layer."""
    return config.causal[layer], config.windows[layer]


def block_views(blocks: Seq[RowGroup], config: DFlashConfig) -> dict[View, ForwardBatch]:
    """The rows of the blocks as the layers see them, for each view that some layer has."""
    views = views_of(config)
    return {view: ForwardBatch([seen_by(view, block) for block in blocks]) for view in views}


def views_of(config: DFlashConfig) -> list[View]:
    """Those that some layer has."""
    return list(dict.fromkeys(view_of(config, layer) for layer in range(config.num_layers)))


def seen_by(view: View, block: RowGroup) -> RowGroup:
    """The rows of a block in layers with this view."""
    return _seen(block, *view)


def _seen(block: RowGroup, causal: bool, window: int | None) -> RowGroup:
    num_rows, skipped = len(block.token_ids), 0 if window is None else max(block.num_past - window, 0)
    if causal and not skipped:
        return block
    return replace(
        block,
        slots=block.slots[skipped:],
        num_past=block.num_past - skipped,
        positions=block.row_positions(),
        tail_seen=[range(row + 1 if causal else num_rows) for row in range(num_rows)],
    )


def fits_decoder(config: DFlashConfig) -> bool:
    """Whether a head is an ordinary decoder: unscaled, without convolutions, and with layers that all see the same
    rows."""
    scales = (config.embedding_scale, config.logit_scale, config.logit_softcap)
    one_view = len({*zip(config.causal, config.windows, strict=True)}) == 1
    return scales == (1.0, 1.0, None) and not config.convolution_taps and one_view


def planned_bytes(config: DFlashConfig, target: ModelOutline, quantization: str | None) -> int:
    """Bytes of a head's own weights as its executor will hold them, without an embedding or output layer of its own.

    The kernels hold the projections of the committed tokens' entries apart from the layers', so these count twice.
    """
    with torch.device("meta"):
        head = DFlashHead(config)
    linears = {name: part for name, part in head.named_modules() if isinstance(part, nn.Linear)}
    packed = {
        f"{name}.{kind}": tensor for name, part in linears.items() for kind, tensor in part.named_parameters()
    }
    if target.packs and fits_decoder(config):
        packed |= {
            f"{name} again": each for name, each in packed.items() if ".k_proj." in name or ".v_proj." in name
        }
    rest = sum(tensor.numel() for name, tensor in head.named_parameters() if name not in packed)
    return held_bytes(packed, target, quantization) + rest * target.dtype.itemsize


def block_executor(head: DFlashHead, target: CausalLM, quantization: str | None) -> BlockExecutor:
    """The executor of a head that drafts blocks for `target`, in this weight format; None: see `head_format`.

    Raises `ConfigError` where the format cannot be used.
    """
    made = made_executor("block", head, target, quantization)
    assert isinstance(made, BlockExecutor)
    return made
