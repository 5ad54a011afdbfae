"""A cache in pages, and PyTorch attention over it: a backend that nothing else of the package knows.

It shows that the layout of the cache can be another without a change elsewhere, and finds code that takes slots for
contiguous: a sequence's pages are drawn at random. `attention_backend="slipstream.testing.paged:PagedBackend"` uses it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from slipstream.kv.pool import KVPool
from slipstream.kv.prefix import BLOCK, PrefixIndex
from slipstream.kv.slots import Held, Move, SlotAccounting
from slipstream.models.attention.base import AttentionBackend, AttentionPass, Variant
from slipstream.models.attention.masks import Masks
from slipstream.models.attention.packed import attend
from slipstream.models.batch import ForwardBatch

PAGE = 8
"""Slots of a page."""


@dataclass(eq=False, slots=True)
class Table:
    """The pages of one sequence, in the order of its tokens. Tables may share a page that none of them writes to."""

    tenant: str
    pages: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    keys: list[int] = field(default_factory=list)

    def slots(self) -> list[int]:
        return [page * PAGE + offset for page in self.pages for offset in range(PAGE)]


class PagedAccounting(SlotAccounting):
    """Every owner has a table of pages. A prefix is shared until somebody writes to its last page."""

    unit: ClassVar[int] = PAGE

    def __init__(self, num_slots: int, move: Move, prefix_caching: bool = True) -> None:
        super().__init__(num_slots, move, prefix_caching)
        self._free = list(range(num_slots // PAGE))
        random.Random(0).shuffle(self._free)
        self._num_holders: Counter[int] = Counter()
        """Page to how many tables hold it."""
        self._tables: dict[int, Table] = {}
        self._retained: list[Table] = []
        """The least recently used one first."""
        self._index: PrefixIndex[Table] = PrefixIndex()

    @property
    def num_owners(self) -> int:
        return len(self._tables)

    @property
    def num_held(self) -> int:
        return PAGE * len({page for table in self._tables.values() for page in table.pages})

    @property
    def num_retained(self) -> int:
        return PAGE * len({page for table in self._retained for page in table.pages})

    def __contains__(self, owner: int) -> bool:
        return owner in self._tables

    def slots(self, owner: int) -> list[int]:
        return self._tables[owner].slots()

    def token_ids(self, owner: int) -> Sequence[int]:
        return self._tables[owner].token_ids

    def open(self, owner: int, token_ids: Sequence[int], tenant: str = "", reuse: bool = True) -> int | None:
        table = Table(tenant)
        if reuse and self._prefix_caching:
            source, common = self._index.longest(token_ids, tenant)
            common = min(common, len(token_ids) - 1)
            if source is not None:
                table.token_ids = list(token_ids[:common])
                table.pages = source.pages[: -(-common // PAGE)]
                self._num_holders.update(table.pages)
        self._tables[owner] = table
        self._index_tokens(table)
        if not self.reserve(owner, len(token_ids) + 1):
            self.close(owner, retain=False)
            return None
        return len(table.token_ids)

    def reserve(self, owner: int, num_tokens: int) -> bool:
        table = self._tables[owner]
        num_pages = -(-num_tokens // PAGE)
        first = len(table.token_ids) // PAGE  # of the pages that will be written to
        while True:
            shared = [
                place for place in range(first, len(table.pages)) if self._num_holders[table.pages[place]] > 1
            ]
            missing = max(num_pages - len(table.pages), 0)
            if len(self._free) >= missing + len(shared):
                break
            if not self._retained:
                return False
            self._drop(self._retained.pop(0))
        for place in shared:
            page = self._take()
            self._move(table.pages[place] * PAGE, page * PAGE, PAGE)
            self._give_back(table.pages[place])
            table.pages[place] = page
        table.pages.extend(self._take() for _ in range(missing))
        return True

    def commit(self, owner: int, token_ids: Sequence[int]) -> None:
        table = self._tables[owner]
        table.token_ids.extend(token_ids)
        if len(table.token_ids) > PAGE * len(table.pages):
            raise AssertionError(f"sequence {owner} committed beyond its {len(table.pages)} pages")
        self._index_tokens(table)

    def truncate(self, owner: int, num_tokens: int) -> None:
        table = self._tables[owner]
        self._index.truncate(table, num_tokens)
        del table.token_ids[num_tokens:]

    def close(self, owner: int, retain: bool = True) -> None:
        table = self._tables.pop(owner)
        if retain and self._prefix_caching and len(table.token_ids) >= BLOCK:
            self._retained.append(table)
        else:
            self._drop(table)

    def clear(self) -> None:
        while self._retained:
            self._drop(self._retained.pop())

    def contents(self) -> Iterator[Held]:
        for table in (*self._tables.values(), *self._retained):
            yield Held(table.tenant, table.token_ids, table.slots()[: len(table.token_ids)])

    def integrity(self) -> list[str]:
        tables = [*self._tables.values(), *self._retained]
        overfull = (table for table in tables if len(table.token_ids) > PAGE * len(table.pages))
        faults = [f"a table holds more tokens than slots: {table}" for table in overfull]
        holders = Counter(page for table in tables for page in table.pages)
        if holders != +self._num_holders:
            faults.append("pages are held by more or fewer tables than was counted")
        if sorted([*self._free, *holders]) != list(range(self.num_slots // PAGE)):
            faults.append("a page is lost, or free and held")
        if any(table not in tables for _, table in self._index.entries()):
            faults.append("the prefix index names a table that is gone")
        return faults

    def _index_tokens(self, table: Table) -> None:
        if self._prefix_caching:
            self._index.extend(table)

    def _take(self) -> int:
        page = self._free.pop()
        self._num_holders[page] = 1
        return page

    def _give_back(self, page: int) -> None:
        self._num_holders[page] -= 1
        if not self._num_holders[page]:
            self._free.insert(0, page)

    def _drop(self, table: Table) -> None:
        self._index.truncate(table, 0)
        for page in table.pages:
            self._give_back(page)


class PagedPass(AttentionPass):
    """Gathers each sequence's pages, then attends as for contiguous entries."""

    def __init__(self, rows: ForwardBatch, pool: KVPool) -> None:
        self._rows = rows
        self._pool = pool
        device = pool.features.device
        self._new = rows.on(device).slots
        self._masks = Masks(rows, device)
        self._entries = [
            torch.tensor(group.slots[: group.num_entries], device=device) for group in rows.groups
        ]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, variant: Variant) -> Tensor:
        self._pool.write(layer, self._new, key[0], value[0])
        outputs: list[Tensor] = []
        for number, entries in enumerate(self._entries):
            skipped, visible = self._masks.of_group(number, variant.reach, query.shape[1] // key.shape[1])
            own = slice(self._rows.first_rows[number], self._rows.first_rows[number + 1])
            keys, values = self._pool.read(layer, entries[skipped:])
            outputs.append(
                attend(
                    query[0, :, own],
                    keys,
                    values,
                    visible,
                    variant,
                )
            )
        return torch.cat(outputs, dim=1).transpose(0, 1)[None].contiguous()


class PagedBackend(AttentionBackend):
    """PyTorch's attention over pages that are drawn at random."""

    layout: ClassVar[type[SlotAccounting]] = PagedAccounting

    def prepare(self, rows: ForwardBatch, pool: KVPool) -> PagedPass:
        return PagedPass(rows, pool)
