"""The language model inside a checkpoint that reads images too: its configuration, and the names of its weights.

Slipstream decodes text. Given text alone, such a model computes what its language model computes. Only the language
model is loaded; the image encoder's weights are not read.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from transformers.models.qwen2.configuration_qwen2 import Qwen2Config
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

_AS_IT_IS = frozenset(
    {
        *("gemma3", "gemma3n", "gemma4", "gemma4_unified", "mistral3", "llava", "llava_next", "internvl"),
        *("idefics3", "smolvlm"),
    }
)
"""Families whose text configuration is that of a causal language model."""

_ROTATED_IN_THREE: dict[str, type] = {
    "qwen2_vl": Qwen2Config,
    "qwen2_5_vl": Qwen2Config,
    "qwen3_vl": Qwen3Config,
}
"""Families whose rotary embedding has three positions: time, height and width. For text all three are equal, which is
the rotation of the plain family named here."""

KEY_MAPPING = {
    r"^language_model\.model\.": "model.",
    r"^language_model\.lm_head\.": "lm_head.",
    r"^model\.language_model\.": "model.",
    r"^model\.text_model\.": "model.",
}
"""Patterns of weight names in such checkpoints, old and new, to the names in the language model alone."""

_IMAGE_WEIGHTS = re.compile(
    r"^(model\.)?(vision_tower|vision_model|vision_embedder|visual|multi_modal_projector|connector|image_newline"
    r"|embed_vision|embed_audio|audio_tower)\b"
)

_INHERITED = ("dtype", "tie_word_embeddings", "eos_token_id", "bos_token_id", "quantization_config")
"""Settings of the outer configuration that hold for the language model too."""


@dataclass(frozen=True, slots=True)
class TextTower:
    """The language model's configuration, which `AutoModelForCausalLM` loads it with."""

    config: Any
    family: str
    """`model_type` of the whole checkpoint."""

    @staticmethod
    def without_image_weights(names: Iterable[str]) -> set[str]:
        """Those of `names` that do not belong to the image encoder."""
        return {name for name in names if not _IMAGE_WEIGHTS.match(name)}


def text_tower(config: Any) -> TextTower | None:
    """The language model of `config`; None where the checkpoint has no image encoder, or its family is unknown."""
    family = config.model_type
    if family not in _AS_IT_IS and family not in _ROTATED_IN_THREE:
        return None
    text = copy.deepcopy(config.get_text_config(decoder=True))
    if family in _ROTATED_IN_THREE:
        text = _plain(text, _ROTATED_IN_THREE[family])
    for name in _INHERITED:
        if getattr(config, name, None) is not None:
            setattr(text, name, getattr(config, name))
    return TextTower(text, family)


def _plain(text: Any, plain: type) -> Any:
    """The same sizes as a configuration of the plain family."""
    own = {key: value for key, value in text.to_dict().items() if key not in ("model_type", "architectures")}
    rope = {key: value for key, value in own.pop("rope_parameters").items() if not key.startswith("mrope")}
    return plain(**own, rope_parameters=rope)
