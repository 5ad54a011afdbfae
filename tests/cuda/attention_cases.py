"""Random passes for the attention kernels, and what they must yield, in float64."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.core.proposal import Proposal
from slipstream.kv.pool import KVPool, LayerShape
from slipstream.models.batch import ForwardBatch
from slipstream.models.cuda.attention_plan import plan_attention
from slipstream.models.cuda.tree_attention import Cut, Reads, Scratch, launch
from slipstream.models.rows import RowGroup, tree_rows

CPU = torch.device("cpu")
SMALL = Cut(16, 16, 4)
MOST_ROWS = 35
"""Slots of a sequence beside those that lie before the pass."""
TOLERANCES = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""How far the kernels may be from float64, as a share of the largest number."""


@dataclass(frozen=True)
class Case:
    """The sizes of a layer, and how it attends."""

    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    num_heads: int = 4
    kv_heads: int = 2
    key_dim: int = 24
    value_dim: int = 16
    reach: int = 0
    softcap: float | None = None
    has_sinks: bool = False
    cut: Cut = SMALL
    split: int = 32
    scaling: float = 0.3

    @property
    def tile_rows(self) -> int:
        return self.cut.tile // (self.num_heads // self.kv_heads)


CASES = {
    "plain": Case(),
    "one key head": Case(kv_heads=1),
    "no groups": Case(num_heads=2, kv_heads=2, key_dim=64, value_dim=64),
    "window": Case(reach=11),
    "narrow window": Case(reach=1),
    "chunk": Case(reach=-11),
    "narrow chunk": Case(reach=-1),
    "softcap": Case(softcap=1.5),
    "sinks": Case(has_sinks=True),
    "sinks in a window": Case(has_sinks=True, reach=9),
    "int8": Case(cache_dtype=torch.int8),
    "int8 in a window": Case(torch.float16, torch.int8, reach=13),
    "bfloat16": Case(torch.bfloat16),
    "bfloat16 beside float32": Case(torch.float32, torch.bfloat16),
    "heads of 80 and 40": Case(key_dim=80, value_dim=40),
}


def random_groups(seed: int, num_groups: int = 3, longest: int = 45) -> list[RowGroup]:
    """Sequences of different lengths: prompts, single tokens, and trees of any shape behind some tokens. Fewer than
    `longest` entries lie before them."""
    generator = random.Random(seed)
    groups = []
    room = longest + MOST_ROWS
    for number in range(num_groups):
        past, num_tokens = generator.randrange(longest), generator.choice([1, 1, 2, 7])
        num_nodes = generator.choice([0, 0, 4, 9])
        parents = tuple(generator.randrange(-1, node) for node in range(num_nodes))
        tree = Proposal(tuple(range(num_nodes)), parents)
        slots = range(number * room, (number + 1) * room)
        groups.append(tree_rows(slots, past, [0] * num_tokens, tree, 0))
    return groups


