"""Random trees of a pass with the tokens that the target chose, and what the host makes of them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipstream.core.proposal import Proposal, Verdict
from slipstream.kv.pool import KVPool, LayerShape
from slipstream.models.batch import ForwardBatch
from slipstream.models.executor.choices import OwnTokens, PassVerdicts, TokenChoices
from slipstream.models.rows import RowGroup, tree_rows
from slipstream.sampling.params import SamplingParams
from slipstream.verify.coupled import walk

CPU = torch.device("cpu")
ROOM = 64
"""Slots of a sequence."""
MOVING = [2, 10, 11, 36]
"""Seeds of three trees of which some entries move, in the first to places that others have left."""
POOLS: dict[str, dict[str, Any]] = {
    "float32": {"dim": 24},
    "bfloat16": {"dim": 160, "dtype": torch.bfloat16},
    "int8": {"dim": 24, "cache_dtype": torch.int8},
    "odd int8": {"dim": 7, "cache_dtype": torch.int8},
    "features": {"dim": 16, "feature_width": 150},
}


def random_tree(generator: random.Random, num_nodes: int) -> Proposal:
    """Of few different tokens, so that walks go deep and siblings may have the same."""
    parents = tuple(
        node - 1 if generator.random() < 0.5 else generator.randrange(-1, node) for node in range(num_nodes)
    )
    return Proposal(tuple(generator.randrange(2) for _ in range(num_nodes)), parents)


@dataclass
class Trees:
    """The trees of a pass, each but some behind a prompt whose logits are wanted too."""

    proposals: list[Proposal]
    chosen: list[list[int]]
    roots: list[int]
    """The wanted row of each root."""
    batch: ForwardBatch
    choices: TokenChoices
    num_wanted: int

    @classmethod
    def random(cls, seed: int, num_trees: int = 5) -> Trees:
        """Prompts, trees and chains; in some rows nothing was chosen."""
        generator = random.Random(seed)
        proposals, chosen, roots, groups, choices = [], [], [], list[RowGroup](), TokenChoices()
        for number in range(num_trees):
            tree = random_tree(generator, generator.choice([0, 1, 4, 9, 12]))
            if generator.random() < 0.3:
                tree = Proposal.chain(tree.token_ids)
            num_tokens = generator.choice([1, 1, 3])
            first_logit = generator.choice([0, num_tokens - 1])
            slots = range(number * ROOM, (number + 1) * ROOM)
            groups.append(tree_rows(slots, generator.randrange(40), [7] * num_tokens, tree, first_logit))
            if generator.random() < 0.2:
                choices.skip(len(groups[-1].logit_rows))
                continue
            choices.skip(num_tokens - 1 - first_logit)
            roots.append(len(choices.keys))
            choices.add(OwnTokens([0] * (1 + len(tree)), SamplingParams()), tree)
            proposals.append(tree)
            chosen.append(generator.choices([0, 1, 2, -1], [10, 10, 2, 1], k=1 + len(tree)))
        batch = ForwardBatch(groups)
        return cls(proposals, chosen, roots, batch, choices, batch.num_logit_rows + 3)

    @property
    def num_slots(self) -> int:
        return ROOM * len(self.batch.groups)

    @property
    def logit_rows(self) -> Tensor:
        own = self.batch.on(CPU).logit_rows
        return torch.cat([own, own.new_zeros(self.num_wanted - len(own))])

    @property
    def slots(self) -> Tensor:
        return self.batch.on(CPU).slots

    @property
    def arrays(self) -> list[Tensor]:
        """What the walk reads."""
        tokens = torch.full((self.num_wanted,), 1)
        for root, chosen in zip(self.roots, self.chosen, strict=True):
            tokens[root : root + len(chosen)] = torch.tensor(chosen)
        on, table = self.batch.on(CPU), torch.from_numpy(self.choices.table(self.num_wanted))
        return [tokens, on.token_ids, self.logit_rows, on.positions, *table[2:4]]

    def expected(self) -> list[Verdict | None]:
        """What the host says: nothing of a walk that ends where nothing was chosen."""
        verdicts = [walk(*each) for each in zip(self.proposals, self.chosen, strict=True)]
        return [None if verdict.next_token < 0 else verdict for verdict in verdicts]

    def check(self, packed: Tensor) -> None:
        """That a pass's verdicts are the host's."""
        verdicts = PassVerdicts.of(packed.flatten().tolist())
        assert [verdicts.verdict(root) for root in self.roots] == self.expected()
        for root, chosen, expected in zip(self.roots, self.chosen, self.expected(), strict=True):
            assert verdicts.tokens[root : root + len(chosen)] == chosen
            if expected is not None:
                own = self.batch.on(CPU).positions[self.logit_rows[root]]
                assert int(packed[2, root]) == int(own) + 1 + len(expected.accepted)
        others = set(range(self.num_wanted)) - set(self.roots)
        assert not packed[0, sorted(others)].any()

    def gather(self, pool: KVPool) -> None:
        """Move the entries as the host does."""
        for root, verdict in zip(self.roots, self.expected(), strict=True):
            if verdict is not None:
                row = int(self.logit_rows[root])
                group = next(i for i, end in enumerate(self.batch.first_rows[1:]) if row < end)
                own = self.batch.groups[group]
                first = own.num_past + row - self.batch.first_rows[group] + 1
                pool.gather(own.slots, first, verdict.accepted)


def random_pool(kind: str, num_slots: int) -> KVPool:
    """A pool of layers of two sizes with random contents, the same ones for the same arguments."""
    options = dict(POOLS[kind])
    dim, dtype = options.pop("dim"), options.pop("dtype", torch.float32)
    shapes = [LayerShape(2, dim, dim), LayerShape(2, dim, dim), LayerShape(1, dim, 2 * dim)]
    pool = KVPool(shapes, num_slots, dtype, CPU, **options)
    generator = torch.Generator().manual_seed(3)
    for tensor in pool.tensors:
        tensor.copy_(torch.randint(-100, 100, tensor.shape, generator=generator))
    return pool
