"""The vocabulary of a head on disk: which of the target's tokens it drafts, and an embedding table of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.draft.heads.checkpoints import TargetShape
from slipstream.errors import ModelError

_ROWS_AT_ONCE = 4096


def draft_token_ids(
    offsets: Tensor | None, known: Tensor | None, draft_vocab_size: int, vocab_size: int, path: str
) -> Tensor:
    """[draft vocab]: the target's ids of the draft tokens.

    `offsets` (`d2t` in files) is added to the draft's own ids; `known` (`t2d`) marks the target's tokens that it has.
    Raises `ModelError` where they do not fit each other or the sizes.
    """
    ids = torch.arange(draft_vocab_size)
    if offsets is None:
        if draft_vocab_size != vocab_size:
            raise ModelError(
                f"{path!r} drafts {draft_vocab_size} of {vocab_size} tokens but has no tensor d2t"
            )
        return ids
    if len(offsets) != len(ids):
        raise ModelError(f"{path!r}: d2t maps {len(offsets)} tokens, but the head drafts {len(ids)}")
    ids = ids + offsets.long()
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size or len(set(ids.tolist())) != len(ids):
        raise ModelError(f"{path!r}: d2t is not a one-to-one map into the target's {vocab_size} tokens")
    if known is not None and not torch.equal(known.nonzero()[:, 0], ids.sort().values):
        raise ModelError(f"{path!r}: t2d and d2t name different tokens")
    return ids


def vocabulary_tensors(ids: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """The tensors `d2t` and `t2d` for a head that drafts the tokens `ids` [draft vocab] of its target."""
    ids = ids.cpu()
    known = torch.zeros(vocab_size, dtype=torch.bool)
    known[ids] = True
    return {"d2t": ids - torch.arange(len(ids)), "t2d": known}


def own_embedding(table: Tensor | None, target: TargetShape, path: str) -> Tensor | None:
    """The head's own embedding table; None where it has none or a copy of the target's."""
    if table is None:
        return None
    if table.shape[0] != target.vocab_size:
        raise ModelError(f"{path!r} embeds {table.shape[0]} tokens, the target has {target.vocab_size}")
    if table.shape[1] != target.hidden_size:
        return table
    for token_ids in torch.split(torch.arange(target.vocab_size), _ROWS_AT_ONCE):
        mine = target.embed(token_ids).float().cpu()
        # The tolerance covers half-precision copies of one table.
        if not torch.allclose(mine, table[token_ids].float(), rtol=0.01, atol=1e-4):
            return table
    return None