@dataclass
class Layer:
    """A layer's cache, of which only the past is filled, and the rows of a pass."""

    case: Case
    batch: ForwardBatch
    pool: KVPool
    query: Tensor
    """[rows, heads, key_dim]"""
    key: Tensor
    value: Tensor
    sinks: Tensor | None

    @classmethod
    def random(
        cls, case: Case, seed: int, groups: list[RowGroup] | None = None, device: torch.device = CPU
    ) -> Layer:
        """Everything that was not written is NaN. The numbers are the same on every device."""
        batch = ForwardBatch(groups or random_groups(seed))
        shape = LayerShape(case.kv_heads, case.key_dim, case.value_dim)
        num_slots = max(group.slots[-1] for group in batch.groups) + 1
        pool = KVPool([shape], num_slots, case.dtype, device, cache_dtype=case.cache_dtype)
        pool.fill(float("nan"))
        generator = torch.Generator().manual_seed(seed)

        def numbers(*sizes: int) -> Tensor:
            return torch.randn(sizes, generator=generator).to(case.dtype).to(device)

        for group in batch.groups:
            past = numbers(case.kv_heads, group.num_past, case.key_dim + case.value_dim)
            where = slice(group.slots[0], group.slots[0] + group.num_past)
            pool.write(0, where, past[..., : case.key_dim], past[..., case.key_dim :])
        n = batch.num_rows
        query, key = (numbers(n, heads, case.key_dim) for heads in (case.num_heads, case.kv_heads))
        sinks = numbers(case.num_heads) if case.has_sinks else None
        return cls(case, batch, pool, query, key, numbers(n, case.kv_heads, case.value_dim), sinks)

    @property
    def device(self) -> torch.device:
        return self.query.device

    @property
    def entries(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        pool = self.pool
        scales = (pool.key_scales[0], pool.value_scales[0]) if pool.key_scales else (None, None)
        return pool.keys[0], pool.values[0], *scales

    def reads(self, num_padded: int = 0) -> Reads:
        """The pass's arrays, with some items that have nothing to do."""
        plan = plan_attention(self.batch, self.case.tile_rows, self.case.split)
        items = torch.cat([torch.from_numpy(plan.items), torch.zeros(num_padded, 5, dtype=torch.int64)])
        on = self.batch.on(self.device)
        return Reads.of(on, items.to(self.device), torch.from_numpy(plan.partials).to(self.device))

    def by_kernels(self, num_padded: int = 2) -> Tensor:
        """[rows, heads, value_dim] from the kernels, whose outputs were NaN before."""
        case, reads = self.case, self.reads(num_padded)
        scratch = Scratch.of(int(reads.partials[-1]), case.num_heads, case.value_dim, self.device)
        output = self.query.new_empty(*self.query.shape[:2], case.value_dim)
        for tensor in (*scratch, output):
            tensor.fill_(float("nan"))
        launch(
            self.query, self.key, self.value, self.entries, reads, scratch, output,
            case.scaling, case.reach, case.softcap, self.sinks, case.cut, case.split,
        )  # fmt: skip
        return output

    def expected(self) -> Tensor:
        """The same, row by row in float64, over a cache that this pass's entries were written to."""
        case, on = self.case, self.batch.on(CPU)
        keys, values = (part.double() for part in self.pool.read(0, slice(0, self.pool.num_slots)))
        group = case.num_heads // case.kv_heads
        rows = []
        for row in range(self.batch.num_rows):
            begin, run = int(on.run_begin[row]), int(on.run_length[row])
            behind = slice(int(on.tail_begin[row]), int(on.tail_begin[row + 1]))
            slots = [*range(begin, begin + run), *on.tail_slots[behind].tolist()]
            positions = torch.tensor([*range(run), *on.tail_positions[behind].tolist()], device=self.device)
            scores = torch.einsum(
                "hd,hsd->hs", self.query[row].double(), keys[:, slots].repeat_interleave(group, 0)
            )
            scores *= case.scaling
            if case.softcap is not None:
                scores = torch.tanh(scores / case.softcap) * case.softcap
            position = int(on.positions[row])
            if case.reach > 0:
                scores[:, positions <= position - case.reach] = -torch.inf
            if case.reach < 0:
                scores[:, positions // -case.reach != position // -case.reach] = -torch.inf
            if self.sinks is not None:
                scores = torch.cat([scores, self.sinks.double()[:, None]], 1)
            weights = torch.softmax(scores, 1)[:, : len(slots)]
            rows.append(torch.einsum("hs,hsd->hd", weights, values[:, slots].repeat_interleave(group, 0)))
        return torch.stack(rows)

    def error(self) -> float:
        """How far the kernels are from float64, as a share of the largest number."""
        ours, expected = self.by_kernels(), self.expected()
        return float((ours.double() - expected).abs().max() / expected.abs().max())

    def alone(self, row: int) -> Tensor:
        """The row's attention where the row is a pass of its own, its path being committed."""
        number = next(i for i, end in enumerate(self.batch.first_rows[1:]) if row < end)
        group, on = self.batch.groups[number], self.batch.on(CPU)
        behind = slice(int(on.tail_begin[row]), int(on.tail_begin[row + 1]))
        run = int(on.run_length[row])
        begin = int(on.run_begin[row])
        seen = [*range(begin, begin + run), *on.tail_slots[behind].tolist()]
        single = RowGroup(group.slots[: len(seen)], len(seen) - 1, [0], [0])
        others = random_groups(1, number, len(group.slots) - MOST_ROWS)[:1]
        lone = Layer.random(self.case, 99, [*others, single], self.device)
        for mine, theirs in zip(lone.pool.tensors, self.pool.tensors, strict=True):
            mine[group.slots[0] : group.slots[0] + len(seen)] = theirs[seen]
        own = lone.batch.first_rows[len(others)]
        lone.query[own], lone.key[own], lone.value[own] = self.query[row], self.key[row], self.value[row]
        lone.sinks = self.sinks
        return lone.by_kernels()[own]
