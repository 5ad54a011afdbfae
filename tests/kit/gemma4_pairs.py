"""Gemma 4 targets of each form, tiny, with assistants that are often right: they know what their targets say mostly.

What a target's layers add to a token's embedding is small, and so is what an assistant's do. Both have the same
embedding, final norm and output layer. So the most probable token follows from the last one in most places, and in
some from the text before.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import transformers as tf
from torch import Tensor

from tests.kit.assistants import FULL, SLIDING, WINDOW, whole_sharing
from tests.kit.folders import kept_folder
from tests.kit.small_llama import sizes
from tests.kit.tokenizer_families import byte_level

VOCAB, HIDDEN = 320, 32
TYPES = [SLIDING, FULL] * 3
_SHAPE: dict[str, Any] = {
    **sizes(HIDDEN, len(TYPES), 4, 2, inner=48, vocab=VOCAB, context=256, eos=None, bos=None, pad=None),
    **{"head_dim": 8, "global_head_dim": 16, "sliding_window": WINDOW, "layer_types": TYPES},
    "final_logit_softcapping": 30.0,
}
_INPUTS = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB}
_NO_INPUTS = {"hidden_size_per_layer_input": 0}
_SAME = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
_EXPERTS = {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 24}
_EYES: dict[str, Any] = {
    **sizes(32, 1, 2, 2, inner=48, image_size=16, patch_size=8),
    **{"head_dim": 16, "global_head_dim": 16},
}
_UNIFIED_EYES = {"mm_embed_dim": 32, "mm_posemb_size": 16, "output_proj_dims": 32, "patch_size": 4}
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "e2b": ("text", {**_INPUTS, "num_kv_shared_layers": 2, "use_double_wide_mlp": True}),
    "31b": ("text", {**_NO_INPUTS, **_SAME}),
    "26b-a4b": ("text", {**_NO_INPUTS, **_SAME, **_EXPERTS}),
    "e4b tower": ("tower", {**_INPUTS, "num_kv_shared_layers": 2}),
    "26b-a4b tower": ("tower", {**_NO_INPUTS, **_SAME, **_EXPERTS}),
    "12b unified": ("unified", _SAME),
    "12b unified tower": ("unified tower", _SAME),
}
"""Name to the kind of checkpoint, and the language model's options."""


@dataclass(frozen=True)
class Pair:
    """Two folders, and Transformers' models that they were written from."""

    target: str
    assistant: str
    whole: Any
    own: Any

    @property
    def decoder(self) -> Any:
        """The target's language model, without its output layer."""
        return getattr(self.whole.model, "language_model", self.whole.model)

    def read(self) -> dict[str, int]:
        """By type the target's last layer that has keys and values of its own."""
        number = len(TYPES) - self.decoder.config.num_kv_shared_layers
        return {kind: layer for layer, kind in enumerate(TYPES[:number])}

    @torch.no_grad()
    def logits(self, text: list[int], drafts: list[int]) -> Tensor:
        """[1 + drafts, vocab]: what the assistant says behind the text, then behind each draft token."""
        cache = tf.DynamicCache()  # of no configuration, so that a sliding layer keeps all too
        output = self.decoder(torch.tensor([text[:-1]]), past_key_values=cache, use_cache=True)
        layers = {kind: cache.layers[layer] for kind, layer in self.read().items()}
        kept = {kind: (layer.keys, layer.values) for kind, layer in layers.items()}
        state, rows = output.last_hidden_state[:, -1:], []
        for token in [text[-1], *drafts]:
            embedding = self.decoder.get_input_embeddings()(torch.tensor([[token]]))
            with whole_sharing():
                found = self.own(
                    inputs_embeds=torch.cat([embedding, state], dim=-1),
                    position_ids=torch.tensor([[len(text) - 1]]),
                    shared_kv_states=kept,
                )
            state = found.last_hidden_state
            rows.append(found.logits[0, 0])
        return torch.stack(rows)


def _randomise(model: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, weight in sorted(model.named_parameters()):
        noise = torch.randn(weight.shape, generator=generator)
        weight.data = weight + 0.3 * noise if weight.ndim == 1 else noise * weight.shape[-1] ** -0.5
        if name.endswith("q_norm.weight"):  # else attention is so sharp that it makes rounding large
            weight.data /= 2
        if ".post_" in name and "norm" in name:  # what a layer adds
            weight.data *= 0.03
    for name, buffer in sorted(model.named_buffers()):
        if name.endswith("layer_scalar"):
            buffer.fill_(0.7 + 0.3 * float(torch.rand((), generator=generator)))


def _target(kind: str, options: dict[str, Any]) -> Any:
    text: Any = tf.Gemma4UnifiedTextConfig if "unified" in kind else tf.Gemma4TextConfig
    config, eager = text(**_SHAPE, **options), {"attn_implementation": "eager"}
    if kind == "tower":
        whole = tf.Gemma4Config(text_config=config, vision_config=_EYES, audio_config=None, **eager)
        return tf.Gemma4ForConditionalGeneration(whole)
    if kind == "unified tower":
        unified = tf.Gemma4UnifiedConfig(text_config=config, vision_config=_UNIFIED_EYES, **eager)
        return tf.Gemma4UnifiedForConditionalGeneration(unified)
    config._attn_implementation = "eager"
    return (tf.Gemma4UnifiedForCausalLM if kind == "unified" else tf.Gemma4ForCausalLM)(config)


def _assistant(kind: str, options: dict[str, Any]) -> Any:
    unified = "unified" in kind
    family: Any = tf.Gemma4UnifiedAssistantConfig if unified else tf.Gemma4AssistantConfig
    text: Any = tf.Gemma4UnifiedTextConfig if unified else tf.Gemma4TextConfig
    own = {"num_hidden_layers": 3, "layer_types": [SLIDING, SLIDING, FULL], "final_logit_softcapping": None}
    if not unified:
        own |= {"vocab_size_per_layer_input": 0, "hidden_size_per_layer_input": 0}
    own |= {name: value for name, value in options.items() if name in _SAME}
    config = family(text_config=text(**_SHAPE | own), backbone_hidden_size=HIDDEN)
    config._attn_implementation = "eager"
    with whole_sharing():
        return tf.AutoModelForCausalLM.from_config(config)


@functools.cache
def pair(form: str, dtype: torch.dtype = torch.float32) -> Pair:
    """The target of a form and its assistant, with a tokenizer."""
    kind, options = FORMS[form]
    torch.manual_seed(0)
    whole, own = (make(kind, options).eval().requires_grad_(False) for make in (_target, _assistant))
    made = Pair(str(kept_folder()), str(kept_folder()), whole, own)
    generator = torch.Generator().manual_seed(9)
    for seed, model in enumerate((whole, own)):
        _randomise(model, seed)
    # Signs at random, else the token that is most probable behind each is the token itself.
    scale = torch.randn(HIDDEN, generator=generator).sign() * (
        2.5 + 0.5 * torch.rand(HIDDEN, generator=generator)
    )
    for model in (made.decoder, own.model):
        model.norm.weight.data = scale.clone()
        model.embed_tokens.weight.data = made.decoder.embed_tokens.weight.data.clone()
    own.tie_weights()
    both = torch.cat([torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)], dim=1)
    own.pre_projection.weight.data = both + 0.01 * torch.randn(both.shape, generator=generator)
    for folder, model in ((made.target, whole), (made.assistant, own)):
        model.to(dtype).save_pretrained(folder)
    byte_level(VOCAB).save_pretrained(made.target)
    return made
