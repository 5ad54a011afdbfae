"""An encoder-decoder of Transformers, called as a causal language model is: its decoder's tokens in, logits out.

The encoder runs once a sequence (`EncoderDecoder.encode`), and the keys and values that the decoder's layers make of
its output are kept. So the decoder's passes are over its own tokens alone, in packed rows as those of other models, and
attend across through the same hook. To Transformers' code these keys seem to be in its own cache, where there are none.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.kv.pool import LayerShape
from slipstream.models.attention.across import AcrossPass, EncoderPass
from slipstream.models.huggingface import BaseModelOutput, DynamicCache, EncoderDecoderCache
from slipstream.models.support import full_context_length, is_encoder_decoder, text_config, unsupported
from slipstream.text.encoder_input import EncoderInput

_UNKNOWN_POSITIONS = "it is not known where its decoder reads the positions of tokens"
NUM_TRIAL_POSITIONS = 10
"""Tokens of the input that tries an encoder out."""


class _Own(DynamicCache):
    """Keeps nothing: keys and values of the decoder's tokens are kept by the hook."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states


class _Across:
    """Has keys and values for each layer, of no position: the hook reads others."""

    def __init__(self, like: Tensor) -> None:
        self.keys = self.values = like.new_empty(1, 1, 0, 1)

    @property
    def layers(self) -> _Across:
        return self

    def __getitem__(self, layer: int) -> _Across:
        return self


class _Updated(dict[int, bool]):
    """Each layer's keys and values across are there."""

    def get(self, *_: Any) -> bool:
        return True


class _Cache(EncoderDecoderCache):
    def __init__(self, like: Tensor) -> None:  # Transformers' own would make its layers
        self.self_attention_cache = _Own()
        self.cross_attention_cache = _Across(like)  # type: ignore[assignment]
        self.is_updated = _Updated()


class DistanceBias:
    """The bias that T5's decoder adds by the distance of two tokens: one for all that are far apart."""

    counts_tokens = False

    def __init__(self, attention: Any) -> None:
        self._compute, self._longest = attention.compute_bias, int(attention.relative_attention_max_distance)
        self._by_distance: Tensor | None = None

    def __call__(self, distance: Tensor) -> Tensor:
        if self._by_distance is None:  # what the last row of a chain adds, the nearest token first
            last = self._compute(1, self._longest + 1, past_seen_tokens=self._longest)
            self._by_distance = last[0, :, 0].flip(-1).to(distance.device)  # [heads, distances]
        return self._by_distance[:, distance.clamp(max=self._longest)]

    def of_chain(self, *inputs: Any, **keywords: Any) -> Any:
        """Transformers' own, of tokens that follow each other."""
        return self._compute(*inputs, **keywords)


def as_decoder(model: Any) -> Any:
    """An encoder-decoder of Transformers as an `EncoderDecoder`; other models as they are."""
    return EncoderDecoder(model) if is_encoder_decoder(model.config) else model


