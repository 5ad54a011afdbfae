"""What a model is and what it runs as: the same for one that is loaded and for one that is not."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch

from slipstream.kv.encoded import encoded_slots
from slipstream.kv.pool import LayerShape, bytes_per_token
from slipstream.kv.state import StateShape
from slipstream.models.attention.base import AttentionBackend
from slipstream.models.cpu.native import instructions
from slipstream.models.linear.formats import OF_DTYPE, UNCHANGED, WeightFormat, checked_format
from slipstream.models.support import encoder_length, text_config

if TYPE_CHECKING:
    from slipstream.models.executor.base import Executor

BESIDE_STORED = "int8"
"""The format of a head whose target's file holds its matrices quantised. No format of ours is what such a target has;
in float32 a small head would read more than half as much as the target does."""


class ModelIdentity(ABC):
    """What follows from a model's configuration, its weight format and what computes it."""

    path: str
    config: Any
    """Transformers' configuration."""
    shapes: tuple[LayerShape, ...]
    """What each layer stores for a token."""
    states: tuple[StateShape, ...] = ()
    """What its recurrent layers keep of a sequence; empty for a model without any."""
    encoded_shapes: tuple[LayerShape, ...] = ()
    """What each layer keeps of a position of an encoder's output; empty for a model without an encoder."""
    has_biases: bool = False
    """Whether attention adds what depends on how far behind a row an entry lies, which PyTorch computes."""
    vocab_size: int
    """Width of the logits."""
    context_length: int
    dtype: torch.dtype
    """In which rows, keys and values are computed."""
    cache_dtype: torch.dtype
    """How keys and values are held (`kv_cache_dtype`)."""
    device: torch.device
    backend: AttentionBackend
    weight_format: WeightFormat
    """Format of all weights that no file holds quantised."""
    stored_as: str
    """How a file holds layers that stay quantised: 'Q4_K, Q6_K'. Empty where none does."""
    num_threads: int
    """What its passes may use on a CPU."""
    fast_prompts: bool
    """Whether prompts are computed in bfloat16."""
    exact_rows: bool
    """Whether no rows are rounded to 8 bits."""
    rounds_head: bool
    """Whether its output layer may be held in 8 bits besides, to find best tokens with."""

    @property
    @abstractmethod
    def executor_type(self) -> type[Executor]:
        """The class of what computes."""

    @property
    @abstractmethod
    def kernels(self) -> str:
        """What computes, in a word for people; see `Executor.kernels`."""

    @property
    @abstractmethod
    def is_fused(self) -> bool:
        """Whether whole passes are computed in the CPU kernels."""

    @property
    @abstractmethod
    def is_native(self) -> bool:
        """Whether the CPU kernels compute the linear layers, if not whole passes."""

    @property
    @abstractmethod
    def num_parameters(self) -> int:
        """Number of all weights, those that a file holds quantised included."""

    @property
    @abstractmethod
    def weight_bytes(self) -> int:
        """Bytes of the weights as they are held."""

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states."""
        return int(text_config(self.config).hidden_size)

    @property
    def num_layers(self) -> int:
        return int(text_config(self.config).num_hidden_layers)

    @property
    def family(self) -> str:
        return str(self.config.model_type)

    @property
    def quantization(self) -> str | None:
        """The name of the weight format; None where it is one that `dtype` names."""
        return None if self.weight_format.name in OF_DTYPE.values() else self.weight_format.name

    @property
    def rounds_rows(self) -> bool:
        """Whether the CPU kernels round rows to 8 bits before they multiply them; a GPU's decoder does not."""
        if self.executor_type.decodes or self.exact_rows:
            return False
        return bool(self.stored_as) or self.weight_format.bytes_per_weight < 2

    @property
    def packs(self) -> bool:
        """Whether the linear layers have a weight format of ours: float32 rows on a device that has it."""
        return self.device.type in self.weight_format.devices and self.dtype == torch.float32

    def head_format(self, quantization: str | None) -> WeightFormat:
        """The weight format of a head that runs with this model. None takes this model's, or 8 bits where a file holds
        this model's matrices quantised and our kernels read them.

        Raises `ConfigError` where the format cannot be used.
        """
        is_own = self.weight_format.name != UNCHANGED and self.device.type in self.weight_format.devices
        own = self.weight_format.name if is_own else None
        if own is None and self.stored_as and self.is_native:
            own = BESIDE_STORED
        return checked_format(quantization or own, self.device, self.dtype)

    @property
    def weight_type(self) -> str:
        """How the weights are held: a file's quantised types, a weight format, or the type that PyTorch computes in."""
        packs = self.packs or (self.executor_type.decodes and self.weight_format.in_decoder)
        return self.stored_as or (self.weight_format.name if packs else _name(self.dtype))

    @property
    def runs_as(self) -> str:
        """As messages say it: 'int8 weights, float32 on cpu, own kernels (AVX-512 VNNI), whole passes'."""
        held = self.stored_as or self.weight_format.name
        weights = "" if held == UNCHANGED else f"{held} weights, "
        own = instructions() if self.is_native else "Triton" if self.executor_type.decodes else None
        kernels = "PyTorch's kernels" if own is None else f"own kernels ({own})"
        prompts = ", prompts in bfloat16 (fast_prompts)" if self.fast_prompts else ""
        recorded = ", recorded passes" if self.executor_type.records else ""
        passes = "" if not self.is_native else ", whole passes" if self.is_fused else ", layer by layer"
        exact = ", exact rows" if self.exact_rows else ""
        return f"{weights}{_name(self.dtype)} on {self.device}, {kernels}{passes}{recorded}{prompts}{exact}"

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of the cache a token, scales included."""
        return bytes_per_token(self.shapes, self.cache_dtype)

    @property
    def encoder_length(self) -> int:
        """The most positions of an encoder's input; 0 for a model without an encoder."""
        return encoder_length(self.config, self.context_length) if self.encoded_shapes else 0

    @property
    def encoded_bytes(self) -> int:
        """Bytes of what is kept of an encoder's output for a sequence, at most."""
        if not self.encoded_shapes:
            return 0
        return encoded_slots(self.encoder_length) * bytes_per_token(self.encoded_shapes, self.cache_dtype)

    @property
    def kv_unit(self) -> int:
        """Slots of this model's caches are given out in multiples of this many."""
        return self.backend.layout.unit


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
