"""An EAGLE head read for conversion: checked against its target, its tensors in the dtype of its file."""

from __future__ import annotations

import functools

import torch

from slipstream.draft.heads.checkpoints import read_checkpoint
from slipstream.draft.heads.eagle_files import read_eagle
from slipstream.draft.heads.eagle_head import EagleHead
from slipstream.draft.heads.target_shape import TargetShape


def read_head(path: str, target: TargetShape, revision: str | None = None) -> EagleHead:
    """The head in a folder or on the hub; raises `ModelError` where it is none or does not fit `target`.

    All tensors get the widest dtype of the file, so that no value changes. `embedding` is None where the head has
    none or a copy of the target's.
    """
    _, tensors = read_checkpoint(path, revision=revision)
    head = read_eagle(path, target, revision=revision)
    dtype = functools.reduce(
        torch.promote_types, (t.dtype for t in tensors.values() if t.dtype.is_floating_point)
    )
    head.requires_grad_(False).to(dtype)
    if head.embedding is not None:
        head.embedding = head.embedding.to(dtype)
    return head