class EncoderDecoder(nn.Module):
    """Not safe for several threads: an executor holds its lock for every call."""

    def __init__(self, whole: Any) -> None:
        """`whole` is Transformers' model. Raises `UnsupportedModelError` where it is not known where its decoder reads
        positions."""
        super().__init__()
        self.whole = whole
        self.config, self.generation_config = whole.config, whole.generation_config
        self._hidden = int(text_config(self.config).hidden_size)
        self.is_audio = whole.main_input_name == "input_features"
        self._positions: Tensor | None = None
        self._wanted: Tensor | None = None
        self._is_packed = False
        self._chain: Tensor | None = None
        """[positions, hidden]: the embedding of each position in a chain of tokens, once it is needed."""
        decoder = whole.get_decoder()
        decoder.register_forward_hook(self._keep_wanted)
        table = getattr(decoder, "embed_positions", None)
        able = [part for part in decoder.modules() if hasattr(part, "has_relative_attention_bias")]
        biased = [part for part in able if part.has_relative_attention_bias]
        for attention in biased:
            attention.compute_bias = partial(self._bias, DistanceBias(attention))
        if len(biased) == 1:  # of the first layer: all others take it, also where that one does not run
            for attention in (part for part in able if getattr(part, "is_causal", False)):
                attention.has_relative_attention_bias = True
                attention.compute_bias = biased[0].compute_bias
        if table is not None:
            takes_them = "position_ids" in inspect.signature(table.forward).parameters
            table.forward = partial(self._embed if takes_them else self._look_up, table.forward)
        elif not biased:
            raise unsupported(self.config, _UNKNOWN_POSITIONS)

    # --- as a causal language model -----------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        found: torch.device = self.whole.device
        return found

    @property
    def dtype(self) -> torch.dtype:
        found: torch.dtype = self.whole.dtype
        return found

    def modules_of_a_pass(self) -> Iterator[nn.Module]:
        """All but the encoder's, which a pass of the decoder does not read."""
        apart = {id(module) for module in self.whole.get_encoder().modules()}
        return (module for module in self.modules() if id(module) not in apart)

    def get_input_embeddings(self) -> Any:
        return self.whole.get_decoder().get_input_embeddings()

    def get_output_embeddings(self) -> Any:
        return self.whole.get_output_embeddings()

    def get_decoder(self) -> Any:
        return self.whole.get_decoder()

    def tie_weights(self) -> None:
        self.whole.tie_weights()

    def set_attn_implementation(self, name: str) -> None:
        self.whole.set_attn_implementation(name)

    def forward(
        self,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        position_ids: Tensor | None = None,
        logits_to_keep: Tensor | None = None,
        slipstream_pass: Any = None,
        output_hidden_states: Any = False,
        use_cache: bool = False,
        attention_mask: Tensor | None = None,
    ) -> Any:
        """Logits of packed rows [1, N] with a `slipstream_pass`; without one of texts [B, N], by Transformers' own
        attention over its encoder's output for the trial input."""
        if slipstream_pass is None:
            return self._stock(input_ids, position_ids)
        assert position_ids is not None
        states = torch.zeros(1, 1, self._hidden, device=self.device)
        output = self._call(
            position_ids[0],
            logits_to_keep,
            encoder_outputs=BaseModelOutput(last_hidden_state=states),
            decoder_input_ids=input_ids,
            decoder_inputs_embeds=inputs_embeds,
            past_key_values=_Cache(states),
            use_cache=True,
            output_hidden_states=output_hidden_states,
            slipstream_pass=slipstream_pass,
        )
        output.hidden_states = output.decoder_hidden_states
        return output

    def _stock(self, input_ids: Tensor | None, position_ids: Tensor | None) -> Any:
        assert input_ids is not None
        assert position_ids is not None
        states = self._encoded(self.trial_input())
        outputs = [
            self._call(
                positions,
                None,
                encoder_outputs=BaseModelOutput(last_hidden_state=states),
                decoder_input_ids=text[None],
                use_cache=False,
            )
            for text, positions in zip(input_ids, position_ids, strict=True)
        ]
        outputs[0].logits = torch.cat([output.logits for output in outputs])
        return outputs[0]

    def _call(self, positions: Tensor, wanted: Tensor | None, **given: Any) -> Any:
        self._positions, self._wanted, self._is_packed = positions, wanted, "slipstream_pass" in given
        try:
            return self.whole(**given)
        finally:
            self._positions = self._wanted = None
            self._is_packed = False

    # --- the encoder --------------------------------------------------------------------------------------------

    def encode(self, given: EncoderInput) -> list[tuple[Tensor, Tensor]]:
        """The keys and values that each layer of the decoder makes of the encoder's output, [heads, positions, dim]
        each."""
        states = self._encoded(given, slipstream_pass=EncoderPass())
        start = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        across = AcrossPass()
        self._is_packed = True
        try:
            self.whole.get_decoder()(
                input_ids=start, encoder_hidden_states=states, use_cache=False, slipstream_pass=across
            )
        finally:
            self._is_packed = False
        return [across.entries[layer] for layer in sorted(across.entries)]

    def num_positions(self, given: EncoderInput) -> int:
        """Positions of the encoder's output."""
        return int(self.config.max_source_positions) if self.is_audio else len(given.token_ids)

    def encoded_shapes(self) -> tuple[LayerShape, ...]:
        """What each layer of the decoder keeps of a position of the encoder's output, by trying it out."""
        entries = self.encode(self.trial_input())
        num_layers = text_config(self.config).num_hidden_layers
        if len(entries) != num_layers:
            raise unsupported(
                self.config,
                f"{len(entries)} of its {num_layers} layers attend to the encoder's output by the hook",
            )
        return tuple(LayerShape(keys.shape[0], keys.shape[2], values.shape[2]) for keys, values in entries)

    def trial_input(self) -> EncoderInput:
        """An input that tries the encoder out."""
        if not self.is_audio:
            vocab = text_config(self.config).vocab_size
            return EncoderInput(tuple(number * 7919 % vocab for number in range(1, NUM_TRIAL_POSITIONS + 1)))
        made = torch.Generator().manual_seed(0)
        size = (self.config.num_mel_bins, 2 * self.config.max_source_positions)
        return EncoderInput(features=torch.randn(size, generator=made).numpy())

    def _encoded(self, given: EncoderInput, **keywords: Any) -> Tensor:
        """[1, positions, hidden]: the encoder's output."""
        if given.features is None:
            held = torch.tensor([given.token_ids], dtype=torch.int64, device=self.device)
        else:
            held = torch.from_numpy(given.features)[None].to(self.device, self.whole.dtype)
        output = self.whole.get_encoder()(held, **keywords)
        states: Tensor = output.last_hidden_state
        return states

    # --- what Transformers' code calls --------------------------------------------------------------------------

    def _keep_wanted(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        if self._wanted is not None:
            output.last_hidden_state = output.last_hidden_state[:, self._wanted]

    def _embed(self, embed: Any, *inputs: Any, **keywords: Any) -> Tensor:
        if self._positions is not None:
            keywords["position_ids"] = self._positions
        embedded: Tensor = embed(*inputs, **keywords)
        return embedded

    def _look_up(self, embed: Any, *inputs: Any, **keywords: Any) -> Tensor:
        """The positions of tokens out of those of a chain, where Transformers' code counts for itself."""
        if self._positions is None:
            embedded: Tensor = embed(*inputs, **keywords)
            return embedded
        if self._chain is None:
            pad = getattr(self.config, "pad_token_id", None)
            length = full_context_length(self.config)
            tokens = torch.full((1, length), 0 if pad else 1, dtype=torch.int64, device=self.device)
            try:
                self._chain = embed(input_ids=tokens, past_key_values_length=0)[0]
            except TypeError:
                raise ValueError(_UNKNOWN_POSITIONS) from None
        return self._chain[self._positions][None]

    def _bias(self, bias: DistanceBias, *inputs: Any, **keywords: Any) -> Any:
        """What computes the bias in a packed pass; else the bias, where Transformers counts tokens, not positions."""
        if self._is_packed:
            return bias
        places = self._positions
        if places is None or torch.equal(places, torch.arange(len(places), device=places.device)):
            return bias.of_chain(*inputs, **keywords)
        return bias((places[:, None] - places).clamp(min=0))[None]
