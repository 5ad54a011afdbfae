"""What a head's checkpoint says of itself, read from `config.json` and the names of its tensors; no torch.

Of heads that draft a part of the target's vocabulary, safetensors checkpoints store offsets (`target id = draft id +
d2t[draft id]`), GGUF files the target's ids themselves, and frequency-ranked heads of EAGLE-1 a list of ids in a file
of its own. A map read the wrong way has plausible shapes and drafts nonsense, so the kind is recognised by the numbers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from slipstream.config import reject_unknown
from slipstream.core.model_path import names_gguf
from slipstream.draft.methods import (
    DFLASH,
    EAGLE,
    EAGLE3,
    HEADS,
    HYDRA,
    MEDUSA,
    MTP,
    PEAGLE,
    kind_of_checkpoint,
)
from slipstream.errors import ModelError

Ids = NDArray[np.int64]

KINDS = ("offset", "absolute", "hot_ids")


def to_offsets(ids: Ids) -> Ids:
    """[draft vocabulary] target ids -> what is added to a draft id to get them."""
    return ids - np.arange(len(ids), dtype=np.int64)


def to_absolute(offsets: Ids) -> Ids:
    """The inverse of `to_offsets`."""
    return offsets + np.arange(len(offsets), dtype=np.int64)


def kind_of_map(d2t: Ids, vocab_size: int, t2d: NDArray[np.bool_] | None = None) -> str:
    """`offset` or `absolute`: how `d2t` names tokens of a target with `vocab_size` tokens.

    `t2d` marks the target's tokens that are drafted and decides where it is there. Raises `ModelError` where neither
    reading is a map of different tokens, or where both name other tokens than `t2d`.
    """
    readings = {"offset": to_absolute(d2t), "absolute": d2t}
    valid = {kind: ids for kind, ids in readings.items() if _is_map(ids, vocab_size)}
    if t2d is not None:
        known = np.flatnonzero(t2d)
        valid = {kind: ids for kind, ids in valid.items() if np.array_equal(np.sort(ids), known)}
    if not valid:
        raise ModelError(
            f"the vocabulary map d2t of {len(d2t):,} tokens fits neither as offsets nor as ids of a target with "
            f"{vocab_size:,} tokens"
            + (" that t2d marks" if t2d is not None else "")
            + "; export the head again"
        )
    if len(valid) == 1:
        return next(iter(valid))
    # Both fit. Ids in order grow with every token; offsets grow only where a token is left out.
    return "absolute" if bool(np.all(np.diff(d2t) > 0)) else "offset"


def _is_map(ids: Ids, vocab_size: int) -> bool:
    within = len(ids) > 0 and int(ids.min()) >= 0 and int(ids.max()) < vocab_size
    return within and len(np.unique(ids)) == len(ids)


CONVENTIONS = ("before_layer", "after_layer")
"""Two numberings of a hidden state: by the layer that reads it (EAGLE's own code, vLLM, Slipstream), and by the layer
that wrote it, one less (SpecForge, TensorRT-LLM, and SGLang's explicit ids)."""
SPECULATORS = "speculators"
"""The layout of that library, whose heads are EAGLE-3's."""
DSPARK = "dspark"
"""DFlash heads of which the last committed token's row drafts too: other engines have a method of its own for them."""
WEIGHTS = ("model.safetensors", "medusa_lm_head.safetensors", "hydra_lm_head.safetensors")


@dataclass(frozen=True)
class VocabularyMap:
    """The part of the target's vocabulary that a head drafts."""

    kind: str
    """`offset`, `absolute` or `hot_ids`, see above."""
    num_tokens: int
    file: str | None = None
    """With `hot_ids`: the file of the list."""

    def __post_init__(self) -> None:
        reject_unknown([self.kind], KINDS, "kind of vocabulary map")


@dataclass(frozen=True)
class AuxLayers:
    """The target's hidden states that an EAGLE-3 head reads."""

    ids: tuple[int, ...]
    convention: str = "before_layer"

    def __post_init__(self) -> None:
        reject_unknown([self.convention], CONVENTIONS, "layer convention")
        object.__setattr__(self, "ids", tuple(self.ids))

    def as_convention(self, convention: str) -> AuxLayers:
        """The same hidden states in another numbering."""
        reject_unknown([convention], CONVENTIONS, "layer convention")
        step = CONVENTIONS.index(self.convention) - CONVENTIONS.index(convention)
        return AuxLayers(tuple(layer + step for layer in self.ids), convention)


@dataclass(frozen=True, kw_only=True)
class HeadNorms:
    """Where an EAGLE-3 head normalises; None: its configuration does not say, and engines' defaults differ."""

    before_residual: bool | None = None
    before_fc: bool | None = None
    fc_norm: bool | None = None
    output: bool | None = None


@dataclass(frozen=True, kw_only=True)
class HeadInfo:
    """A head of EAGLE, Medusa, Hydra or DSpark, or a layer for multi-token prediction."""

    layout: str
    """`eagle`, `eagle3`, `speculators`, `medusa`, `hydra`, `dspark` or `mtp`."""
    version: int = 0
    """Version of EAGLE, 1 or 3; 0 for others."""
    num_layers: int = 1
    reads_masks: bool = False
    """Whether it drafts all its tokens in one pass (P-EAGLE)."""
    num_heads: int | None = None
    """Heads of Medusa and Hydra."""
    vocabulary: VocabularyMap | None = None
    """None: the whole of the target's."""
    aux_layers: AuxLayers | None = None
    """None: the configuration does not say, and engines' defaults differ."""
    norms: HeadNorms = HeadNorms()
    embedding: str | None = "shared"
    """`own` or `shared` with the target; None: the weights are in a format that is not read for this."""
    output: str | None = "shared"
    """Form of the output layer, likewise."""
    num_positions: int | None = None
    """Longest text that its rotary embedding was made for."""

    @property
    def method(self) -> str:
        """The method that runs it."""
        if self.reads_masks:
            return PEAGLE.name
        return {SPECULATORS: EAGLE3.name, DSPARK: DFLASH.name}.get(self.layout, self.layout)


def read_config(folder: str | Path) -> dict[str, Any] | None:
    """`config.json` of a folder; None where there is no such file. Raises `ModelError` where it cannot be read."""
    file = Path(folder) / "config.json"
    if not file.is_file():
        return None
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {str(file)!r}: {error}") from None
    if not isinstance(config, dict):
        raise ModelError(f"{str(file)!r} is not a JSON object")
    return config


def context_length(folder: str | None) -> int | None:
    """Longest text of a model in a local folder, in tokens; None where nothing says."""
    config = read_config(folder) if folder and Path(folder).is_dir() else None
    length = (config or {}).get("max_position_embeddings")
    return length if isinstance(length, int) else None


def head_info(folder: str | Path) -> HeadInfo | None:
    """The info of the head in a local folder; None for anything else, but for DSpark's heads in a GGUF file.

    Raises `ModelError` for a damaged checkpoint.
    """
    if names_gguf(str(folder)):
        return HeadInfo(layout=DSPARK) if _is_dspark_file(Path(folder)) else None
    config = read_config(folder) if Path(folder).is_dir() else None
    if config is None:
        return None
    layout = _layout(config)
    if layout is None:
        return None
    if layout in (MEDUSA.name, HYDRA.name):
        return HeadInfo(layout=layout, num_heads=config.get(f"{layout}_num_heads") or config.get("num_heads"))
    if layout == DSPARK:
        return HeadInfo(layout=layout)
    if layout == MTP.name:
        return HeadInfo(layout=layout, num_layers=config.get("num_nextn_predict_layers", 1))
    return _eagle_info(layout, config, _Tensors(Path(folder)))


def _layout(config: Mapping[str, Any]) -> str | None:
    kind = kind_of_checkpoint(config)
    if kind == DFLASH.name:  # each engine reads these heads as they are, or not at all
        return DSPARK if _is_dspark(config) else None
    if kind in (EAGLE3.name, PEAGLE.name):
        return SPECULATORS if "speculators_model_type" in config else EAGLE3.name
    return kind if kind in HEADS else None


def _is_dspark(config: Mapping[str, Any]) -> bool:
    """Whether a DFlash head is DSpark's, as `draft.heads.dflash_layouts` tells them, and its anchor's row drafts."""
    own = {**config, **(config.get("dflash_config") or {})}
    named = "".join(map(str, config.get("architectures") or ()))
    is_so = "DSpark" in named or DSPARK in (own.get("projector_type"), config.get("speculators_model_type"))
    return is_so and own.get("sample_from_anchor") is not False


def _is_dspark_file(file: Path) -> bool:
    if not file.is_file():
        return False
    from slipstream.models.files.gguf import open_gguf

    opened = open_gguf(str(file))
    from_anchor = opened.fields.get(f"{DFLASH.name}.sample_from_anchor", True)
    return opened.architecture == DFLASH.name and "markov_w1.weight" in opened.tensors and bool(from_anchor)


def _eagle_info(layout: str, config: Mapping[str, Any], tensors: _Tensors) -> HeadInfo:
    layer = config.get("transformer_layer_config") or config
    nested = config.get("eagle_config") or {}
    layers = nested.get("eagle_aux_hidden_state_layer_ids") or config.get("eagle_aux_hidden_state_layer_ids")
    return HeadInfo(
        layout=layout,
        version=1 if layout == EAGLE.name else 3,
        reads_masks=kind_of_checkpoint(config) == PEAGLE.name,
        num_layers=int(layer.get("num_hidden_layers", 1)),
        vocabulary=tensors.vocabulary(layer.get("vocab_size") or 0, config.get("draft_vocab_size") or 0),
        aux_layers=None if not layers else AuxLayers(tuple(layers)),
        norms=HeadNorms(
            before_residual=config.get("norm_before_residual"),
            before_fc=config.get("norm_before_fc"),
            fc_norm=config.get("fc_norm"),
            output=config.get("norm_output"),
        ),
        embedding=tensors.whose("embed_tokens.weight"),
        output=tensors.whose("lm_head.weight"),
        num_positions=layer.get("max_position_embeddings"),
    )


class _Tensors:
    """The safetensors file of a folder: names, and the small tensors of a vocabulary map."""

    def __init__(self, folder: Path) -> None:
        self._file = next((folder / name for name in WEIGHTS if (folder / name).is_file()), None)
        self._names: frozenset[str] | None = None
        if self._file is None:
            return
        try:
            with safe_open(self._file, framework="numpy") as opened:
                self._names = frozenset(opened.keys())
        except (SafetensorError, OSError) as error:
            raise ModelError(f"cannot read {str(self._file)!r}: {error}") from None

    def whose(self, name: str) -> str | None:
        """`own` where the file has the tensor, `shared` where not; None without a safetensors file."""
        return None if self._names is None else "own" if name in self._names else "shared"

    def vocabulary(self, vocab_size: int, draft_vocab_size: int) -> VocabularyMap | None:
        """The map of `d2t`, None without one. Weights in PyTorch's own format are not read, and hold offsets."""
        if self._names is None or self._file is None:
            return VocabularyMap("offset", draft_vocab_size) if 0 < draft_vocab_size < vocab_size else None
        if "d2t" not in self._names:
            return None
        with safe_open(self._file, framework="numpy") as opened:
            d2t = opened.get_tensor("d2t").astype("int64")
            t2d = opened.get_tensor("t2d").astype(bool) if "t2d" in self._names else None
        return VocabularyMap(kind_of_map(d2t, vocab_size, t2d), len(d2t))
