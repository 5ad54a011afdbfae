"""What an attention backend is: how the rows of a pass attend over the cache, and which slots the cache gives out.

A backend is one class in one file. It is found by name (`slipstream.models.attention.registry`) and chosen when a model
is loaded. In a pass a `ForwardBatch` is made of the row groups, `prepare` is called once, and the model calls
`attend` once a layer. A backend that needs another layout of the cache names it as `layout`, and nothing else
has to know.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor

from slipstream.kv.pool import KVPool, LayerShape
from slipstream.kv.segments import SegmentAccounting
from slipstream.kv.slots import SlotAccounting
from slipstream.kv.state import StateShape
from slipstream.models.attention.own_cache import asks_a_cache
from slipstream.models.batch import ForwardBatch
from slipstream.models.linear.formats import WeightFormat
from slipstream.models.mixers.latent import LatentHeads

ATTENTION_NAME = "slipstream"
"""The attention that Transformers models are loaded with; see `hook`."""


class NoMask:
    """Stands for a mask where a layer's code reads one that nothing depends on."""

    def __getitem__(self, _: Any) -> NoMask:
        return self


NO_MASK = NoMask()

Selected = Sequence[Tensor | None]
"""Of each group of rows which entries an indexer has chosen, bool [rows, entries]; None: all that a row may see."""


class PositionBias(Protocol):
    """What a layer adds to the logits of attention: it depends on the head, and on the distance of two tokens."""

    counts_tokens: bool
    """Whether Transformers counts the tokens between two for it, whatever positions they are given."""

    def __call__(self, distance: Tensor) -> Tensor:
        """int64 [rows, entries], how far an entry lies behind a row, at least 0 -> [heads, rows, entries]."""


@dataclass(frozen=True, slots=True)
class Variant:
    """How a layer's attention departs from softmax(q·k)·v over all earlier positions."""

    scaling: float
    sliding_window: int | None = None
    chunk: int | None = None
    """A row sees those since the last multiple of this position, its own included."""
    softcap: float | None = None
    sinks: Tensor | None = None
    """[heads]: one logit a head that takes part in the softmax and carries no value."""
    values_in_keys: bool = False
    """Whether a value is the first numbers of its key, and only the key is stored."""
    bias: PositionBias | None = None
    """What is added to the scaled products, by how far behind a row an entry lies."""
    selected: Selected | None = None
    """What rows attend to, where an indexer chooses."""

    @property
    def reach(self) -> int:
        """How far back a row sees, as kernels have it: so many positions, 0 for all, a chunk's size below 0."""
        return self.sliding_window or -(self.chunk or 0)


Position = TypeVar("Position", int, Tensor)


def first_seen(position: Position, reach: int) -> Position:
    """The first position that a row at this one sees, or one before the text's first; see `Variant.reach`."""
    if reach > 0:
        return position - reach + 1
    return position - position % -reach if reach else position * 0


@dataclass(frozen=True, slots=True)
class ModelTraits:
    """What the choice of a backend depends on."""

    config: Any
    """The Transformers configuration."""
    device: torch.device
    dtype: torch.dtype
    native: bool
    """Whether the native CPU kernels may be used."""
    fuses: bool = True
    """Whether they may compute whole passes."""


class LayerProbe:
    """Replaces a pass while a model is tried out: records what each layer would store, how it attends, and its mask."""

    def __init__(self) -> None:
        self.shapes: dict[int, LayerShape] = {}
        self.indexers: dict[Any, int] = {}
        """Modules that choose what rows attend to, and the numbers that each keeps of a token."""
        self.masks: dict[int, tuple[Variant, Tensor | None]] = {}
        self._entries: list[tuple[int, Tensor, Tensor]] = []

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, variant: Variant, mask: Tensor | None
    ) -> Tensor:
        """As `AttentionPass.attend`, with the layer's mask; the answer is all zeros."""
        self.record(layer, key, value, variant.values_in_keys)
        self.masks[layer] = (variant, mask)
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])

    def attend_across(self, layer: int, query: Tensor, scaling: float) -> Tensor:
        """As `AttentionPass.attend_across`; the answer is all zeros."""
        return query.new_zeros(1, query.shape[2], query.shape[1], query.shape[3])

    def record(self, layer: int, key: Tensor, value: Tensor, values_in_keys: bool = False) -> None:
        """key/value [1, kv_heads, N, dim], as they would be stored.

        A layer that is given the very tensors of an earlier one stores nothing: it reads that one's entries.
        """
        same = (number for number, *known in self._entries if known[0] is key and known[1] is value)
        source = next(same, None)
        self.shapes[layer] = LayerShape(key.shape[1], key.shape[3], value.shape[3], source, values_in_keys)
        self._entries.append((layer, key, value))


