"""A decoder-only Transformers model that runs packed rows over Slipstream's cache."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.kv.cache import KVCache
from slipstream.kv.pool import KVPool, LayerShape
from slipstream.kv.slots import SlotMap
from slipstream.models.attention.base import AttentionBackend, AttentionPass, PassOutput
from slipstream.models.attention.gpu import without_cudnn
from slipstream.models.cpu import threads
from slipstream.models.cpu.decoder import Decoder
from slipstream.models.cpu.experts import file_stacks
from slipstream.models.files.stored import KeptWeights, quantised_layers
from slipstream.models.identity import ModelIdentity
from slipstream.models.layers import LayerStack, layer_stack
from slipstream.models.linear.formats import UNCHANGED, WeightFormat, checked_format
from slipstream.models.linear.layers import NativeLinear
from slipstream.models.linear.packing import pack_linears, packed_bytes
from slipstream.models.rows import RowGroup, Rows
from slipstream.models.trial import NUM_TRIAL_ROWS


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """What a forward pass yields for the rows that were asked for, group after group."""

    logits: Tensor
    """[wanted rows, vocab]"""
    hidden: dict[int, Tensor]
    """Layer index (0 is the embedding) to [all rows, width]; only the layers that were asked for."""
    rows: Rows
    """The rows that were computed."""


class CausalLM(ModelIdentity):
    """A loaded model, its shapes and limits. Make one with `slipstream.models.load_model`."""

    def __init__(
        self,
        model: Any,
        path: str,
        backend: AttentionBackend,
        shapes: Sequence[LayerShape],
        vocab_size: int,
        context_length: int,
        weight_format: WeightFormat,
        dtype: torch.dtype,
        stored_as: str = "",
    ) -> None:
        self.model = model
        self.path = path
        self.backend = backend
        self.config = model.config
        self.shapes = tuple(shapes)
        self.vocab_size = vocab_size
        self.context_length = context_length
        self.dtype = dtype
        self.cache_dtype = self.dtype
        self.fast_prompts = False
        """Where true, `RowGroup.num_fast` says of each pass for which rows."""
        self.device: torch.device = model.device
        quantised = quantised_layers(model)
        self.kept = KeptWeights.of(model)
        """Those that are held as a file had them."""
        self._num_parameters: int = (
            sum(parameter.numel() for parameter in model.parameters())
            + self.kept.num_weights
            + sum(stack.numel() for stack in file_stacks(model))
        )
        self.unpacked_bytes = sum(int(parameter.nbytes) for parameter in model.parameters())
        """Of the weights as they were read, but for those that files hold quantised."""
        self.stored_bits = frozenset(part.bits for part in quantised)
        """Of the codes of weights that are held as a file had them, quantised; empty where there are none."""
        self.stored_as = stored_as
        self.weight_format = weight_format
        self.was_compared = False
        """Whether its layers or logits were compared with Transformers' when it was loaded."""
        self.decoder: Decoder | None = None
        """Computes the passes in the Transformers model's place, and holds its weights, where it can."""
        self.num_threads = threads.available()
        self._layer_stack: LayerStack | None = None
        self._lock = threading.RLock()
        """Held for every pass in the Transformers model: one over some layers changes the model while it runs."""

    @property
    def kernels(self) -> str:
        """What computes: `decoder` for whole passes in our kernels, `native` for linear layers in them, `torch`."""
        if self.decoder is not None:
            return "decoder"
        return "native" if any(isinstance(part, NativeLinear) for part in self.model.modules()) else "torch"

    @property
    def num_parameters(self) -> int:
        return self._num_parameters

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights as they are held."""
        if self.decoder is not None:
            return self.decoder.nbytes
        changes = [part.change for part in quantised_layers(self.model)]
        apart = sum(change.nbytes for change in changes if change is not None)
        plain = sum(int(parameter.nbytes) for parameter in self.model.parameters())
        return packed_bytes(self.model) + plain + apart

    def num_fast_tokens(self, num_prompt_tokens: int) -> int:
        """How many leading tokens of a text with such a prompt are computed in the arithmetic of `fast_prompts`."""
        return max(num_prompt_tokens - 1, 0) if self.fast_prompts else 0

    def new_cache(
        self,
        num_slots: int,
        *,
        prefix_caching: bool = True,
        feature_width: int = 0,
        cache_dtype: torch.dtype | None = None,
    ) -> KVCache:
        """A cache for this model's keys and values, in the layout that its attention reads.

        `feature_width` numbers are kept of each token beside them. Keys and values are held in `cache_dtype`, None: in
        the model's own.
        """
        return KVCache(
            self.shapes,
            num_slots,
            self.dtype,
            self.device,
            prefix_caching,
            feature_width,
            self.backend.layout,
            self.cache_dtype if cache_dtype is None else cache_dtype,
        )

    def trial_cache(self, num_tokens: int, cache_dtype: torch.dtype | None = None) -> tuple[KVPool, SlotMap]:
        """A cache that holds one sequence of `num_tokens`, and its slots: for passes of nobody's request."""
        num_slots = -(-(num_tokens + 1) // self.kv_unit) * self.kv_unit
        cache = self.new_cache(num_slots, prefix_caching=False, cache_dtype=cache_dtype)
        cache.accounting.open(0, [0] * num_tokens)
        return cache.pool, cache.accounting.slots(0)

    def trial_tokens(self) -> list[int]:
        """`NUM_TRIAL_ROWS` token ids, spread over the vocabulary: the text of such passes."""
        return [row * 7919 % self.vocab_size for row in range(1, NUM_TRIAL_ROWS + 1)]

    @torch.inference_mode()
    def forward(
        self,
        groups: Sequence[RowGroup],
        pool: KVPool,
        hidden_layers: Sequence[int] = (),
        layers: Sequence[int] | None = None,
    ) -> ForwardOutput:
        """One pass over all rows of all groups; writes their keys and values to `pool`.

        `layers`, ascending and none twice, are the layers that run, in their own places of the cache; None is all of
        them. Hidden states are those of whole passes only. Raises as `check_layers` does.
        """
        if layers is not None:
            self.check_layers()
            in_order = all(a < b for a, b in pairwise([-1, *layers, self.num_layers]))
            if not in_order or not layers or hidden_layers:
                raise ValueError(
                    f"layers {list(layers)} of {self.num_layers} with taps {list(hidden_layers)}"
                )
        rows = Rows(groups)
        if self.decoder is not None:
            return ForwardOutput(*self.decoder.forward(rows, pool, hidden_layers, layers), rows)
        with self._lock, threads.operators(self.num_threads):
            if layers is None or self._layer_stack is None:
                done = self._forward(rows, pool, hidden_layers)
            else:
                with self._layer_stack.only(layers):
                    done = self._run(rows, self.backend.prepare(rows, pool))
        return ForwardOutput(done.logits, done.hidden, rows)

    def check_layers(self) -> None:
        """Raise `ConfigError` where this model cannot run some of its layers alone."""
        if self.decoder is not None:
            return
        with self._lock:
            if self._layer_stack is None:
                self._layer_stack = layer_stack(self)

    def format_beside(self, quantization: str | None) -> WeightFormat:
        """The weight format of a head that runs beside this model; None takes this model's.

        Raises `ConfigError` where the format cannot be used.
        """
        own = None if self.weight_format.name == UNCHANGED else self.weight_format.name
        return checked_format(quantization or own, self.device, self.dtype)

    def pack_beside(self, module: nn.Module, quantization: str | None) -> None:
        """Pack the linear layers of a head that runs beside this model, for the same kernels.

        None takes this model's weight format. Raises `ConfigError` where the format cannot be used.
        """
        fmt = self.format_beside(quantization)
        native = self.kernels != "torch"
        if native or fmt.name != UNCHANGED:
            pack_linears(module, fmt, native)

    def _forward(self, rows: Rows, pool: KVPool, hidden_layers: Sequence[int]) -> PassOutput:
        """A pass over all layers in the Transformers model: replayed where the backend can, else eagerly."""
        backend = self.backend
        if not backend.can_capture:
            return self._run(rows, backend.prepare(rows, pool), hidden_layers)
        replayed = backend.replay(rows, pool, hidden_layers)
        if replayed is not None:
            return replayed
        return backend.capture(
            rows, pool, hidden_layers, lambda given, attention: self._run(given, attention, hidden_layers)
        )

    def _run(self, rows: Rows, attention: AttentionPass, hidden_layers: Sequence[int] = ()) -> PassOutput:
        """The pass, computed by the Transformers model."""
        on = rows.on(self.device)
        with without_cudnn(self.device):
            output = self.model(
                input_ids=on.token_ids[None],
                position_ids=on.positions[None],
                use_cache=False,
                logits_to_keep=on.logit_rows,
                output_hidden_states=list(hidden_layers) or False,
                **attention.arguments(),
            )
        hidden = {layer: output.hidden_states[layer][0] for layer in hidden_layers}
        return PassOutput(output.logits[0], hidden)

    def embed(self, token_ids: Tensor) -> Tensor:
        """int64 [...] -> [..., hidden]: the embeddings, as the model itself reads them."""
        if self.decoder is not None:
            return self.decoder.embed(token_ids)
        embedded: Tensor = self.model.get_input_embeddings()(token_ids.to(self.device))
        return embedded

    def project(self, hidden: Tensor) -> Tensor:
        """[..., hidden] -> [..., vocab]: the model's output layer, for states behind the final norm.

        What a family does to its logits afterwards (scaling, a softcap) is not done.
        """
        if self.decoder is not None:
            return self.decoder.project(hidden)
        logits: Tensor = self.model.get_output_embeddings()(hidden)
        return logits
