"""A tiny Gemma 4 with random weights, assistants of it, and what Transformers' code makes of both."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import transformers as tf
from torch import Tensor

from tests.kit.folders import kept_folder
from tests.kit.small_llama import sizes
from tests.kit.tokenizer_families import byte_level

VOCAB, HIDDEN, WINDOW = 320, 32, 5
SLIDING, FULL = "sliding_attention", "full_attention"
TYPES = [SLIDING, FULL, SLIDING, FULL, SLIDING, FULL]
READ = {2: {SLIDING: 2, FULL: 3}, 0: {SLIDING: 4, FULL: 5}}
"""By how many of the target's layers share keys and values with those before, its last layers that have their own."""
_SHAPE: dict[str, Any] = {"head_dim": 8, "global_head_dim": 16, "sliding_window": WINDOW}
KINDS: dict[str, dict[str, Any]] = {
    "tied": {},
    "ordered": {"use_ordered_embeddings": True, "num_centroids": 16, "centroid_intermediate_top_k": 3},
    "unified": {},
    "capped": {},
}
CAP = 2.0


@dataclass(frozen=True)
class Assistant:
    """A folder, and Transformers' model that it was written from."""

    folder: str
    model: Any


def _randomise(model: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, weight in sorted(model.named_parameters()):
        noise = torch.randn(weight.shape, generator=generator)
        weight.data = weight + 0.3 * noise if weight.ndim == 1 else noise * weight.shape[-1] ** -0.5
        if "embed_tokens." in name:
            weight.data *= 2
        elif name.endswith("q_norm.weight"):  # else attention is so sharp that it makes rounding large
            weight.data /= 2
    for name, buffer in sorted(model.named_buffers()):
        if name.endswith("layer_scalar"):
            buffer.fill_(0.3 + float(torch.rand((), generator=generator)))


@functools.cache
def gemma4(shared: int = 2) -> Assistant:
    """The target; its last `shared` layers read the keys and values of those before them."""
    shape = sizes(HIDDEN, len(TYPES), 4, 2, inner=48, vocab=VOCAB, context=256, eos=None, bos=None, pad=None)
    config = tf.Gemma4TextConfig(
        **shape,
        **_SHAPE,
        layer_types=TYPES,
        num_kv_shared_layers=shared,
        vocab_size_per_layer_input=VOCAB,
        hidden_size_per_layer_input=8,
        final_logit_softcapping=30.0,
        attn_implementation="eager",
    )
    model = tf.Gemma4ForCausalLM(config).eval().requires_grad_(False)
    _randomise(model, seed=4)
    folder = str(kept_folder())
    model.save_pretrained(folder)
    byte_level(VOCAB).save_pretrained(folder)
    return Assistant(folder, model)


@contextmanager
def whole_sharing() -> Iterator[None]:
    """A block in which Transformers can make an assistant: 5.23 refuses a decoder whose layers all share."""
    with ExitStack() as patches:
        for family in (tf.Gemma4TextConfig, tf.Gemma4UnifiedTextConfig):
            modes = property(functools.partial(_modes, family.kv_sharing_modes.fget))
            patches.enter_context(patch.object(family, "kv_sharing_modes", modes))
        yield


def _modes(usual: Any, config: Any) -> Any:
    number = config.num_hidden_layers
    return ["reuse"] * number if config.num_kv_shared_layers == number else usual(config)


@functools.cache
def assistant(kind: str = "tied") -> Assistant:
    """One of `KINDS`, for the target."""
    family: Any = tf.Gemma4UnifiedAssistantConfig if kind == "unified" else tf.Gemma4AssistantConfig
    text: Any = tf.Gemma4UnifiedTextConfig if kind == "unified" else tf.Gemma4TextConfig
    shape = sizes(24, 3, 4, 2, inner=40, vocab=VOCAB, context=256, eos=None, bos=None, pad=None)
    plain = {} if kind == "unified" else {"vocab_size_per_layer_input": 0, "hidden_size_per_layer_input": 0}
    cap = CAP if kind == "capped" else None
    types = {"layer_types": [SLIDING, SLIDING, FULL], "final_logit_softcapping": cap}
    config = family(
        text_config=text(**shape, **_SHAPE, **plain, **types), backbone_hidden_size=HIDDEN, **KINDS[kind]
    )
    config._attn_implementation = "eager"
    with whole_sharing():
        model = tf.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    _randomise(model, seed=4)
    if model.masked_embedding is not None:
        order = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(3))
        model.masked_embedding.token_ordering.copy_(order)
    folder = str(kept_folder())
    model.save_pretrained(folder)
    return Assistant(folder, model)


@dataclass(frozen=True)
class Reference:
    """Transformers' assistant behind a text."""

    kind: str
    text: list[int]
    shared: int = 2

    @torch.no_grad()
    def logits(self, drafts: list[int]) -> Tensor:
        """[1 + drafts, vocab]: behind the text, then behind each draft token."""
        target, own = gemma4(self.shared).model, assistant(self.kind).model
        before = torch.tensor([self.text[:-1]])
        cache = tf.DynamicCache()  # of no configuration, so that a sliding layer keeps all too
        output = target.model(before, past_key_values=cache, use_cache=True)
        kept = {kind: cache.layers[layer] for kind, layer in READ[self.shared].items()}
        state, rows = output.last_hidden_state[:, -1:], []
        for token in [self.text[-1], *drafts]:
            embedding = target.get_input_embeddings()(torch.tensor([[token]]))
            with whole_sharing():
                found = own(
                    inputs_embeds=torch.cat([embedding, state], dim=-1),
                    position_ids=torch.tensor([[len(self.text) - 1]]),
                    shared_kv_states={kind: (layer.keys, layer.values) for kind, layer in kept.items()},
                )
            state = found.last_hidden_state
            rows.append(found.logits[0, 0])
        return torch.stack(rows)

    def chain(self, depth: int) -> list[int]:
        """The greedy draft."""
        drafts: list[int] = []
        for _ in range(depth):
            drafts.append(int(self.logits(drafts)[-1].argmax()))
        return drafts