@dataclass(frozen=True, slots=True)
class Probed:
    """What a pass over two rows tells of a model."""

    shapes: list[LayerShape]
    """What each layer stores for a token."""
    variants: list[Variant]
    """How each layer attends; empty for a model that does not attend through the hook."""
    vocab_size: int
    called: frozenset[str]
    """The names of the linear layers that it called, but for those whose weight other code reads."""
    states: list[StateShape] = field(default_factory=list)
    """What its recurrent layers keep of a sequence."""
    encoded_shapes: tuple[LayerShape, ...] = ()
    """What each layer keeps of a position of an encoder's output; empty for a model without an encoder."""

    @property
    def has_biases(self) -> bool:
        """Whether a layer adds what depends on how far behind a row an entry lies."""
        return any(variant.bias is not None for variant in self.variants)


class AttentionPass(ABC):
    """One pass's attention, over the rows and the pool that it was prepared for."""

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of the Transformers model's forward that lead every layer's attention here."""
        return {"slipstream_pass": self}

    @abstractmethod
    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, variant: Variant) -> Tensor:
        """Store the rows' keys and values, then attend: called once a layer.

        query [1, heads, N, key_dim], key/value [1, kv_heads, N, dim] -> [1, N, heads, value_dim].
        """

    def attend_to_latents(
        self, layer: int, heads: LatentHeads, query: Tensor, key: Tensor, value: Tensor, variant: Variant
    ) -> Tensor:
        """As `attend`, where key and value are latents (`LatentHeads.expand_kv`) and the query is the layer's own."""
        return heads.expand(self.attend(layer, heads.absorb(query), key, value, variant))

    def select(
        self, entries: int, choose: Callable[[slice, Tensor, Callable[[Tensor], Tensor]], Tensor | None]
    ) -> Selected:
        """What `choose` says for each group of rows.

        It is given which rows these are, what each may see, bool [rows, entries], and a function that keeps the rows'
        index keys [rows, dim] and returns those of all entries. They lie in the cache as layer number `entries`.
        """
        raise ValueError("its attention backend does not attend to what an indexer chooses")

    def attend_across(self, layer: int, query: Tensor, scaling: float) -> Tensor:
        """Attend over what an encoder has made of the input of each row's sequence, `KVPool.encoded`.

        query [1, heads, N, key_dim] -> [1, N, heads, value_dim]. By default a pass has no such entries.
        """
        raise ValueError("its attention backend does not attend to an encoder's output")


class AttentionBackend(ABC):
    """How a model attends over the cache. An instance belongs to one model; engines in several threads may share it."""

    attn_implementation: str = ATTENTION_NAME
    """What the Transformers model is loaded with."""
    layout: ClassVar[type[SlotAccounting]] = SegmentAccounting
    """Which slots sequences get in a cache that this backend reads."""
    in_kernels: ClassVar[bool] = False
    """Whether the CPU kernels attend, layer by layer."""
    executor: ClassVar[str] = "eager"
    """The name of the executor that attends in this way, where no other is chosen."""

    def __init__(self, traits: ModelTraits) -> None:
        self.traits = traits

    @classmethod
    def refusal(cls, traits: ModelTraits) -> str | None:
        """Why this backend cannot run such a model, in one line that continues "because"; None where it can.

        Unless overridden, models whose attention does not go through the attention interface are refused.
        """
        if asks_a_cache(traits.config):
            return "its attention reads keys from a cache, not the attention interface"
        return None

    @property
    def holds_latents(self) -> bool:
        """Whether its passes attend where values are in the keys (`Variant`); else the cache has every head's."""
        return False

    @abstractmethod
    def prepare(self, rows: ForwardBatch, pool: KVPool) -> AttentionPass:
        """Once a pass, before any layer runs."""

    def probe_arguments(self, probe: LayerProbe) -> dict[str, Any]:
        """As `AttentionPass.arguments`, with a probe that records what each layer does in the pass's place."""
        return {"slipstream_pass": probe}

    def misfit(self, model: Any, variants: Sequence[Variant], fmt: WeightFormat) -> str | None:
        """As `refusal`, once the model was probed. `variants` says how each layer attends."""
        return None
