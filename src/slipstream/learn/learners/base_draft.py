"""The drafter that is there before anything is learned: what learners begin with and what every version is trained
on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.config import SpeculativeConfig
from slipstream.draft.methods import DRAFT_MODEL, LAYER_SKIP, OWN_WEIGHTS, SELF
from slipstream.draft.model.self_model import DRAFT_FORMAT
from slipstream.errors import LearnError
from slipstream.models.cpu.native import unavailable
from slipstream.models.files.digest import digest_of, digest_of_files
from slipstream.models.huggingface import DynamicCache
from slipstream.models.layers import find_layers
from slipstream.models.linear.formats import UNCHANGED, weight_format
from slipstream.models.linear.packing import pack_linears
from slipstream.train.target import check_plain_head, load_model

_HIDDEN = -3e4
"""Finite, as in `learners.batches`."""


@dataclass(frozen=True)
class BaseDraft:
    """A drafter with weights, as a learner finds it on disk."""

    model: str
    """The checkpoint folder of the draft model, of the head, or of the target that drafts for itself."""
    method: str = DRAFT_MODEL.name
    target: str | None = None
    """The folder of the model that a head drafts for."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Those that the logits depend on, besides the weights."""

    @classmethod
    def of(cls, speculative: SpeculativeConfig, target: str, weight_format: str = UNCHANGED) -> BaseDraft:
        """The base drafter where `speculative` drafts for the model `target`, whose weights are held in this format."""
        if speculative.method in OWN_WEIGHTS:
            given = speculative.options
            kept = {
                name: given[name] for name in ("skip_layers", "exit_layer") if given.get(name) is not None
            }
            own = (
                given.get("quantization", DRAFT_FORMAT) if speculative.method == SELF.name else weight_format
            )
            return cls(target, speculative.method, target, {**kept, "quantization": own})
        return cls(str(speculative.options["model"]), speculative.method, target)

    @property
    def path(self) -> Path:
        return Path(self.model)

    def digest(self) -> str:
        """Equal ones draft alike."""
        digest = digest_of_files(self.model)
        if self.method not in OWN_WEIGHTS:
            return digest
        return digest_of(f"{digest} {self.method} {sorted(self.options.items())}".encode())

    def causal_model(self) -> Any:
        """What computes the draft's logits from a text alone: a Transformers model, or what has the part of one that
        learners call. Raises `LearnError` for a head, `ModelError` where it cannot be loaded, or changes its logits
        after the output layer."""
        if self.method not in (DRAFT_MODEL.name, *OWN_WEIGHTS):
            raise LearnError(f"the logits of {self.method!r} need more than a text")
        model = load_model(self.model, torch.device("cpu"))
        check_plain_head(model, torch.device("cpu"))
        if self.method == DRAFT_MODEL.name:
            return model
        held = self.options.get("quantization", UNCHANGED)
        if held != UNCHANGED:
            pack_linears(model, weight_format(held), native=unavailable() is None)
        if self.method == LAYER_SKIP.name:
            return SkippedLayers(model, self._layers(int(model.config.get_text_config().num_hidden_layers)))
        return model

    def _layers(self, num_layers: int) -> list[int]:
        if "exit_layer" in self.options:
            return list(range(int(self.options["exit_layer"])))
        return [layer for layer in range(num_layers) if layer not in self.options["skip_layers"]]


def has_plain_head(config: Any) -> bool:
    """Whether a model's logits are those of its output layer, as far as its configuration says: others scale or cap
    them, which learners do not."""
    text = config.get_text_config()
    factors = (getattr(text, name, None) for name in ("logits_scaling", "logit_scale", "lm_head_multiplier"))
    return getattr(text, "final_logit_softcapping", None) is None and all(one in (None, 1) for one in factors)


class SkippedLayers(nn.Module):
    """A target that drafts with some of its layers: each token reads the target's own keys and values of the tokens
    before it, and in the layers that are run computes its own, as `layer_skip` does for the first draft token.

    Further down a chain the drafter reads its own entries of its draft tokens instead, which this leaves out.
    """

    def __init__(self, model: Any, layers: list[int]) -> None:
        """Raises `LearnError` for a model whose layers are not found, or are fewer."""
        super().__init__()
        num_layers = int(model.config.get_text_config().num_hidden_layers)
        stack = find_layers(model, num_layers)
        if stack is None or not layers or layers[-1] >= num_layers:
            raise LearnError(f"a model of {num_layers} layers cannot draft with layers {layers}")
        self.model, self._stack, self._layers = model, stack, layers
        self.config = model.config

    @property
    def base_model(self) -> SkippedLayers:
        return self

    def get_output_embeddings(self) -> Any:
        """The target's."""
        return self.model.get_output_embeddings()

    def forward(self, *, attention_mask: Tensor, **given: Any) -> Any:
        """As the base model of a Transformers model; `attention_mask` [B, 1, T, T] is additive."""
        cache = DynamicCache()
        arguments = {**given, "past_key_values": cache, "use_cache": True}
        self.model.base_model(attention_mask=attention_mask, **arguments)
        itself = torch.eye(attention_mask.shape[-1], dtype=torch.bool)
        before = attention_mask.masked_fill(itself, _HIDDEN)
        own = torch.full_like(attention_mask, _HIDDEN).masked_fill(itself, 0.0)
        with self._stack.only(self._layers):
            return self.model.base_model(attention_mask=torch.cat([before, own], dim=-1), **arguments)
