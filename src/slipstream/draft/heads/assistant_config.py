"""The configuration of Gemma 4's assistant, and which of a target's layers it reads.

Apart from `assistant_head`, which imports Gemma 4's code.
"""

from __future__ import annotations

from typing import Any, Protocol

from slipstream.draft.heads.checkpoints import TargetSizes, check_fits
from slipstream.errors import ModelError
from slipstream.models.support import text_config


class ReadTarget(TargetSizes, Protocol):
    """What is known of a target, loaded or not."""

    @property
    def path(self) -> str:
        """Its folder, file or hub id."""

    @property
    def config(self) -> Any:
        """Transformers' configuration."""


def output_table(config: Any) -> str:
    """The name in a checkpoint of the output layer's weight."""
    return "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"


def read_layers(config: Any, target: ReadTarget, path: str) -> dict[str, int]:
    """For each type of layer in the assistant, the number of the target's layer whose keys and values it reads.

    That is the last one of the type among those that have some of their own. `config` is Transformers' configuration of
    the assistant in `path`. Raises `ModelError` where it contradicts itself or was not made for the target.
    """
    text, own = config.text_config, text_config(target.config)
    check_fits(path, config.backbone_hidden_size, text.vocab_size, target)
    if config.use_ordered_embeddings:
        number, chosen = config.num_centroids, config.centroid_intermediate_top_k
        if number < 1 or text.vocab_size % number or not 0 < chosen <= number:
            raise ModelError(
                f"{path!r} has {number} centroids for {text.vocab_size} tokens and scores those of {chosen}: each "
                "centroid has as many tokens as the others, and no more can be scored than there are"
            )
    types = list(getattr(own, "layer_types", None) or ())
    types = types[: len(types) - (getattr(own, "num_kv_shared_layers", None) or 0)]
    last = {kind: number for number, kind in enumerate(types)}
    for kind in text.layer_types:
        if kind not in last:
            raise ModelError(
                f"{path!r} reads the keys and values of a layer of type {kind}, and {target.path!r} has none; use an "
                "assistant that was made for this target"
            )
    return {kind: last[kind] for kind in text.layer_types}
