"""The target's hidden states of the training data, kept on disk within a bound.

A folder holds the layers that were wanted of the first documents, as many as the bound allows; what is not there is
computed anew. It belongs to one target and one list of documents. For every token there is also room for what the
target would say next: its most probable token, and the logarithm of the sum of all exponentials, so that a head with a
small vocabulary needs no more than the target's logits of that vocabulary.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.errors import ConfigError
from slipstream.train.attention import block_diagonal_mask
from slipstream.train.target import FrozenTarget

_LARGEST = 65504.0
"""Largest float16 number."""

_PASS_TOKENS = 4096

_TOP = np.dtype([("token", np.int32), ("log_total", np.float32)])

Identity = dict[str, Any]


class FeatureCache:
    """Hidden states in float16; reused by later runs with the same target and data, also of fewer layers."""

    def __init__(
        self,
        folder: Path,
        target: FrozenTarget,
        documents: Seq[NDArray[np.int64]],
        layers: Seq[int],
        max_bytes: int | None = None,
    ) -> None:
        """`documents` are token ids; `layers` all that are read later, besides the last one.

        Raises `ConfigError` where the folder holds features of something else, or on a full disk.
        """
        self.folder, self._target, self._documents = folder, target, documents
        layers = sorted({*layers, target.num_layers})
        kept_layers = _layers_in(folder, layers)
        size = 2 * len(kept_layers) * target.hidden_size
        total = sum(map(len, documents))
        room = None if max_bytes is None else max(0, max_bytes - _TOP.itemsize * total) // size
        self.num_documents, self.num_tokens = _fitting(documents, room)
        self.layers, self._total = kept_layers, total
        self._metadata, self._done = folder / "features.json", 0
        self._identity = _identity(target, documents, kept_layers, self.num_tokens)
        self._open()

    @property
    def is_complete(self) -> bool:
        """Whether all that fits the bound is there."""
        return self._done >= self.num_documents

    def fill(
        self,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
        stop: Callable[[], bool] = lambda: False,
        save_every_s: float = 15.0,
    ) -> bool:
        """Compute what is not there yet, until `stop` says so; returns whether all is there.

        A later call, also of another process after a kill, continues where this one ended.
        """
        saved = time.monotonic()
        for done in self._computed(self._done):
            on_progress(done, self.num_documents)
            stopped = stop()
            if stopped or done == self.num_documents or time.monotonic() - saved >= save_every_s:
                self._features.flush()
                self._done = done
                self._write_metadata()
                saved = time.monotonic()
            if stopped:
                break
        return self.is_complete

    def holds(self, sources: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of the tokens, by their index in the concatenated documents (-1 is none), have features here."""
        return (sources >= 0) & (sources < self.num_tokens)

    def read(self, sources: NDArray[np.int64], layers: Seq[int], device: torch.device) -> dict[int, Tensor]:
        """Layer to float32 [B, T, hidden] of the tokens at `sources` [B, T]; arbitrary where `holds` is false."""
        at = np.where(self.holds(sources), sources, 0)
        return {
            layer: torch.from_numpy(self._features[at, self.layers.index(layer)]).to(device).float()
            for layer in sorted(set(layers))
        }

    def tops(self, sources: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """(the target's most probable next token, -1 where it was not kept yet; the logarithm of the sum of the
        exponentials of its logits), each [n]."""
        rows = self._tops[np.maximum(sources, 0)]
        return np.where(sources >= 0, rows["token"].astype(np.int64) - 1, -1), rows["log_total"]

    def keep_tops(
        self, sources: NDArray[np.int64], tokens: NDArray[np.int64], log_totals: NDArray[np.float32]
    ) -> None:
        """Keep what `tops` gives."""
        known = sources >= 0
        rows = np.empty(int(known.sum()), dtype=_TOP)
        rows["token"], rows["log_total"] = tokens[known] + 1, log_totals[known]  # 0 is a new file's content
        self._tops[sources[known]] = rows

    def _open(self) -> None:
        """Open the files, or make them."""
        found = _read_metadata(self._metadata)
        try:
            if found is not None:
                _refuse_others(found["identity"], self._identity, self.folder)
                self._done = int(found["done"])
            else:
                self.folder.mkdir(parents=True, exist_ok=True)
                for name, size in (
                    ("features.f16", self._num_bytes),
                    ("tops.bin", _TOP.itemsize * self._total),
                ):
                    with (self.folder / name).open("wb") as stream:
                        # Allocate the file, so that a full disk fails here and not when a mapped page is written.
                        os.posix_fallocate(stream.fileno(), 0, max(size, 1))
                self._write_metadata()
            shape = (max(self.num_tokens, 1), len(self.layers), self._target.hidden_size)
            if not self.num_tokens:
                self._features: Any = np.zeros(shape, dtype=np.float16)
            else:
                self._features = np.memmap(self.folder / "features.f16", np.float16, "r+", shape=shape)
            self._tops = np.memmap(self.folder / "tops.bin", _TOP, "r+", shape=(self._total,))
        except (OSError, ValueError) as error:
            raise self._cannot_keep(error) from None

    @property
    def _num_bytes(self) -> int:
        return 2 * self.num_tokens * len(self.layers) * self._target.hidden_size

    def _cannot_keep(self, error: Exception) -> ConfigError:
        reason = getattr(error, "strerror", None) or error
        return ConfigError(
            f"cannot keep the target's features in {str(self.folder)!r}: {reason}; they need {self._num_bytes:,} "
            "bytes, --feature-cache-bytes bounds them"
        )

    def _write_metadata(self) -> None:
        partial = self._metadata.with_suffix(".partial")
        partial.write_text(json.dumps({"identity": self._identity, "done": self._done}))
        partial.replace(self._metadata)

    def _computed(self, done: int) -> Iterator[int]:
        """Compute documents of similar length together, from the longest to the shortest; yields how many are done."""
        documents = self._documents[: self.num_documents]
        offsets = np.cumsum([0, *map(len, documents)])
        order = sorted(range(len(documents)), key=lambda i: -len(documents[i]))
        while done < len(order):
            group = order[done : done + max(1, _PASS_TOKENS // len(documents[order[done]]))]
            states = _states(self._target, [documents[i] for i in group], self.layers)
            for row, i in enumerate(group):
                for place, layer in enumerate(self.layers):
                    state = states[layer][row, : len(documents[i])].clamp(-_LARGEST, _LARGEST)
                    self._features[offsets[i] : offsets[i + 1], place] = state.half().cpu().numpy()
            done += len(group)
            yield done


def _states(target: FrozenTarget, documents: Seq[NDArray[np.int64]], layers: Seq[int]) -> dict[int, Tensor]:
    """Layer to [documents, longest, hidden]; the first document is the longest."""
    shape = (len(documents), len(documents[0]))
    token_ids, numbers = torch.zeros(shape, dtype=torch.int64), torch.full(shape, -1)
    for row, document in enumerate(documents):
        token_ids[row, : len(document)] = torch.from_numpy(document)
        numbers[row, : len(document)] = 0
    positions = torch.arange(shape[1]).expand(shape)
    mask = block_diagonal_mask(numbers.to(target.device), target.dtype)
    return target.hidden_states(token_ids.to(target.device), positions.to(target.device), mask, layers)


def _fitting(documents: Seq[NDArray[np.int64]], room: int | None) -> tuple[int, int]:
    """How many of the first documents have at most `room` tokens together, and how many tokens they have."""
    ends = np.cumsum([0, *map(len, documents)])
    number = len(documents) if room is None else int(np.searchsorted(ends, room, side="right")) - 1
    return number, int(ends[number])


def _identity(
    target: FrozenTarget, documents: Seq[NDArray[np.int64]], layers: Seq[int], num_tokens: int
) -> Identity:
    data = hashlib.sha256()
    for document in documents:
        data.update(len(document).to_bytes(8, "little") + document.astype("<i8").tobytes())
    return {
        "target": target.fingerprint(),
        "data": data.hexdigest(),
        "type of matrix products": str(target.dtype),
        "layers": list(layers),
        "number of tokens within the bound": num_tokens,
    }


def _read_metadata(file: Path) -> dict[str, Any] | None:
    """What the file says, None without one; raises `ConfigError` where it is something else."""
    try:
        found = json.loads(file.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        found = None
    if not isinstance(found, dict) or not found.keys() >= {"identity", "done"}:
        raise ConfigError(f"{str(file)!r} does not describe features; delete {str(file.parent)!r}")
    return found


def _layers_in(folder: Path, layers: Seq[int]) -> list[int]:
    """The layers that a cache in `folder` has, if they include `layers`; otherwise `layers`."""
    found = _read_metadata(folder / "features.json")
    kept: list[int] = found["identity"].get("layers", []) if found is not None else []
    return kept if set(layers) <= set(kept) else list(layers)


def _refuse_others(found: Identity, identity: Identity, folder: Path) -> None:
    for name, value in identity.items():
        if found.get(name) != value:
            said = "" if name in ("target", "data") else f": {found.get(name)}, not {value}"
            raise ConfigError(
                f"{str(folder)!r} holds features of another {name}{said}; delete it, or choose another folder"
            )
