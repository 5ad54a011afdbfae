"""The target in training: hidden states of packed rows, computed on demand or cached on disk."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.errors import ConfigError, UnsupportedModelError
from slipstream.models import load_plain
from slipstream.models.support import text_config
from slipstream.train.attention import ATTENTION, block_diagonal_mask

_LARGEST = 65504.0
"""Largest float16 number."""


def load_model(path: str, device: torch.device) -> Any:
    """The float32 model of a checkpoint, set up for packed rows; raises `ModelError`."""
    return load_plain(path, dtype=torch.float32, attention=ATTENTION).to(device)


class FrozenTarget:
    """The frozen target. `dtype` is the type of its matrix products; results are float32."""

    def __init__(self, path: str, device: torch.device, dtype: torch.dtype) -> None:
        self.path = path
        self.model = load_model(path, device).eval().requires_grad_(False)
        self.device, self.dtype = device, dtype
        config = text_config(self.model.config)
        self.num_layers = int(config.num_hidden_layers)
        self.hidden_size = int(config.hidden_size)
        self.vocab_size = int(config.vocab_size)
        self.context_length = int(self.model.config.max_position_embeddings)
        self._cache: FeatureCache | None = None
        check_plain_head(self.model, device)

    @torch.no_grad()
    def hidden_states(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attention_mask: Tensor,
        layers: Seq[int],
        sources: NDArray[np.int64] | None = None,
    ) -> dict[int, Tensor]:
        """Layer to float32 [B, T, hidden]; read from the cache for rows with `sources` [B, T] in it."""
        if self._cache is not None and sources is not None and (sources >= 0).any():
            return self._cache.read(sources, layers, self.device)
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            output = self.model.base_model(
                input_ids=token_ids,
                position_ids=positions,
                attention_mask=attention_mask,
                use_cache=False,
                output_hidden_states=any(layer < self.num_layers for layer in layers),
            )
        states = output.hidden_states
        return {
            layer: (output.last_hidden_state if layer == self.num_layers else states[layer]).float()
            for layer in sorted(set(layers))
        }

    @torch.no_grad()
    def project(self, hidden: Tensor) -> Tensor:
        """float32 [..., hidden] after the final norm -> float32 logits [..., vocab]."""
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            logits: Tensor = self.model.get_output_embeddings()(hidden)
        return logits.float()

    @torch.no_grad()
    def embed(self, token_ids: Tensor) -> Tensor:
        """int64 [...] -> float32 [..., hidden]"""
        embedded: Tensor = self.model.get_input_embeddings()(token_ids.to(self.device))
        return embedded

    def keep(self, cache: FeatureCache) -> None:
        """Read hidden states from `cache` from now on."""
        self._cache = cache


class FeatureCache:
    """Hidden states of the concatenated documents, float16 on disk; reused by later runs with the same data."""

    def __init__(
        self,
        folder: Path,
        target: FrozenTarget,
        documents: Seq[NDArray[np.int64]],
        layers: Seq[int],
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """`documents` are token ids; `layers` must include all that are read later. Raises `ConfigError` on a full
        disk."""
        self.layers = sorted({*layers, target.num_layers})
        self.file, metadata_file = folder / "features.f16", folder / "features.json"
        num_tokens = sum(map(len, documents))
        shape = (num_tokens, len(self.layers), target.hidden_size)
        tokens = np.concatenate(documents)
        checksum = int((tokens * (np.arange(num_tokens) % 8191 + 1)).sum())
        metadata = {
            "shape": list(shape),
            "layers": self.layers,
            "checksum": checksum,
            "dtype": str(target.dtype),
        }
        if not (metadata_file.exists() and json.loads(metadata_file.read_text()) == metadata):
            try:
                folder.mkdir(parents=True, exist_ok=True)
                metadata_file.unlink(missing_ok=True)
                self._fill(target, documents, shape, on_progress)
                metadata_file.write_text(json.dumps(metadata))
            except OSError as error:
                self.file.unlink(missing_ok=True)
                raise ConfigError(
                    f"cannot keep the target's features in {str(self.file)!r}: {error.strerror}; "
                    f"they need {2 * num_tokens * len(self.layers) * target.hidden_size:,} bytes"
                ) from None
        self._array = np.memmap(self.file, dtype=np.float16, mode="r", shape=shape)

    def read(self, sources: NDArray[np.int64], layers: Seq[int], device: torch.device) -> dict[int, Tensor]:
        """Layer to float32 [B, T, hidden] of the tokens at `sources` [B, T]; arbitrary values on padding."""
        at = np.maximum(sources, 0)
        return {
            layer: torch.from_numpy(self._array[at, self.layers.index(layer)]).to(device).float()
            for layer in sorted(set(layers))
        }

    def _fill(
        self,
        target: FrozenTarget,
        documents: Seq[NDArray[np.int64]],
        shape: tuple[int, ...],
        on_progress: Callable[[int, int], None],
        pass_tokens: int = 4096,
    ) -> None:
        """Compute all documents, in passes of about `pass_tokens` tokens over documents of similar length."""
        offsets = np.cumsum([0, *map(len, documents)])
        order = sorted(range(len(documents)), key=lambda i: -len(documents[i]))
        done = 0
        with self.file.open("wb") as stream:
            # Allocate the file, so that a full disk fails here and not when a mapped page is written.
            os.posix_fallocate(stream.fileno(), 0, 2 * int(np.prod(shape)))
        array = np.memmap(self.file, dtype=np.float16, mode="r+", shape=shape)
        while done < len(order):
            width = len(documents[order[done]])
            group = order[done : done + max(1, pass_tokens // width)]
            token_ids = torch.zeros(len(group), width, dtype=torch.int64)
            numbers = torch.full((len(group), width), -1)
            for row, i in enumerate(group):
                token_ids[row, : len(documents[i])] = torch.from_numpy(documents[i])
                numbers[row, : len(documents[i])] = 0
            positions = torch.arange(width).expand(len(group), width)
            mask = block_diagonal_mask(numbers.to(target.device), target.dtype)
            states = target.hidden_states(
                token_ids.to(target.device), positions.to(target.device), mask, self.layers
            )
            for row, i in enumerate(group):
                for place, layer in enumerate(self.layers):
                    state = states[layer][row, : len(documents[i])].clamp(-_LARGEST, _LARGEST)
                    array[offsets[i] : offsets[i + 1], place] = state.half().cpu().numpy()
            done += len(group)
            on_progress(done, len(order))
        array.flush()


@torch.no_grad()
def check_plain_head(model: Any, device: torch.device) -> None:
    """Raise `UnsupportedModelError` unless the logits are the output layer's alone."""
    probe = torch.arange(min(8, text_config(model.config).vocab_size), device=device)[None]
    mask = block_diagonal_mask(torch.zeros_like(probe), torch.float32)
    positions = torch.arange(probe.shape[1], device=device)[None]
    given = {"input_ids": probe, "position_ids": positions, "attention_mask": mask, "use_cache": False}
    hidden = model.base_model(**given).last_hidden_state
    if not torch.allclose(model.get_output_embeddings()(hidden), model(**given).logits, rtol=1e-3, atol=1e-3):
        raise UnsupportedModelError(
            f"{model.config.model_type} changes its logits after the output layer; such models cannot be trained with"
        )
