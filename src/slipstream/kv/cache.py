"""A model's key and value cache: the accounting of its slots and its tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch

from slipstream.kv.checkpoints import StateAccounting
from slipstream.kv.encoded import EncodedEntries
from slipstream.kv.pool import KVPool
from slipstream.kv.segments import SegmentAccounting
from slipstream.kv.slots import SlotAccounting, SlotMap
from slipstream.kv.upload import upload


class KVCache:
    """Keys and values of many sequences in bounded memory."""

    encoded: EncodedEntries | None = None
    """What encoders have made of the sequences' inputs; None for a model without one."""

    def __init__(
        self,
        pool: KVPool,
        prefix_caching: bool = True,
        layout: type[SlotAccounting] = SegmentAccounting,
        encoded: EncodedEntries | None = None,
    ) -> None:
        """`layout` says which slots of the `pool` a sequence gets."""
        self.pool = pool
        self.encoded = pool.encoded = encoded
        self.accounting: SlotAccounting = layout(pool.num_slots, pool.move, prefix_caching)
        if pool.states is not None:
            self.accounting = StateAccounting(self.accounting, pool.states, prefix_caching)

    def commit(self, owner: int, token_ids: Sequence[int], kept: Sequence[int]) -> None:
        """Keep some of the entries that a forward pass wrote behind `owner`'s valid ones; the rest is forgotten.

        `kept[i]` is the row (0 is the first one written) that holds `token_ids[i]`; rows are gathered into place.
        """
        first = self.accounting.num_valid(owner)
        self.pool.gather(self.accounting.slots(owner), first, kept)
        if self.pool.states is not None:
            self.pool.states.gather(owner, first, kept)
        self.accounting.commit(owner, token_ids)

    def features(self, owner: int, begin: int, end: int) -> torch.Tensor:
        """[end - begin, width]: what a drafter had kept of `owner`'s computed tokens `begin` to `end`."""
        return self.pool.features[self.pool.index(self.accounting.slots(owner)[begin:end])]

    def features_at(self, slots: torch.Tensor) -> torch.Tensor:
        """[n, width]: what a drafter had kept of the tokens with entries in these slots, int64 [n] on the device."""
        return self.pool.features[slots]

    def keep_features(self, slots: SlotMap | torch.Tensor, features: torch.Tensor) -> None:
        """Keep `features` [tokens, width] with the entries in these slots."""
        self.pool.features[self.pool.index(slots)] = features

    @property
    def feature_width(self) -> int:
        """Numbers that are kept of a token in addition to its keys and values."""
        return self.pool.features.shape[1]

    def view(self, columns: Sequence[int]) -> KVCache:
        """The same cache, of whose features only `columns` are seen."""
        return _View(self, columns)

    def memory_bytes(self) -> int:
        """Bytes of the tensors, used or not."""
        return self.pool.memory_bytes() + (0 if self.encoded is None else self.encoded.pool.memory_bytes())

    def clear(self) -> None:
        """Give up everything that is retained."""
        self.accounting.clear()
        if self.encoded is not None:
            self.encoded.accounting.clear()

    def integrity(self) -> list[str]:
        """Violated invariants; empty when there are none."""
        encoded = [] if self.encoded is None else self.encoded.accounting.integrity()
        return [*self.accounting.integrity(), *(f"encoded: {fault}" for fault in encoded)]

    @property
    def num_encoded_held(self) -> int:
        """Running sequences that hold what an encoder has made of their inputs."""
        return 0 if self.encoded is None else self.encoded.accounting.num_owners

    def close_encoded(self, owner: int) -> None:
        """End `owner`'s claim to what an encoder has made of its input, if it has one."""
        if self.encoded is not None:
            self.encoded.close(owner)


class _View(KVCache):
    """Shares everything with the cache that it is a view of."""

    def __init__(self, cache: KVCache, columns: Sequence[int]) -> None:
        self.pool, self.accounting, self.encoded = cache.pool, cache.accounting, cache.encoded
        self._columns = upload(list(columns), cache.pool.features.device)

    def features(self, owner: int, begin: int, end: int) -> torch.Tensor:
        return super().features(owner, begin, end)[:, self._columns]

    def features_at(self, slots: torch.Tensor) -> torch.Tensor:
        return super().features_at(slots)[:, self._columns]

    @property
    def feature_width(self) -> int:
        return len(self._columns)


class ReadOnlyCache(KVCache):
    """Hands out copies of a cache's features and nothing else, to those who are not trusted with the cache.

    PyTorch has no read-only tensors. Code that holds one of the pool's could change what the target reads, even in the
    middle of a later step, from a thread that was given up.
    """

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache

    def features(self, owner: int, begin: int, end: int) -> torch.Tensor:
        return self._cache.features(owner, begin, end).clone()

    @property
    def feature_width(self) -> int:
        return self._cache.feature_width

    def view(self, columns: Sequence[int]) -> KVCache:
        return ReadOnlyCache(self._cache.view(columns))

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"this drafter may read features of the target's cache, but not its {name}")
