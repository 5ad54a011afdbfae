"""A decoder-only Transformers model that runs packed rows over Slipstream's cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from slipstream.kv.pool import KVPool, LayerShape, bytes_per_token
from slipstream.models.attention.gpu import attention_kernels
from slipstream.models.attention.packed import LayerProbe
from slipstream.models.cpu.decoder import Decoder
from slipstream.models.cpu.native import instructions
from slipstream.models.layers import LayerStack, layer_stack
from slipstream.models.linear.formats import UNCHANGED, WeightFormat, checked_format
from slipstream.models.linear.layers import NativeLinear
from slipstream.models.linear.packing import pack_linears, packed_bytes
from slipstream.models.rows import Batch, RowGroup


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """What a forward pass yields for the rows that were asked for, group after group."""

    logits: Tensor
    """[wanted rows, vocab]"""
    hidden: dict[int, Tensor]
    """Layer index (0 is the embedding) to [all rows, width]; only the layers that were asked for."""


class Route(Protocol):
    """How a model is made to use our cache; chosen once, when the model is loaded."""

    attn_implementation: str

    def arguments(self, batch: Batch) -> dict[str, Any]:
        """Keyword arguments of the model's forward that carry the batch."""

    def probe_arguments(self, probe: LayerProbe) -> dict[str, Any]:
        """The same, with a probe in the batch's place."""


class CausalLM:
    """A loaded model, its shapes and limits. Make one with `slipstream.models.load_model`."""

    def __init__(
        self,
        model: Any,
        path: str,
        route: Route,
        shapes: Sequence[LayerShape],
        vocab_size: int,
        context_length: int,
        weight_format: WeightFormat,
    ) -> None:
        self.model = model
        self.path = path
        self.route = route
        self.config = model.config
        self.shapes = tuple(shapes)
        self.vocab_size = vocab_size
        self.context_length = context_length
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters())
        self.weight_format = weight_format
        self.decoder: Decoder | None = None
        """Computes the passes in the Transformers model's place, and holds its weights, where it can."""
        self._layer_stack: LayerStack | None = None

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states."""
        return int(self.config.hidden_size)

    @property
    def num_layers(self) -> int:
        return int(self.config.num_hidden_layers)

    @property
    def family(self) -> str:
        return str(self.config.model_type)

    @property
    def quantization(self) -> str | None:
        """The name of the weight format; None where the weights are the checkpoint's."""
        return None if self.weight_format.name == UNCHANGED else self.weight_format.name

    @property
    def kernels(self) -> str:
        """What computes: `decoder` for whole passes in our kernels, `native` for linear layers in them, `torch`."""
        if self.decoder is not None:
            return "decoder"
        return "native" if any(isinstance(part, NativeLinear) for part in self.model.modules()) else "torch"

    @property
    def runs_as(self) -> str:
        """As messages say it: 'int8 weights, float32 on cpu, own kernels (AVX-512 VNNI)'."""
        weights = "" if self.quantization is None else f"{self.quantization} weights, "
        kernels = "PyTorch's kernels" if self.kernels == "torch" else f"own kernels ({instructions()})"
        return f"{weights}{str(self.dtype).removeprefix('torch.')} on {self.device}, {kernels}"

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights as they are held."""
        if self.decoder is not None:
            return self.decoder.nbytes
        return packed_bytes(self.model) + sum(int(parameter.nbytes) for parameter in self.model.parameters())

    @property
    def kv_bytes_per_token(self) -> int:
        return bytes_per_token(self.shapes, self.dtype)

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
        if self.decoder is not None:
            return ForwardOutput(*self.decoder.forward(groups, pool, hidden_layers, layers))
        if layers is not None and self._layer_stack is not None:
            with self._layer_stack.only(layers):
                return self._forward(groups, pool)
        return self._forward(groups, pool, hidden_layers)

    def check_layers(self) -> None:
        """Raise `ConfigError` where this model cannot run some of its layers alone."""
        if self.decoder is None and self._layer_stack is None:
            self._layer_stack = layer_stack(self)

    def pack_beside(self, module: nn.Module, quantization: str | None) -> None:
        """Pack the linear layers of a head that runs beside this model, for the same kernels.

        None takes this model's weight format. Raises `ConfigError` where the format cannot be used.
        """
        fmt = checked_format(quantization or self.quantization, self.device, self.dtype)
        native = self.kernels != "torch"
        if native or fmt.name != UNCHANGED:
            pack_linears(module, fmt, native)

    def _forward(
        self, groups: Sequence[RowGroup], pool: KVPool, hidden_layers: Sequence[int] = ()
    ) -> ForwardOutput:
        """The pass in the Transformers model."""
        batch = Batch(groups, pool, self.device)
        with attention_kernels(self.device):
            output = self.model(
                input_ids=batch.input_ids(),
                position_ids=batch.position_ids(),
                use_cache=False,
                logits_to_keep=batch.logit_rows(),
                output_hidden_states=list(hidden_layers) or False,
                **self.route.arguments(batch),
            )
        hidden = {layer: output.hidden_states[layer][0] for layer in hidden_layers}
        return ForwardOutput(output.logits[0], hidden)

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
