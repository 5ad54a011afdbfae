"""Rows of mask tokens behind packed texts: what a drafter that reads masks is trained on.

A row is a place and a depth. Depth 0 reads the text's token at the place. Depth d reads a mask in the place of the d-th
token behind it, and predicts the one after that. It sees the text up to its place and the masks of its own chain, as
when it drafts. Of the deeper rows a part is left out, more with each depth, and a row is kept only if the row before it
in its chain is (COD: An et al., "PARD", 2025, arXiv 2504.18583; P-EAGLE trains so too).
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.train.attention import PADDING
from slipstream.train.options import MaskOptions


class ChainRows(NamedTuple):
    """The rows of one packed text."""

    row: int
    """Which of the batch's packed rows it is."""
    places: Tensor
    """int64 [n]: index in the packed row of the last token of the text that is read."""
    depths: Tensor
    """int64 [n]: masks that are read behind it, this row's included."""
    seen: Tensor
    """bool [n, n]: which rows each row sees, itself included."""
    learned: Tensor
    """int64 [m]: the rows whose prediction is learned."""

    @property
    def last(self) -> Tensor:
        """int64 [n]: index in the packed row of the token that the row predicts the next one of."""
        return self.places + self.depths

    @property
    def masked(self) -> Tensor:
        """bool [n]: whether the row reads a mask."""
        return self.depths > 0


def mask_chains(
    documents: Tensor, learns: Tensor, options: MaskOptions, seed: Seq[int]
) -> Iterator[ChainRows]:
    """The rows of each packed text that has something to learn, drawn anew for each `seed`.

    `documents` int64 [B, T] has -1 where nothing is read, `learns` bool [B, T] is True where the next token is learned.
    """
    rng, device = np.random.default_rng(seed), documents.device
    for row, (numbers, wanted) in enumerate(zip(documents.cpu().numpy(), learns.cpu().numpy(), strict=True)):
        if not wanted.any():
            continue
        places, depths = _drawn(numbers, wanted, options, rng)
        learned = np.flatnonzero((depths > 0) | wanted[places])
        of = numbers[places]
        is_text = (depths == 0) & (places <= places[:, None]) & (of == of[:, None])
        is_own = (depths > 0) & (places == places[:, None]) & (depths <= depths[:, None])
        yield ChainRows(
            row, *(torch.from_numpy(each).to(device) for each in (places, depths, is_text | is_own, learned))
        )


def _drawn(
    documents: NDArray[np.int64], learns: NDArray[np.bool_], options: MaskOptions, rng: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The places and depths of the rows that are kept, depth after depth."""
    everywhere = np.flatnonzero(documents != PADDING)
    whole = kept = np.flatnonzero(learns & (documents != PADDING))
    if options.max_anchors is not None and len(kept) > options.max_anchors:
        kept = np.sort(rng.choice(kept, options.max_anchors, replace=False))
        whole = kept
    places, depths = [everywhere], [np.zeros_like(everywhere)]
    for depth in range(1, options.num_depths):
        whole, kept = (_going_on(each, depth, documents, learns) for each in (whole, kept))
        count = round(len(whole) * max(options.depth_share**depth, options.least_share))
        if len(kept) > count:
            kept = np.sort(rng.choice(kept, count, replace=False))
        if not len(kept):
            break
        places.append(kept)
        depths.append(np.full_like(kept, depth))
    return np.concatenate(places), np.concatenate(depths)


def _going_on(
    places: NDArray[np.int64], depth: int, documents: NDArray[np.int64], learns: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """Those behind which the token after the next `depth` ones is of the same document, and learned."""
    places = places[places + depth < len(documents)]
    last = places + depth
    going: NDArray[np.int64] = places[learns[last] & (documents[last] == documents[places])]
    return going
