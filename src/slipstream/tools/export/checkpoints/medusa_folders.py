"""Writes Medusa heads as the folder that vLLM loads."""

from __future__ import annotations

import functools
from pathlib import Path

import torch

from slipstream.draft.heads.checkpoints import read_checkpoint
from slipstream.draft.heads.medusa_head import WEIGHT_FILES, MedusaHeads, load_medusa, save_medusa
from slipstream.draft.heads.target_shape import check_fits
from slipstream.tools.export.checkpoints.converted import ConvertedCheckpoint
from slipstream.tools.export.checkpoints.target_files import TargetFiles


def read_medusa(path: str, target: TargetFiles, revision: str | None = None) -> MedusaHeads:
    """The heads in a folder or on the hub, in the widest dtype of their file; raises `ModelError`."""
    _, tensors = read_checkpoint(path, revision=revision, weight_files=WEIGHT_FILES)
    heads = load_medusa(path, _not_called, revision)
    check_fits(path, heads.config.hidden_size, heads.config.vocab_size, target)
    dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors.values()))
    return heads.requires_grad_(False).to(dtype)


def write_medusa(heads: MedusaHeads, target: TargetFiles, folder: Path) -> ConvertedCheckpoint:
    """Write `heads` for vLLM up to 0.32; heads that share the target's output layer get a copy of it."""
    shared = heads.config.shares_lm_head
    save_medusa(heads, folder, lm_head=target.output_layer() if shared else None)
    notes = ["vLLM drafts a greedy chain with Medusa heads, one token a head"]
    if shared:
        notes.append("the file holds a copy of the target's output layer, which the heads share")
    files = (folder / "config.json", folder / WEIGHT_FILES[0])
    return ConvertedCheckpoint(draft=folder, files=files, notes=tuple(notes))


def _not_called(states: torch.Tensor) -> torch.Tensor:
    raise AssertionError("heads that are only read are not run")
