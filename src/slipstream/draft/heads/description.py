"""What a head on disk is, and which targets it fits: read from its configuration and the shapes of its tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from slipstream.core.model_path import names_gguf
from slipstream.draft.heads.assistant_config import ReadTarget, read_layers
from slipstream.draft.heads.checkpoints import WEIGHT_FILES, TargetSizes, check_fits, outline_checkpoint
from slipstream.draft.heads.dflash_files import check_dflash, dflash_config
from slipstream.draft.heads.dflash_head import DFlashConfig
from slipstream.draft.heads.dflash_layouts import layout_of
from slipstream.draft.heads.eagle_files import check_head, eagle_config
from slipstream.draft.heads.eagle_head import EagleConfig
from slipstream.draft.heads.gguf_heads import gguf_head_kind
from slipstream.draft.heads.head_config import HeadConfig
from slipstream.draft.heads.hydra import WEIGHT_FILES as HYDRA_FILES
from slipstream.draft.heads.medusa import WEIGHT_FILES as MEDUSA_FILES
from slipstream.draft.methods import ASSISTANTS, DFLASH, HEADS, HYDRA, MEDUSA, MTP, kind_of_checkpoint
from slipstream.errors import ModelError
from slipstream.models import load_config

_FILES = {MEDUSA.name: MEDUSA_FILES, HYDRA.name: HYDRA_FILES}


def method_of(path: str) -> str | None:
    """The method that runs the head in a folder or a GGUF file here; None for anything else."""
    file = Path(path) / "config.json"
    if not file.is_file():
        return gguf_head_kind(path) if Path(path).is_file() else None
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # reading it as a model fails with an error that says why
    kind = kind_of_checkpoint(config) if isinstance(config, dict) else None
    return kind if kind in HEADS else None


@dataclass(frozen=True, kw_only=True)
class _OwnSizes:
    """A target of the sizes that a head itself names; 0 is not known."""

    hidden_size: int
    vocab_size: int
    num_layers: int = 0
    context_length: int = 0


class HeadOnDisk:
    """The head of a method, in a folder, a GGUF file or on the hub."""

    def __init__(self, path: str, method: str) -> None:
        """Raises `ModelError` where it is damaged."""
        self.path, self.method = path, method
        files = _FILES.get(method, WEIGHT_FILES)
        self.raw, self.tensors = outline_checkpoint(path, weight_files=files)
        self.is_assistant = self.raw.get("model_type") in ASSISTANTS
        inside = "text_config" if self.is_assistant else "transformer_layer_config"
        layer = self.raw.get(inside) or self.raw
        wide = self.raw.get("backbone_hidden_size" if self.is_assistant else "target_hidden_size")
        hidden = wide or layer.get("hidden_size") or 0
        own = _OwnSizes(hidden_size=hidden, vocab_size=layer.get("vocab_size") or 0)
        self.sizes: HeadConfig | _OwnSizes = own if method in (*_FILES, MTP.name) else self._config(own)

    def drafts_for(self, target: ReadTarget) -> str:
        """`yes`, or why it cannot draft for a target of these sizes."""
        try:
            if isinstance(self.sizes, HeadConfig):
                config = self._config(target)
                check = check_dflash if isinstance(config, DFlashConfig) else check_head
                check(config, target, self.path)  # type: ignore[arg-type]
            else:
                sizes = self.sizes
                hidden, vocab = sizes.hidden_size, sizes.vocab_size
                check_fits(self.path, hidden or target.hidden_size, vocab or target.vocab_size, target)
            if self.is_assistant:
                read_layers(load_config(self.path), target, self.path)
        except ModelError as error:
            return f"no: {error}"
        return "yes"

    def details(self) -> dict[str, Any]:
        """All that is known of it, for JSON; None is not known, or not said."""
        config = self.sizes
        found: dict[str, Any] = {
            "head": self.path,
            "method": self.method,
            "num_parameters": sum(each.numel() for each in self.tensors.values() if each.is_floating_point()),
            "target_hidden_size": self.sizes.hidden_size or None,
            "vocab_size": self.sizes.vocab_size or None,
        }
        if not isinstance(config, HeadConfig):
            count = next((self.raw[key] for key in _COUNTS if key in self.raw), None)
            if self.is_assistant:
                count = (self.raw.get("text_config") or {}).get("num_hidden_layers")
            return found | {"num_heads" if self.method in _FILES else "num_layers": count}
        found |= {
            "target_hidden_size": config.target_hidden_size,
            "draft_vocab_size": config.draft_vocab_size or None,
            "num_layers": config.num_layers,
            "hidden_size": config.hidden_size,
            "feature_layers": self._feature_layers(config),
            "context_length": config.max_position_embeddings or None,
            "own_embedding": _has(self.tensors, "embed_tokens.weight"),
            "own_output_layer": _has(self.tensors, "lm_head.weight"),
        }
        if isinstance(config, DFlashConfig):
            return found | self._block(config)
        assert isinstance(config, EagleConfig)
        return found | {"mask_token_id": config.mask_token_id}

    def _config(self, target: TargetSizes) -> DFlashConfig | EagleConfig:
        read = dflash_config if self.method == DFLASH.name else eagle_config
        return read(self.raw, self.tensors, target, self.path)

    def _feature_layers(self, config: HeadConfig) -> list[int] | None:
        """None where they follow from the target's depth."""
        of_eagle = self.raw.get("eagle_config") or {}
        key = "eagle_aux_hidden_state_layer_ids"
        says = isinstance(config, DFlashConfig) or of_eagle.get(key) or self.raw.get(key)
        return list(config.feature_layers) if says else None

    def _block(self, config: DFlashConfig) -> dict[str, Any]:
        """What a block head has that others have not."""
        correction = config.left_to_right
        return {
            "layout": "gguf" if names_gguf(self.path) else layout_of(self.raw),
            "block_size": config.block_size,
            "num_drafts": config.num_drafts,
            "sample_from_anchor": config.from_anchor,
            "mask_token_id": config.mask_token_id,
            "causal": list(config.causal),
            "windows": list(config.windows),
            "convolution_taps": config.convolution_taps,
            "left_to_right": None
            if correction is None
            else {"kind": correction.kind, "rank": correction.rank},
            "confidence": config.confidence,
        }


_COUNTS = ("medusa_num_heads", "hydra_num_heads", "num_heads", "num_nextn_predict_layers")


def _has(tensors: Mapping[str, Tensor], ending: str) -> bool:
    return any(name.endswith(ending) for name in tensors)
