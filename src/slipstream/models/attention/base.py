"""What an attention backend is: how the rows of a pass attend over the cache, and which slots the cache gives out.

A backend is one class in one file. It is found by name (`slipstream.models.attention.registry`) and chosen when a model
is loaded. In a pass `Rows` are made from the row groups, `prepare` is called once, and the model calls `attend` in
every layer. A backend that needs another layout of the cache names it as `layout`; nothing else has to know.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from slipstream.kv.pool import KVPool
from slipstream.kv.segments import SegmentAccounting
from slipstream.kv.slots import SlotAccounting
from slipstream.models.attention.own_cache import asks_a_cache
from slipstream.models.rows import Rows

if TYPE_CHECKING:
    from slipstream.models.attention.probe import LayerProbe
    from slipstream.models.cpu.decoder import Decoder
    from slipstream.models.cpu.layer_trial import LayerTrial
    from slipstream.models.linear.formats import WeightFormat

ATTENTION_NAME = "slipstream"
"""The attention that Transformers models are loaded with; see `hook`."""


@dataclass(frozen=True, slots=True)
class Variant:
    """How a layer's attention departs from softmax(q·k)·v over all earlier positions."""

    scaling: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    """[heads]: one logit a head that takes part in the softmax and carries no value."""


@dataclass(frozen=True, slots=True)
class ModelTraits:
    """What the choice of a backend depends on."""

    config: Any
    """The Transformers configuration."""
    device: torch.device
    dtype: torch.dtype
    native: bool
    """Whether the native CPU kernels may be used."""


@dataclass(frozen=True, slots=True)
class PassOutput:
    """What the model computed in one pass."""

    logits: Tensor
    """[wanted rows, vocab]"""
    hidden: dict[int, Tensor]
    """Layer index (0 is the embedding) to [all rows, width]."""


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


Run = Callable[[Rows, AttentionPass], PassOutput]
"""Computes these rows in the model, with this attention. It reads tokens, positions and wanted rows by `Rows.on`: those
tensors are what a recording reads again, so a replay writes its own rows there."""


class AttentionBackend(ABC):
    """How a model attends over the cache. An instance belongs to one model; engines in several threads may share it."""

    attn_implementation: ClassVar[str] = ATTENTION_NAME
    """What the Transformers model is loaded with."""
    layout: ClassVar[type[SlotAccounting]] = SegmentAccounting
    """Which slots sequences get in a cache that this backend reads."""
    takes_over: ClassVar[bool] = False
    """Whether `take_over` returns a decoder for every model that is no misfit."""
    can_capture: ClassVar[bool] = False
    """Whether passes can be recorded and replayed, by `capture` and `replay`. Without it every pass runs eagerly."""

    def __init__(self, traits: ModelTraits) -> None:
        self.traits = traits

    @classmethod
    def refusal(cls, traits: ModelTraits) -> str | None:
        """Why this backend cannot run such a model, in one line that continues "because"; None where it can.

        Unless overridden, models whose attention does not go through the attention interface are refused.
        """
        if asks_a_cache(traits.config):
            return "its attention asks a cache for its keys, not the attention interface"
        return None

    @abstractmethod
    def prepare(self, rows: Rows, pool: KVPool) -> AttentionPass:
        """Once a pass, before any layer runs."""

    def probe_arguments(self, probe: LayerProbe) -> dict[str, Any]:
        """As `AttentionPass.arguments`, with a probe that records what each layer does in the pass's place."""
        return {"slipstream_pass": probe}

    def misfit(self, model: Any, variants: Sequence[Variant], fmt: WeightFormat) -> str | None:
        """As `refusal`, once the model was probed. `variants` says how each layer attends."""
        return None

    def layer_trial(self, model: Any, variants: Sequence[Variant]) -> LayerTrial | None:
        """What tries single layers out as `take_over` will compute them; None for a backend that takes nothing over.

        For a model that is no misfit.
        """
        return None

    def take_over(self, model: Any, variants: Sequence[Variant], fmt: WeightFormat) -> Decoder | None:
        """What computes whole passes in the Transformers model's place; None where the model runs itself.

        Called once, for a model that is no misfit.
        """
        return None

    def replay(self, rows: Rows, pool: KVPool, hidden_layers: Sequence[int]) -> PassOutput | None:
        """The pass, from a recording of one of the same shape; None where there is none."""
        raise NotImplementedError(f"{type(self).__name__} says that it can capture, but has no replay")

    def capture(self, rows: Rows, pool: KVPool, hidden_layers: Sequence[int], run: Run) -> PassOutput:
        """The pass, by `run`, recorded for `replay` if that is worth it.

        `run` may be given other rows than `rows`, padded to a size that many passes share, say. What is returned is
        that of `rows` alone.
        """
        raise NotImplementedError(f"{type(self).__name__} says that it can capture, but has no capture")
