"""Passes in Transformers' own code, layer by layer, with attention over our cache through the hook."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

from torch import Tensor, nn

from slipstream.kv.pool import KVPool
from slipstream.models.attention.base import AttentionPass
from slipstream.models.attention.gpu import without_cudnn
from slipstream.models.attention.hook import leading_to
from slipstream.models.batch import ForwardBatch
from slipstream.models.cpu import threads
from slipstream.models.encoder_decoder import EncoderDecoder
from slipstream.models.executor.base import (
    Executor,
    PackedChecks,
    PassOutput,
    ProbedModel,
    ReadWeights,
)
from slipstream.models.executor.choices import TokenChoices
from slipstream.models.files.stored import quantised_layers
from slipstream.models.layers import LayerStack, tried_layers
from slipstream.models.linear.layers import NativeLinear
from slipstream.models.linear.packing import pack_linears, packed_bytes
from slipstream.models.matrices import widen_experts
from slipstream.models.support import experts_of, text_config
from slipstream.text.encoder_input import EncoderInput


class EagerExecutor(Executor):
    """Calls the Transformers model, whose linear layers are packed in the weight format."""

    name: ClassVar[str] = "eager"

    def __init__(self, given: ProbedModel, packs: bool = True) -> None:
        """`packs=False` leaves the model as it is."""
        super().__init__(given)
        self.backend = given.backend
        self.mixers = given.mixers
        self._layer_stack: LayerStack | None = None
        self._lock = threading.RLock()
        """Held for every pass: one over some layers changes the model while it runs."""
        if packs:
            if given.widens:
                widen_experts(self.model)
            pack_linears(
                self.model,
                given.weight_format,
                given.native,
                give_back=True,
                widens=given.widens,
                called=given.probed.called,
            )

    @property
    def is_native(self) -> bool:
        return any(isinstance(part, NativeLinear) for part in self.model.modules())

    @property
    def reads(self) -> ReadWeights:
        """Counted over the module tree. A packed layer knows its own size; its bias is a parameter like others."""
        share = _expert_share(self.model.config)
        number, num_bytes = 0.0, 0.0
        seen: set[int] = set()
        has_encoder = isinstance(self.model, EncoderDecoder)
        for module in self.model.modules_of_a_pass() if has_encoder else self.model.modules():
            if isinstance(module, nn.Embedding):
                continue
            packed = getattr(module, "nbytes", None)
            if isinstance(packed, int):
                number += int(module.in_features) * int(module.out_features)
                num_bytes += packed
            for parameter in module.parameters(recurse=False):
                if id(parameter) in seen:
                    continue
                seen.add(id(parameter))
                read = share if parameter.ndim == 3 else 1.0  # [experts, out, in]
                number += read * parameter.numel() if parameter.ndim > 1 else 0
                num_bytes += read * parameter.nbytes
        return ReadWeights(round(number), round(num_bytes))

    def footprint(self) -> int:
        changes = [part.change for part in quantised_layers(self.model)]
        apart = sum(change.nbytes for change in changes if change is not None)
        plain = sum(int(parameter.nbytes) for parameter in self.model.parameters())
        return packed_bytes(self.model) + plain + apart

    def forward(
        self,
        rows: ForwardBatch,
        pool: KVPool,
        hidden_layers: Sequence[int] = (),
        layers: Sequence[int] | None = None,
        choices: TokenChoices | None = None,
    ) -> PassOutput:
        with self._lock, threads.operators(self.num_threads):
            attention = self.backend.prepare(rows, pool)
            if self.mixers is not None:
                if layers is not None:
                    raise ValueError(
                        "recurrent layers run in whole passes only: they have one state of a text"
                    )
                if pool.states is None:
                    raise ValueError(
                        "a pool for recurrent layers needs states: make it with CausalLM.new_cache"
                    )
                with self.mixers.over(pool.states.begin(rows.groups), self.num_threads):
                    return self.run(rows, attention, hidden_layers)
            if layers is None:
                return self.run(rows, attention, hidden_layers)
            with self.only(layers):
                return self.run(rows, attention)

    def encode(self, given: EncoderInput) -> Sequence[tuple[Tensor, Tensor]]:
        with self._lock, threads.operators(self.num_threads):
            encoded: Sequence[tuple[Tensor, Tensor]] = self.model.encode(given)
            return encoded

    def only(self, layers: Sequence[int]) -> AbstractContextManager[None]:
        """Let passes run these layers alone within the body; the lock is held meanwhile."""
        assert self._layer_stack is not None, "check_layers comes first"
        return self._layer_stack.only(layers)

    def run(
        self,
        rows: ForwardBatch,
        attention: AttentionPass,
        hidden_layers: Sequence[int] = (),
        call: Callable[..., Any] | None = None,
    ) -> PassOutput:
        """The pass with an attention that was prepared for it; `call` is what is called instead of the model."""
        on = rows.on(self.model.device)
        given = {"input_ids": on.token_ids[None]}
        if rows.added is not None:
            given = {"inputs_embeds": (self.embed(on.token_ids) + rows.added)[None]}
        with without_cudnn(self.model.device), leading_to(attention):
            output = (call or self.model)(
                **given,
                position_ids=on.positions[None],
                use_cache=False,
                logits_to_keep=on.logit_rows,
                output_hidden_states=list(hidden_layers) or False,
                **attention.arguments(),
            )
        hidden = {layer: output.hidden_states[layer][0] for layer in hidden_layers}
        return PassOutput(output.logits[0], hidden)

    def embed(self, token_ids: Tensor) -> Tensor:
        embedded: Tensor = self.model.get_input_embeddings()(token_ids.to(self.model.device))
        return embedded

    def project(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.model.get_output_embeddings()(hidden)
        return logits

    def check_layers(self, trial: ForwardBatch, pool: KVPool) -> None:
        with self._lock:
            if self._layer_stack is None:
                self._layer_stack = tried_layers(
                    self.model, lambda: EagerExecutor.forward(self, trial, pool).logits
                )

    def check_packed(self, checks: PackedChecks) -> None:
        checks.weights.check_modules(self.model)


def _expert_share(config: Any) -> float:
    """Which part of a mixture's experts one row is sent to; 1 where there is no mixture."""
    number, chosen = experts_of(text_config(config))
    return chosen / number if number else 1.0
