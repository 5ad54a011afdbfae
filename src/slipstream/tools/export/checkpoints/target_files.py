"""A target's sizes and outer layers, read from its files: no model is built."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers.utils.hub import cached_file

from slipstream.errors import ModelError
from slipstream.models import load_config

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


class TargetFiles:
    """Files of a folder or a hub id, and the sizes that a head must match (`draft.heads.checkpoints.TargetShape`)."""

    def __init__(self, path: str, revision: str | None = None) -> None:
        """Reads the configuration; raises `ModelError` where there is none."""
        self.path, self._revision = path, revision
        self.config: Any = load_config(path, revision=revision).get_text_config()
        self._embedding: Tensor | None = None

    @property
    def hidden_size(self) -> int:
        return int(self.config.hidden_size)

    @property
    def vocab_size(self) -> int:
        return int(self.config.vocab_size)

    @property
    def num_layers(self) -> int:
        return int(self.config.num_hidden_layers)

    @property
    def context_length(self) -> int:
        return int(self.config.max_position_embeddings)

    def embed(self, token_ids: Tensor) -> Tensor:
        """int64 [...] -> [..., hidden], in the file's dtype."""
        if self._embedding is None:
            self._embedding = self._weight("embed_tokens.weight")
        return self._embedding[token_ids]

    def output_layer(self) -> Tensor:
        """[vocab, hidden], in the file's dtype; the embedding where the two are tied."""
        if getattr(self.config, "tie_word_embeddings", False):
            return self.embed(torch.arange(self.vocab_size))
        return self._weight("lm_head.weight")

    def _weight(self, ending: str) -> Tensor:
        """The language model's tensor whose name ends with `ending`; raises `ModelError` where there is none."""
        files = [self._file(WEIGHTS)]
        index = self._file(INDEX)
        if index is not None:
            names: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files = [self._file(file) for file in {f for name, f in names.items() if name.endswith(ending)}]
        for file in files:
            if file is None:
                continue
            with safe_open(file, "pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - not a mapping
                    if name.endswith(ending) and "vision" not in name:
                        return tensors.get_tensor(name)  # type: ignore[no-any-return]
        raise ModelError(f"{self.path!r} has no tensor {ending} in safetensors files")

    def _file(self, name: str) -> Path | None:
        found = cached_file(
            self.path,
            name,
            revision=self._revision,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
            _raise_exceptions_for_gated_repo=False,
        )
        return None if found is None else Path(str(found))
