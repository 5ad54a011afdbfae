"""Vocabulary maps of heads that draft a part of the target's vocabulary.

Safetensors checkpoints store offsets (`target id = draft id + d2t[draft id]`), GGUF files the target's ids themselves,
and frequency-ranked heads of EAGLE-1 a list of ids in a file of its own. A map read the wrong way has plausible shapes
and drafts nonsense, so the kind is told from the numbers.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

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
